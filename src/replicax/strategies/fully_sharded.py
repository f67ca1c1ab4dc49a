"""`FullyShardedStrategy`: sharded weights, gathered where a replica needs them."""

from collections.abc import Mapping, Sequence

from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.timeouts import Timeouts
from replicax.engine.aggregation import Rule
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["FullyShardedStrategy"]


class FullyShardedStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training of models that are larger than one device.

    Between steps every device holds a shard of each weight and of the optimizer
    state. A step all-gathers a layer's weights for the forward pass, and again for the
    backward pass, and reduce-scatters each gradient. Results are those of
    `MirroredStrategy`. (PyTorch: FSDP; Rajbhandari et al. 2020, ZeRO stage 3.)

    A weight is sharded along its largest dimension that the number of devices divides.
    A weight without such a dimension, or with fewer than 1,024 elements, is on every
    device.

    With a launcher or a resolver, shards are spread over the devices of all workers.
    All workers take part in saving a model: every worker must call `rx.Checkpoint.save`
    or `model.save`.

    Args:
        devices: As for `rx.MirroredStrategy`; on one machine only.
        cluster_resolver: As for `rx.MultiWorkerMirroredStrategy`.
        cross_device_ops: Sums gradients over the replicas; its `scatter` sums those of
            sharded weights.
        communication_options: Options of the gradients' communication.
        aggregation: Rules for state, as for `rx.MirroredStrategy`.
        check_replicas_every: Number of steps between two comparisons of the replicas'
            copies of variables that are not sharded.
        check_input: As for `rx.MultiWorkerMirroredStrategy`.
        timeouts: As for `rx.MultiWorkerMirroredStrategy`.

    Raises:
        DeviceError: For an unknown, absent or repeated device, several kinds, or
            `devices` for several workers.
        ClusterConfigError: As for `rx.MultiWorkerMirroredStrategy`.
        ClusterError: As for `rx.MultiWorkerMirroredStrategy`.

    Example:
        >>> import keras, replicax as rx
        >>> strategy = rx.FullyShardedStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128)])
        >>> kernel = model.layers[0].kernel.value
        >>> block = kernel.addressable_shards[0].data
        >>> block.size * strategy.num_replicas_in_sync == kernel.size
        True
    """

    _shards_weights = True

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        cluster_resolver: ClusterResolver | str | None = None,
        communication_options: CommunicationOptions | None = None,
        aggregation: Mapping[str, Rule] | None = None,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._devices_argument = devices
        super().__init__(
            cluster_resolver,
            communication_options,
            cross_device_ops=cross_device_ops,
            aggregation=aggregation,
            check_replicas_every=check_replicas_every,
            check_input=check_input,
            timeouts=timeouts,
        )
