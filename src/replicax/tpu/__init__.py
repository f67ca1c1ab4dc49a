"""TPU systems, in the shape of `tf.tpu`."""

from replicax.tpu import experimental

__all__ = ["experimental"]
