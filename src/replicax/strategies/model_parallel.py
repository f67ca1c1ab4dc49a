"""ModelParallelStrategy: each replica's weights are split over several devices."""

import logging
from collections.abc import Sequence

import jax
from jax.typing import ArrayLike

from replicax.cluster.resolvers import ClusterResolver
from replicax.cluster.timeouts import Timeouts, takes_timeouts
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device
from replicax.engine.layouts import ModelSplit
from replicax.engine.program import Program
from replicax.errors import DeviceError
from replicax.strategies import layout_maps
from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["ModelParallelStrategy"]

_logger = logging.getLogger("replicax")


@takes_timeouts()
class ModelParallelStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training with the layers' weights split over devices.

    The devices are a grid: `model_parallel` of them work on one replica, each with its
    part of the layers' weights and slots, and the replicas divide the global batch.
    What is computed is what one device would compute; XLA adds the communication
    between a replica's devices. (Keras: `keras.distribution.ModelParallel`.)

    With `TF_CONFIG` or a resolver, the replicas are those of all workers; the devices
    of one replica are of one worker.

    Args:
        layout_map: How weights are split over the axis `"model"`: a
            `keras.distribution.LayoutMap`, or a dict of regular expressions on
            variables' paths, such as `rx.layout_maps.TRANSFORMER`. What no expression
            matches is whole on each device. None: every weight of 1,024 elements or
            more along its largest dimension that divides.
        model_parallel: Number of devices that work on one replica. None: all of a
            worker.
        devices: As for `rx.MirroredStrategy`; on one machine only. Neighbours work on
            the same replica.
        cluster_resolver: As for `rx.MultiWorkerMirroredStrategy`.
        cross_device_ops: How gradients are summed over the replicas.
        communication_options: What happens to gradients on their way.
        shard_update: Whether the replicas divide the optimizer's update as well.
        check_replicas_every: Compare the replicas' variables, those that are whole on
            every device, after every that many steps.
        check_input: As for `rx.MultiWorkerMirroredStrategy`.
        timeouts: Likewise.

    Raises:
        DeviceError: For an unknown, absent or repeated device, several kinds, `devices`
            for several workers, or a number of devices that `model_parallel` does not
            divide.
        TypeError: For a `layout_map` of another type.
        ValueError: For packs of gradients, for other axis names in `layout_map`, and,
            when a weight is made, for a dimension that cannot be split.
        ClusterConfigError: As `rx.MultiWorkerMirroredStrategy`.
        ClusterError: Likewise.

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
        cluster_resolver: ClusterResolver | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        name = "ModelParallelStrategy"
        if model_parallel is not None and (
            type(model_parallel) is not int or model_parallel < 1
        ):
            raise ValueError(
                f"{name}: model_parallel must be a positive integer or None; got "
                f"{model_parallel!r}."
            )
        packs = getattr(communication_options, "bytes_per_pack", 0)
        if packs or getattr(cross_device_ops, "num_packs", 0) > 1:
            raise ValueError(
                f"{name}: gradients cannot be packed (bytes_per_pack, num_packs): a "
                "pack would gather gradients that are split over a replica's devices. "
                "Leave it to XLA."
            )
        self._is_first = True
        self._layout_map = layout_map
        self._model_parallel = model_parallel
        self._given_devices = devices
        super().__init__(
            cluster_resolver,
            communication_options,
            cross_device_ops=cross_device_ops,
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
                f"{' of a worker' if self.cluster_resolver.cluster_spec() else ''}. "
                "Every replica "
                "needs the same number of them."
            )
        self._rule = layout_maps.rule(self._layout_map, num, name)
        return ModelSplit(
            num_devices=num, axis_name=layout_maps.MODEL_AXIS, spec=self._rule
        )

    def _agree_on(
        self, program: Program, values: Sequence[jax.Array], arrays: Sequence[ArrayLike]
    ) -> None:
        super()._agree_on(program, values, arrays)
        if self._is_first and layout_maps.matches_nothing(self._rule):
            _logger.warning(
                "ModelParallelStrategy: no variable's path matches an expression of "
                "layout_map, so every weight is whole on each device. The paths: %s.",
                ", ".join(v.path for v in program.variables[:5]),
            )
        self._is_first = False
