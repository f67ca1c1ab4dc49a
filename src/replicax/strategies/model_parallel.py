"""ModelParallelStrategy: each replica's weights are split over several devices."""

from collections.abc import Sequence
from typing import Any

from replicax import layout_maps
from replicax.collectives import CrossDeviceOps
from replicax.communication import CommunicationOptions
from replicax.devices import Device, devices_of_one_kind
from replicax.errors import DeviceError
from replicax.layouts import ModelSplit
from replicax.strategy import Strategy

__all__ = ["ModelParallelStrategy"]


class ModelParallelStrategy(Strategy):
    """Synchronous training with the layers' weights split over devices.

    The devices are a grid: `model_parallel` of them work on one replica, each with its
    part of the layers' weights and slots, and the replicas divide the global batch.
    What is computed is what one device would compute; XLA adds the communication
    between a replica's devices. (Keras: `keras.distribution.ModelParallel`.)

    Args:
        layout_map: How weights are split over the axis `"model"`: a
            `keras.distribution.LayoutMap`, or a dict of regular expressions on
            variables' paths, such as `rx.layout_maps.TRANSFORMER`. What no expression
            matches is whole on each device. None: every weight of 1,024 elements or
            more along its largest dimension that divides.
        model_parallel: Number of devices that work on one replica. None: all.
        devices: As for `rx.MirroredStrategy`. Neighbours work on the same replica.
        cross_device_ops: How gradients are summed over the replicas.
        communication_options: What happens to gradients on their way.
        shard_update: Whether the replicas divide the optimizer's update as well.
        check_replicas_every: Compare the replicas' variables after every that many
            steps. None: only when `check_replicas` is called.

    Raises:
        DeviceError: For an unknown, absent or repeated device, several kinds, or a
            number of devices that `model_parallel` does not divide.
        TypeError: For a `layout_map` of another type.
        ValueError: For packs of gradients, for other axis names in `layout_map`, and,
            when a weight is made, for a dimension that cannot be split.

    Example:
        >>> import keras, replicax as rx
        >>> strategy = rx.ModelParallelStrategy(rx.layout_maps.DENSE, model_parallel=1)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model.layers[0].kernel.value.sharding.spec
        PartitionSpec(None, 'model')
    """

    def __init__(
        self,
        layout_map: Any = None,
        model_parallel: int | None = None,
        *,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
    ) -> None:
        name = "ModelParallelStrategy"
        found = devices_of_one_kind(devices, name)
        num = len(found) if model_parallel is None else model_parallel
        if type(num) is not int or num < 1:
            raise ValueError(
                f"{name}: model_parallel must be a positive integer or None; got "
                f"{model_parallel!r}."
            )
        if len(found) % num:
            raise DeviceError(
                f"{name}: model_parallel={num} does not divide the {len(found)} "
                "devices. Every replica needs the same number of them."
            )
        packs = getattr(communication_options, "bytes_per_pack", 0)
        packs = packs or getattr(cross_device_ops, "num_packs", 0) > 1
        if packs:
            raise ValueError(
                f"{name}: gradients cannot be packed (bytes_per_pack, num_packs): a "
                "pack would gather gradients that are split over a replica's devices. "
                "Leave it to XLA."
            )
        super().__init__(
            found,
            cross_device_ops,
            communication_options=communication_options,
            shard_update=shard_update,
            split=ModelSplit(
                num_devices=num,
                axis_name=layout_maps.MODEL_AXIS,
                spec=layout_maps.rule(layout_map, num, name),
            ),
            check_replicas_every=check_replicas_every,
        )
