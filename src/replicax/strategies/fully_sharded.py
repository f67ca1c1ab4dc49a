"""FullyShardedStrategy: weights in blocks, gathered where a replica needs them."""

from collections.abc import Sequence

from replicax.collectives import CrossDeviceOps
from replicax.communication import CommunicationOptions
from replicax.devices import Device, devices_of_one_kind
from replicax.strategy import Strategy

__all__ = ["FullyShardedStrategy"]


class FullyShardedStrategy(Strategy):
    """Synchronous training of models that are larger than one device.

    Between steps every device holds a block of each weight and of the optimizer's
    slots. A step gathers a layer's weights when it computes with them, in the forward
    and again in the backward pass, and sums each gradient in blocks. Results are those
    of `MirroredStrategy`. (PyTorch: FSDP; Rajbhandari et al. 2020, ZeRO stage 3.)

    A weight is divided along its largest dimension that the number of devices divides.
    Weights without one, and those of fewer than 1,024 elements, are on every device.

    Args:
        devices: As for `rx.MirroredStrategy`.
        cross_device_ops: Likewise.
        communication_options: Likewise.
        check_replicas_every: Likewise, for the variables that are on every device.

    Raises:
        DeviceError: For an unknown, absent or repeated device, or several kinds.

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

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        check_replicas_every: int | None = None,
    ) -> None:
        super().__init__(
            devices_of_one_kind(devices, "FullyShardedStrategy"),
            cross_device_ops,
            communication_options=communication_options,
            shard_weights=True,
            check_replicas_every=check_replicas_every,
        )
