"""On import: pick the JAX backend for Keras, or refuse the one picked already."""

import os
import sys


def _require_jax_backend() -> None:
    """Pick the JAX backend for Keras, or refuse the one that was picked already.

    Raises:
        ImportError: If Keras runs, or is told to run, on another backend.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    else:
        backend = keras.config.backend()
    if backend != "jax":
        how = "Keras is running" if keras else "the environment asks Keras to run"
        raise ImportError(
            f"replicax needs Keras on its 'jax' backend, but {how} on {backend!r}. Set "
            "KERAS_BACKEND=jax in the environment, or import replicax before keras."
        )


_require_jax_backend()
