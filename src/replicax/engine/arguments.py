"""Separates a replica function's arguments into arrays and structure; rebuilds them."""

import dataclasses
import enum
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from replicax._private.jax import ArrayImpl
from replicax._util.arrays import holds_numbers
from replicax._util.types import PyTree, TreeStructure
from replicax.engine.cache import static_key
from replicax.engine.composites import described, is_composite, is_foreign
from replicax.engine.module_numbers import numbers_in_modules
from replicax.engine.values import ARRAY_TYPES, PerReplica, is_per_replica, spread
from replicax.errors import DivergenceError

if TYPE_CHECKING:
    from replicax.jax_loops.nnx_objects import NNXObjects

__all__ = [
    "Arguments",
    "CallFlattener",
    "FlatCall",
    "Kind",
    "Placeholder",
    "argument_name",
    "flatten_call",
]


class Kind(enum.Enum):
    """The kind of one leaf of the arguments."""

    PER_REPLICA = enum.auto()  # [R, ...]: each replica gets its entry
    ROWS = enum.auto()  # [R*b, ...]: each replica gets its rows
    MIRRORED = enum.auto()  # [...]: every replica gets the whole array
    STATIC = enum.auto()  # no array: a constant of the program


class Placeholder:
    """Stands for object number `index` of `objects` among a call's arguments."""

    def __init__(self, objects: "NNXObjects", index: int) -> None:
        self.objects = objects
        self.index = index


