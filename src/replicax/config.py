"""What scripts for TPUs call of `tf.config`."""

from replicax.cluster.tpu_system import experimental_connect_to_cluster

__all__ = ["experimental_connect_to_cluster"]
