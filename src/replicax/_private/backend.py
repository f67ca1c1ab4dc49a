"""Checks Keras' backend, which must be JAX, and its version."""

import os
import sys

_LAST_TESTED = "3.15.1"
_TESTED_SERIES = ("3.14.", "3.15.")


def is_tested_version(version: str) -> bool:
    """Whether releases of this version's series passed the tests."""
    return version.startswith(_TESTED_SERIES)


def version_error(what: str) -> ImportError:
    """Make the error for a version of Keras; `what` names the incompatible function."""
    version = sys.modules["keras"].__version__
    return ImportError(
        f"replicax cannot be used with Keras {version}: {what}. The last version that "
        f"replicax was tested with is {_LAST_TESTED}. Install it: pip install "
        f"keras=={_LAST_TESTED}"
    )


def require_jax_backend() -> None:
    """Select Keras' JAX backend; `ImportError` if another one is selected already."""
    keras = sys.modules.get("keras")
    if keras is None:
        backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    else:
        backend = keras.config.backend()
    if backend != "jax":
        how = "Keras is running" if keras else "the environment asks Keras to run"
        again = " Then start Python again: a restart of the kernel." * bool(keras)
        raise ImportError(
            f"replicax needs Keras on its 'jax' backend, but {how} on {backend!r}. "
            f"{_advice(backend)}{again} Models of keras.layers and keras.ops run on "
            "jax as they are."
        )


def _advice(backend: str) -> str:
    """Name the change to make, by where the other backend was selected."""
    if os.environ.get("KERAS_BACKEND") == backend:
        return (
            f"The environment variable KERAS_BACKEND names {backend!r}. Set it to jax: "
            "`export KERAS_BACKEND=jax` in the shell, or os.environ['KERAS_BACKEND'] = "
            "'jax' at the top of the script."
        )
    return (
        "Write `import replicax` above every import of keras, or set KERAS_BACKEND=jax "
        "in the environment: without either, Keras reads the backend from "
        "~/.keras/keras.json."
    )
