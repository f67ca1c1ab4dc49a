"""What scripts for TPUs call of `tf.config`."""

import logging

from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.cluster.tpu import TPUClusterResolver
from replicax.cluster.tpu_system import join_slice
from replicax.errors import ClusterConfigError

__all__ = ["experimental_connect_to_cluster"]

_logger = logging.getLogger("replicax")


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: TPUClusterResolver | ClusterResolver | ClusterSpec,
    *,
    timeouts: Timeouts | None = None,
) -> None:
    """Join the other hosts of a TPU slice now; nothing to do on a single host.

    Every host of the slice calls it, before JAX's devices are used. The call is not
    needed: `rx.TPUStrategy` joins them too.
    (TF: `tf.config.experimental_connect_to_cluster`.)

    Args:
        cluster_spec_or_resolver: A `TPUClusterResolver`.
        timeouts: As for `rx.TPUStrategy`, to which these apply then.

    Raises:
        ClusterConfigError: For any other cluster, to which strategies connect by
            themselves.
        DeviceError: If the environment describes a slice, but there are no chips here.
        ClusterError: If a host is not there by the start-up deadline.
        RuntimeError: If JAX has started its devices already, on one of several hosts.

    Example:
        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.TPUClusterResolver()
        >>> rx.config.experimental_connect_to_cluster(resolver)
    """
    caller = "experimental_connect_to_cluster"
    if not isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        raise ClusterConfigError(
            f"{caller}: only a TPUClusterResolver's slice is joined here; got "
            f"{cluster_spec_or_resolver!r}. Leave the call out: "
            "rx.MultiWorkerMirroredStrategy(resolver) and "
            "rx.ParameterServerStrategy(resolver) connect by themselves."
        )
    limits = checked_timeouts(timeouts, caller)
    workers = join_slice(cluster_spec_or_resolver, limits, caller)
    if workers.count > 1:
        _logger.info("%s: joined %d hosts as %s", caller, workers.count, workers.name)