class Arguments:
    """The structure of a call's arguments, without their arrays.

    Args:
        structure: Tree structure of `(args, kwargs)`.
        kinds: The kind of each leaf.
        statics: The values of the STATIC leaves, in order.
        differing: Numbers of the arrays that are results of `run` which differ between
            replicas.

    Attributes:
        mirrored: The names of the arrays that every replica gets whole, by number, such
            as `"args[0]['w']"`; empty until the arguments are rebuilt.
    """

    def __init__(
        self,
        structure: TreeStructure,
        kinds: Sequence[Kind],
        statics: Sequence[object] = (),
        differing: Sequence[int] = (),
    ) -> None:
        self.statics = tuple(statics)
        self.mirrored: dict[int, str] = {}
        self._differing = differing
        self._structure = structure
        self._kinds = tuple(kinds)
        self._array_kinds = [kind for kind in kinds if kind is not Kind.STATIC]

    @property
    def _are_static(self) -> list[bool]:
        return [kind is Kind.STATIC for kind in self._kinds]

    @property
    def has_differing_results(self) -> bool:
        """Whether an argument is a result of `run` that differs between replicas."""
        return bool(self._differing)

    def specs(
        self, axis_name: str, leading: tuple[None, ...]
    ) -> tuple[PartitionSpec, ...]:
        """Each array's `PartitionSpec`; `leading` has a None per leading dimension."""
        split, whole = PartitionSpec(*leading, axis_name), PartitionSpec()
        return tuple(whole if x is Kind.MIRRORED else split for x in self._array_kinds)

    def on_device(
        self, arrays: Sequence[jax.Array], num_replicas: int
    ) -> tuple[Sequence[jax.Array], list[int | None]]:
        """One device's arrays and their `in_axes`, for a `vmap` over its replicas."""
        in_axes = [None if kind is Kind.MIRRORED else 0 for kind in self._array_kinds]
        mapped = [
            x
            if axis is None or num_replicas == 1
            else x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:])
            for x, axis in zip(arrays, in_axes, strict=True)
        ]
        return mapped, in_axes

    def require_still_equal(self, earlier: "Arguments", name: str) -> None:
        """Compare with an `earlier` call of the same function, `name`.

        Raises:
            DivergenceError: If an argument was equal on all replicas then, and is now a
                result of `run` that differs between them.
        """
        if (earlier._structure, earlier._are_static) != (
            self._structure,
            self._are_static,
        ):
            return
        diverged = [i for i in self._differing if i in earlier.mirrored]
        if not diverged:
            return
        names = ", ".join(earlier.mirrored[i] for i in diverged[:5])
        others = f" and {len(diverged) - 5} others" if len(diverged) > 5 else ""
        raise DivergenceError(
            f"{name}: {names}{others} was equal on all replicas in an earlier call, "
            "and is now a result of run that differs between them. Combine it in the "
            "step, such as its gradients: rx.get_replica_context().all_reduce("
            "rx.ReduceOp.MEAN, grads). If each replica shall have its own value, start "
            "with strategy.per_replica(value)."
        )

    def numbers_in(self, positions: Sequence[int]) -> list[int]:
        """The numbers of the arrays in the positional arguments at `positions`."""
        positional, _ = self._structure.children()
        kinds, numbers, count = iter(self._kinds), list[int](), itertools.count()
        for position, argument in enumerate(positional.children()):
            for kind in itertools.islice(kinds, argument.num_leaves):
                if kind is not Kind.STATIC:
                    number = next(count)
                    numbers += [number] if position in positions else []
        return numbers

    def rebuild(
        self, arrays: Sequence[jax.Array]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """One replica's `(args, kwargs)`, from this replica's arrays."""
        rest, statics = iter(arrays), iter(self.statics)
        leaves = []
        for kind in self._kinds:
            if kind is Kind.STATIC:
                leaves.append(next(statics))
            elif kind is Kind.PER_REPLICA:
                leaves.append(next(rest)[0])
            else:
                leaves.append(next(rest))
        call = jax.tree.unflatten(self._structure, leaves)
        if not self.mirrored:
            self.mirrored = self._mirrored_in(call)
        return call

    def _mirrored_in(self, call: PyTree) -> dict[int, str]:
        # JAX warns of iterators, unless `is_leaf` says that they are leaves.
        paths = jax.tree_util.tree_leaves_with_path(
            call, is_leaf=lambda x: isinstance(x, Iterator)
        )
        pairs = zip(paths, self._kinds, strict=False)
        arrays = (path for (path, _), kind in pairs if kind is not Kind.STATIC)
        return {
            number: argument_name(path)
            for number, (path, kind) in enumerate(
                zip(arrays, self._array_kinds, strict=False)
            )
            if kind is Kind.MIRRORED
        }

    def bind(
        self, fn: Callable[..., PyTree], arrays: Sequence[jax.Array]
    ) -> Callable[[], PyTree]:
        """The call of `fn` with one replica's arguments; it may be repeated."""
        args, kwargs = self.rebuild(arrays)
        for leaf in self.statics:
            if isinstance(leaf, Placeholder):
                return functools.partial(leaf.objects.call, fn, args, kwargs)
        return functools.partial(fn, *args, **kwargs)


def argument_name(path: Sequence[Any]) -> str:
    """The name of an entry of `(args, kwargs)`: `args[0]`, or `kwargs['model']`."""
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(tuple(path[1:]))


@dataclasses.dataclass(kw_only=True, slots=True)  # Frozen takes twice the time.
class FlatCall:
    """The arguments of a call, with arrays that are placed on the replicas' devices.

    Calls with equal keys may share a program; `make_arguments` returns the arguments of
    a new program. Only the first `num_active` replicas hold examples; None: all do.
    """

    key: Hashable
    arrays: list[PyTree]
    make_arguments: Callable[[], Arguments]
    num_active: int | None


_PYTHON_NUMBERS = (int, float, complex)


def flatten_call(
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    place: Callable[[PyTree, Kind], ArrayLike],
) -> FlatCall:
    """Separate the arrays in the arguments of `strategy.run` from everything else.

    Each replica gets its entry of a `PerReplica`, and the whole of other arrays and of
    Python numbers. Other leaves (booleans, strings, models, variables, and numbers in
    Equinox modules) are constants of the program. `place` transfers an array to the
    replicas' devices.

    Raises:
        TypeError: For arrays of strings, dates or objects, and for sparse arrays of
            packages other than JAX.
        ValueError: If `PerReplica`s have different numbers of replicas with examples.
    """
    flat, structure = jax.tree.flatten(
        (tuple(args), dict(kwargs)), is_leaf=is_per_replica
    )
    arrays, kinds, statics, key = [], [], [], []
    differing: list[int] = []
    is_uneven = False
    constants = numbers_in_modules(flat, structure)
    for number, leaf in enumerate(flat):
        if isinstance(leaf, PerReplica):
            is_uneven = is_uneven or leaf.num_active is not None
            if leaf.is_result:
                differing.append(len(arrays))
            kind, leaf = Kind.PER_REPLICA, leaf.array
            if type(leaf) not in ARRAY_TYPES and is_composite(leaf):
                args, kwargs = spread((args, kwargs))
                return flatten_call(args, kwargs, place)
        elif (
            isinstance(leaf, jax.Array | np.ndarray | np.generic)
            and not isinstance(leaf, str | bytes)  # Strings of NumPy.
        ) or (
            isinstance(leaf, _PYTHON_NUMBERS)
            and not isinstance(leaf, bool)
            and number not in constants
        ):
            kind = Kind.MIRRORED
            if isinstance(leaf, np.ndarray | np.generic) and not holds_numbers(leaf):
                raise TypeError(
                    f"Strategy.run: got an array of {leaf.dtype}, {leaf!r}; expected "
                    "numbers or booleans. Encode it as numbers, or pass a string or a "
                    "tuple of strings, which become constants of the program."
                )
        elif isinstance(leaf, jax.Ref):
            raise TypeError(
                f"Strategy.run: got a mutable array, {leaf!r}. Pass its value, "
                "ref[...], and return the new one; or keep it in a keras.Variable or "
                "an nnx.Variable, which run changes in place."
            )
        elif is_foreign(leaf):
            raise TypeError(
                f"Strategy.run: got a {described(leaf)}, which JAX does not support. "
                "Put it into a dataset, which splits it by rows, or pass a "
                "jax.experimental.sparse.BCOO."
            )
        else:
            kinds.append(Kind.STATIC)
            statics.append(leaf)
            key.append(static_key(leaf))
            continue
        array = place(leaf, kind)
        kinds.append(kind)
        arrays.append(array)
        if isinstance(array, _PYTHON_NUMBERS):
            key.append((kind, type(array)))
        else:
            key.append((kind, array.shape, array.dtype))
    return FlatCall(
        key=(structure, tuple(key)),
        arrays=arrays,
        make_arguments=lambda: Arguments(structure, kinds, statics, differing),
        num_active=_num_active_in(args, kwargs) if is_uneven else None,
    )


def _num_active_in(args: PyTree, kwargs: PyTree) -> int | None:
    """The common `num_active` of a call's `PerReplica`s."""
    leaves = jax.tree_util.tree_leaves_with_path(
        (args, kwargs), is_leaf=lambda x: isinstance(x, PerReplica | Iterator)
    )
    numbers: dict[int | None, str] = {}
    for path, x in leaves:
        if isinstance(x, PerReplica) and not x.is_block:
            numbers.setdefault(x.num_active, argument_name(path))
    if len(numbers) == 1:
        return next(iter(numbers))
    listed = ", ".join(
        f"{'all' if number is None else number} in {name}"
        for number, name in numbers.items()
    )
    raise ValueError(
        "Strategy.run: the arguments have different numbers of replicas that hold "
        f"examples: {listed}. The other replicas compute on copies, so a state of each "
        "replica would be wrong. Use batches that divide by the number of replicas, "
        "such as with remainder='drop'; combine earlier results with strategy.reduce "
        "or strategy.gather; or keep the state equal on all replicas, with "
        "rx.get_replica_context().all_reduce."
    )


class _Key:
    """A key that computes its hash only once; it equals its content."""

    __slots__ = ("_content", "_hash")

    def __init__(self, content: Hashable) -> None:
        self._content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        content = other._content if isinstance(other, _Key) else other
        return self._content == content


_PLACE_OF_ARRAY = operator.attrgetter("sharding", "committed")
_TYPE_OF_ARRAY = operator.attrgetter("aval")


class CallFlattener:
    """Flattens calls like `flatten_call`; repeated calls need no work per leaf.

    A call is repeated if all its leaves are JAX arrays of the same types and shardings
    as in an earlier call, such as a training state that each step replaces.
    """

    def __init__(self, place: Callable[[PyTree, Kind], ArrayLike]) -> None:
        self._place = place
        self._keys: dict[_Key, _Key] = {}
        self._calls: dict[Hashable, tuple[list[Any], FlatCall]] = {}

    def flatten(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> FlatCall:
        """See `flatten_call`."""
        flat, structure = jax.tree.flatten((args, kwargs))
        if set(map(type, flat)) != _ONLY_ARRAYS:
            return flatten_call(args, kwargs, self._place)
        types = (structure, tuple(map(_TYPE_OF_ARRAY, flat)))
        places = list(map(_PLACE_OF_ARRAY, flat))
        stored_places, call = self._calls.get(types, (None, None))
        if call is not None and places == stored_places:
            return FlatCall(
                key=call.key,
                arrays=flat,
                make_arguments=call.make_arguments,
                num_active=None,
            )
        call = flatten_call(args, kwargs, self._place)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_per_replica)
        # Calls with a `num_active` are not stored.
        if all(getattr(x, "num_active", None) is None for x in leaves) and all(
            map(operator.is_, flat, call.arrays)
        ):
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
                self._keys.clear()
            key = _Key(call.key)
            call.key = self._keys.setdefault(key, key)
            self._calls[types] = places, dataclasses.replace(call, arrays=[])
        return call


_ONLY_ARRAYS = {ArrayImpl}
_MOST_CALLS = 1000
