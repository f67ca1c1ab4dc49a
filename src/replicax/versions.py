"""The versions that all tasks of a cluster must have in common."""

from replicax import _version

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """The versions of replicax, JAX and Keras in this process, by name."""
    import jax
    import keras

    return {
        "replicax": _version.__version__,
        "jax": jax.__version__,
        "keras": keras.__version__,
    }
