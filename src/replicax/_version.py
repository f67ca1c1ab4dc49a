"""The version of replicax, read by the build here; those that a cluster shares."""

__all__ = ["__version__", "versions"]

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """The versions of replicax, JAX and Keras in this process, by name."""
    import jax
    import keras

    return {
        "replicax": __version__,
        "jax": jax.__version__,
        "keras": keras.__version__,
    }
