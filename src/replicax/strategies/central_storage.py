"""CentralStorageStrategy: variables in one place, replicas on several devices."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.collectives import CrossDeviceOps
from replicax.devices import Device, default_devices, device_name, resolve_devices
from replicax.errors import DeviceError
from replicax.program import Program
from replicax.strategy import Strategy
from replicax.updates import Update
from replicax.variables import ValueScope

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """Synchronous training with the variables stored once, on one device.

    Variables and optimizer slots live on the parameter device. Each step copies the
    variables that it reads to the compute devices, sums their gradients, and makes the
    update on the parameter device. Compute devices need no room for optimizer slots.
    (TF: `tf.distribute.experimental.CentralStorageStrategy`.)

    Copies run in the background, and only variables that changed since the last step
    are copied. In a replica function a variable cannot be used after `optimizer.apply`,
    since its update is made when the step is over.

    Args:
        compute_devices: One device per replica: strings such as `"gpu:0"`, or JAX
            devices. Defaults to all visible accelerators, else all CPU devices.
        parameter_device: Where the variables live. Defaults to the CPU; with a single
            compute device, to that.
        cross_device_ops: How gradients are summed. Defaults to `rx.NcclAllReduce()`.

    Raises:
        DeviceError: For an unknown, absent or repeated device.

    Example:
        >>> import keras, replicax as rx
        >>> strategy = rx.CentralStorageStrategy(parameter_device="cpu:0")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> len(model.layers[0].kernel.value.devices())
        1
    """

    def __init__(
        self,
        compute_devices: Sequence[str | Device] | None = None,
        parameter_device: str | Device | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        name = "CentralStorageStrategy"
        if compute_devices is None:
            devices = default_devices()
        else:
            devices = resolve_devices(compute_devices, name)
        if len({d.platform for d in devices}) > 1:
            raise DeviceError(
                f"{name}: compute_devices={list(compute_devices or ())!r} mixes "
                "platforms; replicas in step need devices of one kind."
            )
        if parameter_device is not None:
            (home,) = resolve_devices([parameter_device], name)
        else:
            home = (
                devices[0] if len(devices) == 1 else jax.local_devices(backend="cpu")[0]
            )
        mesh = Mesh(np.array([home]), ("parameter",))
        super().__init__(
            devices,
            cross_device_ops,
            home=NamedSharding(mesh, PartitionSpec()),
        )
        self._copies = _Copies(self._group.mirrored)
        self._made: weakref.WeakKeyDictionary[Update, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        (home,) = self._home.device_set
        return f"{super().__repr__()[:-1]}; variables on {device_name(home)})"

    def settle(self) -> None:
        """Drop the compute devices' copies of variables; the next step makes new ones.

        `fit`, `evaluate` and `predict` end with it.
        """
        self._copies.drop()

    def _execute(
        self, program: Program, values: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        stored = dict(zip(map(id, program.variables), values, strict=True))
        inputs = self._copies.of([(v, stored[id(v)]) for v in program.inputs])
        out, gradients, new = program(inputs, arrays)
        at_home = jax.device_put(new, self._home)
        for variable, copy, value in zip(program.outputs, new, at_home, strict=True):
            stored[id(variable)] = value
            self._copies.keep(variable, value, copy)
        for update, grads in zip(program.updates, gradients, strict=True):
            self._copies.forget(update.variables)
            before = [stored[id(v)] for v in update.changed]
            after = self._make(update, before, jax.device_put(grads, self._home))
            stored |= zip(map(id, update.changed), after, strict=True)
        return out, [stored[id(v)] for v in program.written]

    def _make(
        self, update: Update, values: list[Any], gradients: list[Any]
    ) -> list[Any]:
        """Make an update on the parameter device; `values` are given away."""
        if len({id(x) for x in values}) < len(values):
            values = [jnp.copy(x) for x in values]  # Some share an array.
        make = self._made.get(update)
        if make is None:
            make = jax.jit(
                _update_function(weakref.ref(update)),
                donate_argnums=0,
                out_shardings=self._home,
            )
            self._made[update] = make
        return make(values, gradients)


def _update_function(of: "weakref.ref[Update]") -> Any:
    def make_update(values: list[Any], gradients: list[Any]) -> list[Any]:
        update = of()
        if update is None:  # Traced only while its program makes it.
            raise ReferenceError("The update's program is gone.")
        changed = update.changed
        with ValueScope(changed, values, "optimizer.apply") as scope:
            update.optimizer.apply(gradients, list(update.variables))
            new = [scope.get_current_value(v) for v in changed]
        return [jnp.asarray(x, old.dtype) for x, old in zip(new, values, strict=True)]

    return make_update


class _Copies:
    """Copies of variables on the compute devices, of those that have not changed.

    Args:
        sharding: Of the copies.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._known: dict[int, tuple[Any, Any, Any]] = {}

    def of(self, stored: Sequence[tuple[Any, Any]]) -> list[Any]:
        """The copies of variables with these stored values, made where needed."""
        new = [(v, x) for v, x in stored if not self._is_current(v, x)]
        copies = jax.device_put([x for _, x in new], self._sharding)
        for (variable, value), copy in zip(new, copies, strict=True):
            self.keep(variable, value, copy)
        return [self._known[id(v)][2] for v, _ in stored]

    def keep(self, variable: Any, value: Any, copy: Any) -> None:
        """Remember the copy of a variable for as long as it has this value."""

        def gone(_: Any, number: int = id(variable)) -> None:
            self._known.pop(number, None)

        self._known[id(variable)] = (weakref.ref(variable, gone), value, copy)

    def forget(self, variables: Sequence[Any]) -> None:
        """Drop the copies of variables that are about to change."""
        for variable in variables:
            self._known.pop(id(variable), None)

    def drop(self) -> None:
        """Drop all copies."""
        self._known.clear()

    def _is_current(self, variable: Any, value: Any) -> bool:
        known = self._known.get(id(variable))
        return known is not None and known[0]() is variable and known[1] is value
