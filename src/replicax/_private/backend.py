"""Which Keras this is: its backend, which must be JAX, and its version."""

import json
import os
import sys
from pathlib import Path

__all__ = ["is_tested_version", "require_jax_backend", "version_error"]

_LAST_TESTED = "3.15.1"
_TESTED_SERIES = ("3.14.", "3.15.")


def is_tested_version(version: str) -> bool:
    """Whether releases of this version's series passed the tests."""
    return version.startswith(_TESTED_SERIES)


def version_error(what: str) -> ImportError:
    """The error where this version of Keras lacks what replicax uses.

    Args:
        what: What it lacks, or has in another form.
    """
    version = sys.modules["keras"].__version__
    # Both packages have the folder `keras`, and leave files of theirs in it.
    install = f"pip install keras=={_LAST_TESTED}"
    if ".dev" in version:
        install = f"pip uninstall --yes keras keras-nightly && {install}"
    return ImportError(
        f"replicax cannot be used with Keras {version}: {what}. The last version that "
        f"replicax was tested with is {_LAST_TESTED}. Install it: {install}"
    )


_SET_IT = (
    "Set it to jax: `export KERAS_BACKEND=jax` in the shell, or "
    "os.environ['KERAS_BACKEND'] = 'jax' at the top of the script."
)
_FIRST = "Write `import replicax` above every import of keras"


def require_jax_backend() -> None:
    """Select the JAX backend for Keras, or raise if another one is selected already.

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
        again = " Then start Python again: a restart of the kernel." * bool(keras)
        raise ImportError(
            f"replicax needs Keras on its 'jax' backend, but {how} on {backend!r}. "
            f"{_advice(backend)}{again} Models of keras.layers and keras.ops run on "
            "jax as they are."
        )


def _advice(backend: str) -> str:
    """Say what to change, by where the other backend was selected."""
    if os.environ.get("KERAS_BACKEND") == backend:
        return f"The environment variable KERAS_BACKEND names {backend!r}. {_SET_IT}"
    file = _config_file()
    if _chosen_in(file) == backend:
        # Keras itself writes "tensorflow" there when it runs first.
        return (
            f"{_FIRST}, or set KERAS_BACKEND=jax in the environment: without either, "
            f'Keras takes what {file} says. Write "backend": "jax" there for all '
            "programs."
        )
    return f"{_FIRST}, or set KERAS_BACKEND=jax in the environment."


def _config_file() -> Path:
    home = os.environ.get("KERAS_HOME")
    return (Path(home) if home else Path("~/.keras").expanduser()) / "keras.json"


def _chosen_in(file: Path) -> str | None:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):  # Keras ignores such a file, too.
        return None
