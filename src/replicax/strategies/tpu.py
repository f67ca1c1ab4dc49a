"""`TPUStrategy`: one replica per TPU device of a slice."""

import logging
from collections.abc import Sequence

from replicax.cluster.timeouts import Timeouts
from replicax.cluster.tpu_slice import TPUClusterResolver
from replicax.cluster.tpu_system import require_single, tpu_devices
from replicax.cluster.workers import Workers
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device
from replicax.errors import ClusterConfigError
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["TPUStrategy"]

_logger = logging.getLogger("replicax")


class TPUStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on the chips of a TPU slice, on one host or many.

    A `MultiWorkerMirroredStrategy` of TPU devices: every TPU device of every host holds
    a copy of each variable, and gradients are summed over the interconnect. Start the
    same script on each host at once; JAX finds the others. The strategy changes no
    settings of XLA and libtpu, such as `LIBTPU_INIT_ARGS`.
    (TF: `tf.distribute.TPUStrategy`.)

    Args:
        tpu_cluster_resolver: The slice. Defaults to `TPUClusterResolver(tpu="")`.
        communication_options: As for `rx.MultiWorkerMirroredStrategy`, and so all that
            follow.
        cross_device_ops: The all-reduce of gradients: XLA's by default.
        replicas_per_device: Number of replicas on each device.
        shard_update: Whether to shard the optimizer's update (ZeRO stage 1).
        check_replicas_every: Number of steps between two comparisons.
        check_input: Whether to compare the hosts' first batches of each epoch.
        timeouts: The deadlines.

    Raises:
        DeviceError: If JAX has no TPU here; the message says where it was looked for.
        ClusterConfigError: If the slice's description is malformed, the resolver of
            another kind, or if a launcher has started several processes, each with a
            slice of one host; `TPUClusterResolver("local")` allows that.
        ClusterError: If a host is absent at the start-up deadline.
        RuntimeError: If JAX has started its devices already, on one of several hosts.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.TPUStrategy()  # doctest: +SKIP
        >>> strategy.num_replicas_in_sync  # doctest: +SKIP
        8
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas_per_device: int = 1,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        if tpu_cluster_resolver is None:
            tpu_cluster_resolver = TPUClusterResolver(tpu="")
        super().__init__(
            _checked(tpu_cluster_resolver),
            communication_options,
            cross_device_ops=cross_device_ops,
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
            check_replicas_every=check_replicas_every,
            check_input=check_input,
            timeouts=timeouts,
        )

    @property
    def task_id(self) -> int:
        """This process' index among those of all slices."""
        return self._workers.index

    def _join_workers(self, timeouts: Timeouts, gpus: Sequence[int] | None) -> Workers:
        workers = super()._join_workers(timeouts, gpus)
        if workers.count > 1 and workers.timeouts != timeouts:
            _logger.warning(
                "TPUStrategy: the hosts were joined before, with %r; the timeouts "
                "given here are ignored. Give them to "
                "experimental_connect_to_cluster or initialize_tpu_system, or leave "
                "these calls out.",
                workers.timeouts,
            )
        return workers

    def _find_devices(self, workers: Workers) -> list[Device]:
        devices = tpu_devices(workers, "TPUStrategy")
        if workers.count == 1 and not _checked(self._resolver).is_local:
            require_single("TPUStrategy")
        return devices


def _checked(resolver: object) -> TPUClusterResolver:
    if not isinstance(resolver, TPUClusterResolver):
        raise ClusterConfigError(
            "TPUStrategy: tpu_cluster_resolver must be a "
            f"rx.cluster_resolver.TPUClusterResolver; got {resolver!r}. For other "
            "clusters use rx.MultiWorkerMirroredStrategy(resolver)."
        )
    return resolver
