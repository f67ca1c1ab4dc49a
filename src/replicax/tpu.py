"""TPU systems, in the shape of `tf.tpu`."""

from replicax.cluster import tpu_experimental as experimental

__all__ = ["experimental"]
