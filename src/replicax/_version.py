"""The version of replicax, and the versions of packages that workers compare."""

__all__ = ["__version__", "versions"]

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of replicax, JAX and Keras in this process, by name."""
    import jax
    import keras

    return {
        "replicax": __version__,
        "jax": jax.__version__,
        "keras": keras.__version__,
    }
