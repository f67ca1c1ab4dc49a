"""`CentralStorageStrategy`: variables on one device, replicas on several devices."""

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.arrays import dtype_on_devices
from replicax._util.interrupts import uninterrupted
from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.engine.aggregation import Rule
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.devices import (
    Device,
    device_name,
    devices_of_one_kind,
    resolve_devices,
)
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.engine.variables import Update
from replicax.strategies.home import ReplicaHome
from replicax.strategies.strategy import Strategy

__all__ = ["CentralStorageStrategy"]


class CentralStorageStrategy(Strategy):
    """Synchronous training with the variables stored once, on one device.

    Variables and optimizer state live on the parameter device. Each step copies the
    variables that it reads to the compute devices, sums their gradients, and makes the
    update on the parameter device. Compute devices need no memory for optimizer state.
    (TF: `tf.distribute.experimental.CentralStorageStrategy`.)

    Copies are asynchronous, and a step copies only variables that have changed since
    the last one. In a replica function a variable cannot be used after
    `optimizer.apply`, since the update follows the step.

    Args:
        compute_devices: One device per replica: strings such as `"gpu:0"`, or JAX
            devices. Defaults to all visible accelerators, else all CPU devices.
        parameter_device: The device of the variables. Defaults to the CPU, or to a
            single compute device.
        cross_device_ops: The all-reduce of gradients. Defaults to `rx.NcclAllReduce()`.
        aggregation: Rules for state, as for `rx.MirroredStrategy`.

    Raises:
        DeviceError: For an unknown, absent or repeated device, or compute devices of
            several kinds.
        TypeError: If `cross_device_ops` has another type.

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
        aggregation: Mapping[str, Rule] | None = None,
    ) -> None:
        name = "CentralStorageStrategy"
        devices = devices_of_one_kind(compute_devices, name, "compute_devices")
        if parameter_device is not None:
            home = resolve_devices([parameter_device], name)[0]
        else:
            host = jax.local_devices(backend="cpu")[0]
            home = devices[0] if len(devices) == 1 else host
        mesh = Mesh(np.array([home]), ("parameter",))
        super().__init__(
            devices, cross_device_ops, aggregation=aggregation, updates_at_home=True
        )
        self._parameter_device = device_name(home)
        self.home = _ParameterDevice(
            self.group, NamedSharding(mesh, PartitionSpec()), self.runner.dispatch
        )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; variables on {self._parameter_device})"


class _ParameterDevice(ReplicaHome):
    """Stores variables on one device, and updates them there after a program."""

    def __init__(
        self,
        group: ReplicaGroup,
        place: NamedSharding,
        dispatch: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(group, place)
        self._sharding = place
        self._dispatch = dispatch
        self._copies = _CopyCache(group.mirrored)
        self._running: collections.deque[jax.Array] = collections.deque()

    def settle(self) -> None:
        """Drop the compute devices' copies; the next step makes new ones."""
        self._dispatch(self._drop_copies)

    def _drop_copies(self) -> None:
        self._copies.clear()
        self._running.clear()

    def execute(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on copies of the variables, and make its updates."""
        before = internals.read_values(program.variables)
        value_of = dict(zip(map(id, program.variables), before, strict=True))
        is_new = program.is_new
        if program.at_home is None:
            program.at_home = list(map(self._compile, program.deferred_updates))
        # Back-pressure: JAX allocates memory for copies at the call. A host far ahead
        # would fill a device with the copies of later steps.
        while len(self._running) > 1:
            self._running.popleft().block_until_ready()
        inputs = self._copies.of([value_of[id(v)] for v in program.inputs])
        out, gradients, new = program(inputs, arrays)
        at_home = jax.device_put(new, self._sharding)
        value_of |= zip(map(id, program.written), at_home, strict=True)
        updates = list(
            zip(program.at_home, program.deferred_updates, gradients, strict=True)
        )
        changed = [v for update in program.deferred_updates for v in update.changed]
        variables = [*program.written, *changed]
        # Updates donate the old values: an interrupt must not lose the new ones.
        if is_new or len(set(map(id, changed))) < len(changed):
            one_by_one = itertools.chain(
                at_home, self._update_in_turn(updates, value_of)
            )
            with Announced("compiling the update") if is_new else nullcontext():
                uninterrupted(lambda: internals.write_values(variables, one_by_one))
        else:
            calls = [self._bind(*update, value_of) for update in updates]
            values = itertools.chain.from_iterable(map(operator.call, calls))
            # One call into C, which no interrupt splits, not even an asynchronous
            # exception, which `uninterrupted` does not defer.
            internals.write_values(variables, itertools.chain(at_home, values))
        for value, copy in zip(at_home, new, strict=True):
            self._copies.keep(value, copy)
        if gradients:
            self._running.append(min(gradients[0], key=lambda g: g.nbytes))
        return out

    def _bind(
        self,
        compiled: Wrapped,
        update: Update,
        gradients: Sequence[jax.Array],
        value_of: Mapping[int, jax.Array],
    ) -> Callable[[], list[jax.Array]]:
        """Bind an update to its arguments; the call donates the old values."""
        num_variables = collections.Counter(map(id, value_of.values()))
        before = [value_of[id(v)] for v in update.changed]
        # Other variables may share a value: donate a copy of it.
        before = [jnp.copy(x) if num_variables[id(x)] > 1 else x for x in before]
        gradients = jax.device_put(gradients, self._sharding)
        return functools.partial(compiled, before, gradients)

    def _update_in_turn(
        self,
        updates: Iterable[tuple[Wrapped, Update, Sequence[jax.Array]]],
        value_of: dict[int, jax.Array],
    ) -> Iterator[jax.Array]:
        """Make updates one after the other: they may change the same variables."""
        for compiled, update, gradients in updates:
            after = self._bind(compiled, update, gradients, value_of)()
            value_of |= zip(map(id, update.changed), after, strict=True)
            yield from after

    def _compile(self, update: Update) -> Wrapped:
        """Jit an update, which donates the old values; trace it to raise its errors."""
        compiled = jax.jit(update.make, donate_argnums=0, out_shardings=self._sharding)
        values, gradients = (
            [
                jax.ShapeDtypeStruct(v.shape, dtype_on_devices(v.dtype))
                for v in variables
            ]
            for variables in (update.changed, update.variables)
        )
        jax.eval_shape(compiled, values, gradients)  # Before values are donated.
        return compiled


class _CopyCache:
    """Caches copies of variables' values on the compute devices.

    Variables that share a value share its copy. If the parameter device is a compute
    device, a copy there shares the memory of the value, and JAX deletes both when it
    donates the value.
    """

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding
        self._copies: dict[int, tuple[weakref.ref[jax.Array], jax.Array]] = {}

    def of(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the copies of values; copy values that are not in the cache."""
        missing = {id(x): x for x in values if not self._has(x)}
        copies = jax.device_put(list(missing.values()), self._sharding)
        for value, copy in zip(missing.values(), copies, strict=True):
            self.keep(value, copy)
        return [self._copies[id(x)][1] for x in values]

    def keep(self, value: jax.Array, copy: jax.Array) -> None:
        """Cache the copy of a value, until the value is garbage-collected."""

        def forget(_: object, number: int = id(value)) -> None:
            self._copies.pop(number, None)

        self._copies[id(value)] = (weakref.ref(value, forget), copy)

    def clear(self) -> None:
        self._copies.clear()

    def _has(self, value: jax.Array) -> bool:
        entry = self._copies.get(id(value))
        return entry is not None and not entry[1].is_deleted()
