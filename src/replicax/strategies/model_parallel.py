"""`ModelParallelStrategy`: each replica's weights are sharded over several devices."""

from collections.abc import Mapping, Sequence

from replicax._util.arguments import require_count
from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.timeouts import Timeouts
from replicax.engine.aggregation import Rule
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device
from replicax.engine.layouts import ModelSplit
from replicax.errors import DeviceError
from replicax.strategies import layout_maps
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["ModelParallelStrategy"]


class ModelParallelStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training with tensor parallelism: sharded weights of layers.

    The devices are a grid: `model_parallel` devices work on one replica, each with its
    shard of weights and optimizer state, and the replicas divide the global batch.
    Results are those of a single device; XLA adds the communication between a replica's
    devices. (Keras: `keras.distribution.ModelParallel`.)

    With a launcher or a resolver, there are replicas on all workers; the devices of
    one replica belong to one worker.

    Args:
        layout_map: The sharding of weights over the axis `"model"`: a
            `keras.distribution.LayoutMap`, or a dict of regular expressions on
            variables' paths, such as `rx.layout_maps.TRANSFORMER`. A weight that no
            expression matches is replicated. None: shards each weight of 1,024 elements
            or more along its largest dimension that the devices divide.
        model_parallel: Number of devices of one replica. None: all devices of a worker.
        devices: As for `rx.MirroredStrategy`; on one machine only. Neighbours work on
            the same replica.
        cluster_resolver: As for `rx.MultiWorkerMirroredStrategy`.
        cross_device_ops: The all-reduce of gradients over the replicas.
        communication_options: Options of the gradients' communication.
        aggregation: Rules for state, as for `rx.MirroredStrategy`.
        shard_update: Whether to shard the optimizer's update over the replicas as well.
        check_replicas_every: Number of steps between two comparisons of the variables
            that are not sharded.
        check_input: As for `rx.MultiWorkerMirroredStrategy`.
        timeouts: As for `rx.MultiWorkerMirroredStrategy`.

    Raises:
        DeviceError: For an unknown, absent or repeated device, several kinds, `devices`
            for several workers, or a number of devices that `model_parallel` does not
            divide.
        TypeError: For a `layout_map` of another type.
        ValueError: For buckets of gradients, for other axis names in `layout_map`, and,
            when a weight is created, for a dimension that the devices do not divide.
        ClusterConfigError: As for `rx.MultiWorkerMirroredStrategy`.
        ClusterError: As for `rx.MultiWorkerMirroredStrategy`.

    Example:
        >>> import keras, replicax as rx
        >>> strategy = rx.ModelParallelStrategy(rx.layout_maps.DENSE, model_parallel=1)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> tuple(model.layers[0].kernel.value.sharding.spec)
        (None, 'model')
    """

    def __init__(
        self,
        layout_map: object = None,
        model_parallel: int | None = None,
        *,
        devices: Sequence[str | Device] | None = None,
        cluster_resolver: ClusterResolver | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        aggregation: Mapping[str, Rule] | None = None,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        name = "ModelParallelStrategy"
        if model_parallel is not None:
            what = f"{name}: model_parallel"
            require_count(model_parallel, what, 1, otherwise=" or None")
        packs = getattr(communication_options, "bytes_per_pack", 0)
        if packs or getattr(cross_device_ops, "num_packs", 0) > 1:
            raise ValueError(
                f"{name}: gradients cannot be summed in buckets (bytes_per_pack, "
                "num_packs): a bucket would gather gradients that are sharded over a "
                "replica's devices. Leave these options out."
            )
        self._layout_map = layout_map
        self._model_parallel = model_parallel
        self._devices_argument = devices
        super().__init__(
            cluster_resolver,
            communication_options,
            cross_device_ops=cross_device_ops,
            aggregation=aggregation,
            shard_update=shard_update,
            check_replicas_every=check_replicas_every,
            check_input=check_input,
            timeouts=timeouts,
        )

    def _model_split(self, num_local: int) -> ModelSplit:
        name = "ModelParallelStrategy"
        num = num_local if self._model_parallel is None else self._model_parallel
        if num_local % num:
            raise DeviceError(
                f"{name}: model_parallel={num} does not divide the {num_local} devices"
                f"{' of a worker' if self._resolver.cluster_spec() else ''}. "
                "Every replica needs the same number of them."
            )
        return ModelSplit(
            num_devices=num,
            axis_name=layout_maps.MODEL_AXIS,
            spec=layout_maps.rule(self._layout_map, num, name),
        )
