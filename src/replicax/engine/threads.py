"""Values of variables for several threads, of which some run programs.

A program donates the arrays of the variables that it writes. Another thread may have
read one of them and not used it yet, and JAX crashes on deleted arrays of several
devices. So a thread gets a variable's own array only while no other thread uses
variables; from then on each gets copies, made between two programs.
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
from replicax._util.types import PyTree
from replicax.errors import LostValuesError

__all__ = [
    "VariableSnapshot",
    "dispatch",
    "is_alone",
    "note_assigned",
    "order",
    "own",
    "require_value",
    "value_for_reader",
]

T = TypeVar("T")

order = threading.RLock()
"""Held while a program is dispatched and its results are stored, and while variables
are assigned or copied.

A program must be enqueued on all its devices before another: devices that run
collectives in different orders deadlock.
"""


class _Users:
    """The threads that use variables.

    Attributes:
        alone: The only one's identifier; None: there are several, or none yet.
        holder: The thread that may hold variables' own arrays, which it read when it
            was alone; None: there is none besides `alone`.
        threads: The identifiers of all.
        variables: All variables of strategies, by their ids.
        last: The thread that dispatched last while there were several, and the results.
    """

    def __init__(self) -> None:
        self.alone: int | None = None
        self.holder: int | None = None
        self.threads: set[int] = set()
        self.variables: weakref.WeakValueDictionary[int, keras.Variable] = (
            weakref.WeakValueDictionary()
        )
        self.last: tuple[int, list[PyTree]] = (0, [])


_users = _Users()


def own(variable: keras.Variable) -> None:
    """Note a variable of a strategy."""
    _users.variables[id(variable)] = variable


def is_alone() -> bool:
    """Whether no other living thread uses variables; notes that this one does."""
    return _users.alone == threading.get_ident() or _joins()


def _joins() -> bool:
    with order:
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
    """Dispatch a program: one at a time over all threads.

    CPUs have threads for the collectives of one program, so there a program of another
    thread has to end first. A thread's own programs follow each other, as each needs
    what the one before has written.
    """
    with order:
        if is_alone():
            return call()
        _replace_held_arrays()
        if on_cpu:
            _wait_for_others()
        results = call()
        _users.last = threading.get_ident(), jax.tree.leaves(results)
    return results


def _wait_for_others() -> None:
    """Wait until the last program of another thread has ended."""
    thread, results = _users.last
    if thread != threading.get_ident():
        arrays = [x for x in results if isinstance(x, jax.Array)]
        jax.block_until_ready([x for x in arrays if not x.is_deleted()])


def _replace_held_arrays() -> None:
    """Replace arrays that another thread may hold, before a program donates them."""
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
    """Read and write the variables themselves, also in a snapshot."""
    outer = internals.replace_values(None)
    try:
        yield
    finally:
        internals.replace_values(outer)


def _live_values(variables: Sequence[keras.Variable]) -> list[jax.Array]:
    """The arrays of variables, of which JAX may crash on deleted ones."""
    with _own_values():
        values = internals.read_values(variables)
    for variable, value in zip(variables, values, strict=True):
        require_value(variable, value)
    return values


def require_value(variable: keras.Variable, value: object) -> None:
    """Raise if a variable's array was deleted.

    Raises:
        LostValuesError: A program donated it, and raised an exception in its call.
    """
    if isinstance(value, jax.Array) and value.is_deleted():
        raise LostValuesError(
            f"variable {variable.path!r} {variable.shape}: its value has been deleted. "
            "A program that donates its arguments was given the array, or raised an "
            "exception in its call. Load or assign the variable again, as from a "
            "checkpoint."
        )


def _copied(
    values: Sequence[jax.Array], *, replicated: bool = False
) -> list[jax.Array]:
    """Copies of arrays, each where it is; to be called with `order` held.

    With `replicated`, sharded arrays are copied whole to each of their devices.
    """
    local = [x for x in values if x.is_fully_addressable]
    places = [_replicated(x.sharding) if replicated else x.sharding for x in local]
    with jax.ensure_compile_time_eval():  # Also where a layer reads it in a trace.
        copies = iter(jax.device_put(local, places, may_alias=False))
    return [next(copies) if x.is_fully_addressable else _copy(x) for x in values]


def _replicated(place: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if not isinstance(place, NamedSharding) or place.is_fully_replicated:
        return place
    return NamedSharding(place.mesh, PartitionSpec())


def _copy(value: jax.Array) -> jax.Array:
    """A copy of an array of several processes, of which each copies its part."""
    parts = _copied([x.data for x in value.addressable_shards])
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)


_SNAPSHOT = "_replicax_snapshot"


def value_for_reader(variable: keras.Variable) -> jax.Array:
    """A copy of a variable's value, for a thread that is not alone.

    All that a layer reads in one call, by Python, are values after the same step, and
    whole ones: of sharded ones each operation would be a program with collectives,
    dispatched out of `order`.
    """
    call = internals.current_layer()
    if call is None:
        return VariableSnapshot([variable]).read(variable)
    snapshot: VariableSnapshot | None = vars(call).get(_SNAPSHOT)
    if snapshot is None:
        snapshot = vars(call)[_SNAPSHOT] = VariableSnapshot(
            call.entry_layer.variables, replicated=True
        )
    return snapshot.read(variable)


def note_assigned(variable: keras.Variable) -> None:
    """Let the rest of a layer's call read the value that was just assigned in it."""
    call = internals.current_layer()
    snapshot: VariableSnapshot | None = (
        None if call is None else vars(call).get(_SNAPSHOT)
    )
    if snapshot is not None:
        snapshot.write([variable], VariableSnapshot([variable]).values.values())


class VariableSnapshot:
    """The values that variables had after a step, which a thread reads in this context.

    What it assigns to these variables, and what its programs write, stays in here.
    """

    def __init__(
        self, variables: Iterable[keras.Variable], *, replicated: bool = False
    ) -> None:
        of_strategies = [v for v in variables if _users.variables.get(id(v)) is v]
        with order:
            there = [v for v in of_strategies if internals.has_value(v)]
            values = _copied(_live_values(there), replicated=replicated)
        self.values = dict(zip(map(id, there), values, strict=True))
        self._outer: internals.OtherValues | None = None

    def has(self, variable: keras.Variable) -> bool:
        """Whether it has a value of a variable."""
        return id(variable) in self.values

    def read(self, variable: keras.Variable) -> jax.Array:
        """The value of a variable; a copy of the newest one of those not in here."""
        value = self.values.get(id(variable))
        if value is None:
            with order:
                (value,) = _copied(_live_values([variable]))
        return value

    def write(
        self, variables: Iterable[keras.Variable], values: Iterable[jax.Array]
    ) -> None:
        """Store the values of variables in here; one is taken for each variable."""
        self.values.update(zip(map(id, variables), values))  # noqa: B905

    def __enter__(self) -> None:
        self._outer = internals.replace_values(self)

    def __exit__(self, *_: object) -> None:
        internals.replace_values(self._outer)
