"""Lets several threads read variables while programs donate their arrays.

A program deletes the old arrays of the variables that it writes, by donation. JAX would
crash if another thread used such an array. So a thread that reads a variable gets the
variable's own array only if no other thread uses variables; otherwise a copy, made
between two programs.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

from replicax._private import keras as internals
from replicax.errors import LostValuesError

__all__ = [
    "VariableSnapshot",
    "dispatch",
    "dispatch_lock",
    "is_alone",
    "note_assigned",
    "register",
    "require_value",
    "value_for_reader",
]

T = TypeVar("T")

dispatch_lock = threading.RLock()
"""The lock of dispatches, and of reads and writes of variables.

Programs must be enqueued on all devices in the same order, or collectives deadlock.
"""


class _Users:
    """The threads that use variables, by identifier.

    Attributes:
        threads: All these threads.
        alone: The thread if it is the only one, else None.
        holder: A thread that was alone earlier, and may hold variables' own arrays.
        variables: All variables of strategies, by id.
        last: With several threads, the last one to dispatch, and the program's results.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.alone: int | None = None
        self.holder: int | None = None
        self.variables = weakref.WeakValueDictionary[int, keras.Variable]()
        self.last: tuple[int, list[object]] = (0, [])


_users = _Users()


def register(variable: keras.Variable) -> None:
    """Add a variable to those of strategies."""
    _users.variables[id(variable)] = variable


def is_alone() -> bool:
    """Whether no other living thread uses variables, after registering this thread."""
    return _users.alone == threading.get_ident() or _register_thread()


def _register_thread() -> bool:
    with dispatch_lock:
        this = threading.current_thread().ident
        assert this is not None
        living = {thread.ident for thread in threading.enumerate()}
        if _users.alone is not None and _users.alone in living:
            _users.holder = _users.alone
        elif _users.holder not in living:
            _users.holder = None
        _users.threads = (_users.threads & living) | {this}
        _users.alone = this if _users.threads == {this} else None
        return _users.alone is not None


def dispatch(call: Callable[[], T], *, on_cpu: bool) -> T:
    """Dispatch a program; threads dispatch one at a time.

    CPUs have room for the collectives of one program: wait for other threads' programs.
    """
    with dispatch_lock:
        if is_alone():
            return call()
        _replace_held_arrays()
        if on_cpu:
            _wait_for_others()
        results = call()
        _users.last = threading.get_ident(), jax.tree.leaves(results)
    return results


def _wait_for_others() -> None:
    thread, results = _users.last
    if thread != threading.get_ident():
        arrays = [x for x in results if isinstance(x, jax.Array)]
        jax.block_until_ready([x for x in arrays if not x.is_deleted()])


def _replace_held_arrays() -> None:
    """Replace arrays that another thread may hold by copies, which programs delete."""
    if _users.holder in (None, threading.get_ident()):
        return
    _users.holder = None
    with _own_values():
        for variable in list(_users.variables.values()):
            (value,) = internals.read_values([variable])
            if isinstance(value, jax.Array) and not value.is_deleted():
                internals.write_values([variable], _copied([value]))


@contextlib.contextmanager
def _own_values() -> Generator[None]:
    """Read and write the variables themselves, even inside a snapshot's context."""
    outer = internals.replace_values(None)
    try:
        yield
    finally:
        internals.replace_values(outer)


def _live_values(variables: Sequence[keras.Variable]) -> list[jax.Array]:
    """The arrays of variables; a deleted array, which may crash JAX, is an error."""
    with _own_values():
        values = internals.read_values(variables)
    for variable, value in zip(variables, values, strict=True):
        require_value(variable, value)
    return values


def require_value(variable: keras.Variable, value: object) -> None:
    """Raise a LostValuesError if a variable's array was deleted."""
    if isinstance(value, jax.Array) and value.is_deleted():
        raise LostValuesError(
            f"variable {variable.path!r} {variable.shape}: its value has been deleted. "
            "Its array was donated to another program, or to a call that raised an "
            "exception. Load or assign the variable again, such as from a checkpoint."
        )


def _copied(
    values: Sequence[jax.Array], *, replicated: bool = False
) -> list[jax.Array]:
    """Copy arrays on their devices; the caller holds `dispatch_lock`.

    With `replicated`, each device of a sharded array gets the whole array.
    """
    local = [x for x in values if x.is_fully_addressable]
    places = [_replicated(x.sharding) if replicated else x.sharding for x in local]
    with jax.ensure_compile_time_eval():  # The caller may be tracing a layer.
        copies = iter(jax.device_put(local, places, may_alias=False))
    return [next(copies) if x.is_fully_addressable else _copy(x) for x in values]


def _replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec())


def _copy(value: jax.Array) -> jax.Array:
    """Copy this process' shards of an array that is on several processes."""
    parts = _copied([x.data for x in value.addressable_shards])
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)


_SNAPSHOT = "_replicax_snapshot"


def value_for_reader(variable: keras.Variable) -> jax.Array:
    """A copy of a variable's value, for a thread that is not alone.

    All reads in one eager call of a layer see the values after the same step. There,
    sharded values are gathered: JAX would dispatch collectives without the lock.
    """
    call = internals.current_layer_call()
    if call is None:
        return VariableSnapshot([variable]).read(variable)
    snapshot: VariableSnapshot | None = vars(call).get(_SNAPSHOT)
    if snapshot is None:
        snapshot = vars(call)[_SNAPSHOT] = VariableSnapshot(
            call.entry_layer.variables, replicated=True
        )
    return snapshot.read(variable)


def note_assigned(variable: keras.Variable) -> None:
    """Update the snapshot of the current layer's call after an assignment in it."""
    call = internals.current_layer_call()
    snapshot: VariableSnapshot | None = (
        None if call is None else vars(call).get(_SNAPSHOT)
    )
    if snapshot is not None:
        snapshot.write([variable], VariableSnapshot([variable]).values.values())


class VariableSnapshot:
    """The variables' values after one step; a context in which a thread uses them.

    In the context, the thread's assignments and programs change only the snapshot.
    """

    def __init__(
        self, variables: Iterable[keras.Variable], *, replicated: bool = False
    ) -> None:
        of_strategies = [v for v in variables if _users.variables.get(id(v)) is v]
        with dispatch_lock:
            initialised = [v for v in of_strategies if internals.has_value(v)]
            values = _copied(_live_values(initialised), replicated=replicated)
        self.values = dict(zip(map(id, initialised), values, strict=True))
        self._outer: internals.OtherValues | None = None

    def has(self, variable: keras.Variable) -> bool:
        """Whether the snapshot has a value of a variable."""
        return id(variable) in self.values

    def read(self, variable: keras.Variable) -> jax.Array:
        """A variable's value in the snapshot, or else a copy of its current value."""
        value = self.values.get(id(variable))
        if value is None:
            with dispatch_lock:
                (value,) = _copied(_live_values([variable]))
        return value

    def write(
        self, variables: Iterable[keras.Variable], values: Iterable[jax.Array]
    ) -> None:
        """Store one value for each variable in the snapshot."""
        self.values.update(zip(map(id, variables), values))  # noqa: B905

    def __enter__(self) -> None:
        self._outer = internals.replace_values(self)

    def __exit__(self, *_: object) -> None:
        internals.replace_values(self._outer)
