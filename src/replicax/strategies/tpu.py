"""`TPUStrategy`: one replica per TPU device of a slice."""

from collections.abc import Mapping

from replicax.cluster.timeouts import Timeouts
from replicax.cluster.tpu_slice import TPUClusterResolver, checked_tpu_resolver
from replicax.cluster.tpu_system import require_single, tpu_devices
from replicax.cluster.workers import Workers
from replicax.engine.aggregation import Rule
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["TPUStrategy"]


class TPUStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on the chips of a TPU slice, on one host or many.

    A `MultiWorkerMirroredStrategy` of TPU devices: every TPU device of every host holds
    a copy of each variable, and gradients are summed over the interconnect. Start the
    same script on each host at once; JAX finds the others. The strategy changes no
    settings of XLA and libtpu, such as `LIBTPU_INIT_ARGS`.
    (TF: `tf.distribute.TPUStrategy`.)

    Args:
        tpu_cluster_resolver: The slice. Defaults to `TPUClusterResolver(tpu="")`.
        communication_options: Options of the gradients' communication.
        cross_device_ops: The all-reduce of gradients: XLA's by default.
        aggregation: Rules for state, as for `rx.MirroredStrategy`.
        replicas_per_device: Number of replicas on each device.
        shard_update: Whether to shard the optimizer's update (ZeRO stage 1).
        check_replicas_every: Number of steps between comparisons of the replicas.
        check_input: Whether to compare the hosts' first batches of each epoch.
        timeouts: The deadlines; ignored if `rx.tpu.experimental.initialize_tpu_system`
            or `rx.config.experimental_connect_to_cluster` has joined the hosts already.

    Raises:
        DeviceError: If JAX has no TPU here; the message says where replicax looked.
        ClusterConfigError: If the slice's description is malformed, if the resolver is
            not a `TPUClusterResolver`, or if a launcher has started several processes
            on slices of one host each; `TPUClusterResolver("local")` allows that.
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
        aggregation: Mapping[str, Rule] | None = None,
        replicas_per_device: int = 1,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        resolver = checked_tpu_resolver(tpu_cluster_resolver, "TPUStrategy")
        self._is_local = resolver.is_local
        super().__init__(
            resolver,
            communication_options,
            cross_device_ops=cross_device_ops,
            aggregation=aggregation,
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
            check_replicas_every=check_replicas_every,
            check_input=check_input,
            timeouts=timeouts,
        )

    @property
    def task_id(self) -> int:
        """The index of this process among the processes of all slices."""
        return self._workers.index

    def _find_devices(self, workers: Workers) -> list[Device]:
        devices = tpu_devices(workers, "TPUStrategy")
        if workers.count == 1 and not self._is_local:
            require_single("TPUStrategy")
        return devices
