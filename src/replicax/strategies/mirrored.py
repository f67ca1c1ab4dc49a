"""MirroredStrategy: one replica per device of this machine."""

from collections.abc import Sequence

from replicax.collectives import CrossDeviceOps
from replicax.devices import Device, default_devices, resolve_devices
from replicax.errors import DeviceError
from replicax.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Every device holds a copy of each variable and computes on its part of the global
    batch; gradients are summed and each copy gets the same update.
    (TF: `tf.distribute.MirroredStrategy`.)

    Args:
        devices: Device strings such as `["gpu:0", "/gpu:1"]`, or JAX devices. Defaults
            to all visible accelerators, else all CPU devices.
        cross_device_ops: How gradients are summed. Defaults to `rx.NcclAllReduce()`.
        check_replicas_every: Compare the replicas' variables after every that many
            steps. None: only when `check_replicas` is called.

    Raises:
        DeviceError: For an unknown, absent or repeated device.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(devices=["/cpu:0"])
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        check_replicas_every: int | None = None,
    ) -> None:
        if cross_device_ops is not None and not isinstance(
            cross_device_ops, CrossDeviceOps
        ):
            raise TypeError(
                "MirroredStrategy: cross_device_ops must be a rx.CrossDeviceOps; got "
                f"{cross_device_ops!r}. Use for example rx.HierarchicalCopyAllReduce()."
            )
        if devices is None:
            found = default_devices()
        else:
            found = resolve_devices(devices, "MirroredStrategy")
        if len({d.platform for d in found}) > 1:
            raise DeviceError(
                f"MirroredStrategy: devices={list(devices or ())!r} mixes platforms; "
                "replicas in step need devices of one kind."
            )
        super().__init__(
            found, cross_device_ops, check_replicas_every=check_replicas_every
        )
