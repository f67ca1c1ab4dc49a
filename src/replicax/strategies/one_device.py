"""`OneDeviceStrategy`: one replica, on a given device."""

from replicax.engine.devices import Device, resolve_devices
from replicax.strategies.strategy import Strategy

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """One replica on one device, to try code that will run on many.

    (TF: `tf.distribute.OneDeviceStrategy`.)

    Args:
        device: Device string such as `"gpu:0"` or `"/cpu:0"`, or a JAX device.

    Raises:
        DeviceError: If there is no such device.

    Example:
        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("/cpu:0").num_replicas_in_sync
        1
    """

    def __init__(self, device: str | Device) -> None:
        super().__init__(resolve_devices([device], "OneDeviceStrategy")[:1])

    @property
    def max_devices(self) -> int:
        """One, however many devices a plan has."""
        return 1
