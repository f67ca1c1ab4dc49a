"""Every use of a private name of Keras or JAX: why, and the versions tested."""
