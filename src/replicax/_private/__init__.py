"""Every use of a private name of Keras, JAX or Grain: why, and the versions tested."""
