"""Initializes a TPU system, in the shape of `tf.tpu.experimental`."""

from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.cluster.tpu_slice import TPUClusterResolver, checked_tpu_resolver
from replicax.cluster.tpu_system import Topology, join_slice, topology_of, tpu_devices

__all__ = ["Topology", "initialize_tpu_system", "shutdown_tpu_system"]


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None,
    *,
    timeouts: Timeouts | None = None,
) -> Topology:
    """Start the TPU chips, and return their topology.

    Every host of a slice calls it, and joins the others first. The call is optional:
    `rx.TPUStrategy` does the same.
    (TF: `tf.tpu.experimental.initialize_tpu_system`.)

    Args:
        cluster_resolver: Describes the slice; None: `TPUClusterResolver(tpu="")`.
        timeouts: The deadlines; `rx.TPUStrategy` uses them, too.

    Returns:
        The system's chips and hosts.

    Raises:
        DeviceError: If JAX has no TPU here; the message says where replicax looked.
        ClusterConfigError: For a resolver of another kind.
        ClusterError: If a host is missing at the start-up deadline.

    Example:
        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="")
        >>> rx.tpu.experimental.initialize_tpu_system(resolver)  # doctest: +SKIP
        Topology(device_kind='TPU v5 lite', num_chips=8, num_devices=8, num_hosts=2,
                 num_slices=1, mesh_shape=(2, 4, 1, 1))
    """
    caller = "initialize_tpu_system"
    resolver = checked_tpu_resolver(cluster_resolver, caller)
    workers = join_slice(resolver, checked_timeouts(timeouts, caller), caller)
    return topology_of(tpu_devices(workers, caller))


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Do nothing: JAX releases the chips when the process ends.

    It exists for scripts that call it.
    (TF: `tf.tpu.experimental.shutdown_tpu_system`.)

    Args:
        cluster_resolver: Not used.

    Example:
        >>> import replicax as rx
        >>> rx.tpu.experimental.shutdown_tpu_system()
    """
    del cluster_resolver
