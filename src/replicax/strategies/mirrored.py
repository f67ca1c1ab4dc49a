"""`MirroredStrategy`: one replica per device of this machine."""

from collections.abc import Mapping, Sequence

from replicax.engine.aggregation import Rule
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CommunicationOptions
from replicax.engine.devices import Device, devices_of_one_kind
from replicax.strategies.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Every device holds a copy of each variable and computes on its part of the global
    batch; gradients are summed and each copy gets the same update.
    (TF: `tf.distribute.MirroredStrategy`.)

    Args:
        devices: Device strings such as `["gpu:0", "/gpu:1"]`, or JAX devices. Defaults
            to all visible accelerators, else all CPU devices.
        cross_device_ops: The all-reduce of gradients. Defaults to `rx.NcclAllReduce()`.
        communication_options: Options of the gradients' communication: buckets,
            compression, a hook.
        aggregation: How replicas' values of state are combined, by regular expressions
            that match a variable's whole path: `{".*/peak": "max"}`. A rule is `"sum"`
            (of what each replica adds), `"mean"`, `"max"`, `"min"`, `"first"`, or a
            function of the values `[R, ...]` of the replicas with examples. Rules are
            for variables with `trainable=False`, in place of their own `aggregation`.
        replicas_per_device: Number of replicas on each device. With 8, one device
            computes the same numbers as eight devices with one replica each.
        shard_update: Whether to shard the optimizer's update and its state over the
            devices (ZeRO stage 1): a reduce-scatter of gradients and an all-gather of
            weights, with the same number of bytes as an all-reduce.
        check_replicas_every: Number of steps between two comparisons of the replicas'
            variables. None: only when `check_replicas` is called.

    Raises:
        DeviceError: For an unknown, absent or repeated device, or several kinds.
        ValueError: For a `replicas_per_device` that is not positive, or an unknown rule
            of `aggregation`; at the first step, for an expression that matches nothing.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(devices=["/cpu:0"], replicas_per_device=4)
        >>> strategy.num_replicas_in_sync
        4
    """

    def __init__(
        self,
        devices: Sequence[str | Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        aggregation: Mapping[str, Rule] | None = None,
        replicas_per_device: int = 1,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
    ) -> None:
        super().__init__(
            devices_of_one_kind(devices, "MirroredStrategy"),
            cross_device_ops,
            communication_options=communication_options,
            aggregation=aggregation,
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
            check_replicas_every=check_replicas_every,
        )
