"""Every private name of Keras and JAX, each with its reason and the versions tested."""
