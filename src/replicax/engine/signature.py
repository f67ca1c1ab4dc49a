"""The arguments, options and results of a replica function's program."""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from replicax._util.arrays import holds_numbers
from replicax._util.types import JSON, PyTree, Shape, TreeStructure
from replicax.engine.cache import static_key
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import (
    described,
    is_composite,
    is_foreign,
    require_dense,
)
from replicax.engine.values import (
    ARRAY_TYPES,
    PerReplica,
    is_per_replica,
    num_active_in,
    spread,
)
from replicax.engine.variables import Variable

__all__ = [
    "Arguments",
    "FlatCall",
    "Kind",
    "Options",
    "Outputs",
    "ResultStructure",
    "are_of_rows",
    "flatten_call",
    "num_rows_of",
    "require_rows",
]


class Kind(enum.Enum):
    """The kind of one leaf of the arguments."""

    PER_REPLICA = enum.auto()  # [R, ...]: each replica gets its entry
    ROWS = enum.auto()  # [R*b, ...]: each replica gets its rows
    MIRRORED = enum.auto()  # [...]: every replica gets all of it
    STATIC = enum.auto()  # no array: part of the program


class Arguments:
    """The structure of a call: what `fn(*args, **kwargs)` is rebuilt from.

    Args:
        structure: Tree structure of `(args, kwargs)`.
        kinds: One per leaf.
        statics: The values of the STATIC leaves, in order.
    """

    def __init__(
        self,
        structure: TreeStructure,
        kinds: Sequence[Kind],
        statics: Sequence[object] = (),
    ) -> None:
        self.statics = tuple(statics)
        self._structure = structure
        self._kinds = tuple(kinds)
        self._dynamic = [kind for kind in kinds if kind is not Kind.STATIC]

    def specs(
        self, axis_name: str, leading: tuple[None, ...]
    ) -> tuple[PartitionSpec, ...]:
        """The spec of each array, after `leading` dimensions that are not split."""
        split, whole = PartitionSpec(*leading, axis_name), PartitionSpec()
        return tuple(whole if x is Kind.MIRRORED else split for x in self._dynamic)

    def on_device(
        self, arrays: Sequence[jax.Array], num_replicas: int
    ) -> tuple[Sequence[jax.Array], list[int | None]]:
        """One device's parts of the arrays, and `in_axes` for `vmap` over its replicas.

        Of several replicas, arrays that are split have a dimension in front.
        """
        split = [None if kind is Kind.MIRRORED else 0 for kind in self._dynamic]
        parts = [
            x
            if axis is None or num_replicas == 1
            else x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:])
            for x, axis in zip(arrays, split, strict=True)
        ]
        return parts, split

    def rebuild(
        self, arrays: Sequence[jax.Array]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """One replica's `(args, kwargs)` from its parts of the arrays."""
        dynamic, static = iter(arrays), iter(self.statics)
        leaves = []
        for kind in self._kinds:
            if kind is Kind.STATIC:
                leaves.append(next(static))
            elif kind is Kind.PER_REPLICA:
                leaves.append(next(dynamic)[0])
            else:
                leaves.append(next(dynamic))
        return jax.tree.unflatten(self._structure, leaves)


@dataclasses.dataclass(kw_only=True, slots=True)  # Frozen, it takes twice the time.
class FlatCall:
    """The arguments of a call as arrays that are where the replicas want them.

    Calls of equal `key` may share a program, whose arguments `make_arguments` makes;
    `num_active` replicas have examples of their own (None: all).
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
    """Split the arguments of `strategy.run` into arrays and everything else.

    `PerReplica` leaves are split, arrays and Python numbers are given whole to every
    replica, and the rest (booleans, strings, models, variables) is part of the program.
    `place` puts an array where the replicas are.

    Raises:
        TypeError: For arrays of strings, dates or objects, and for sparse arrays of
            packages other than JAX.
        ValueError: For batches that different numbers of replicas hold examples of.
    """
    flat, structure = jax.tree.flatten(
        (tuple(args), dict(kwargs)), is_leaf=is_per_replica
    )
    arrays, kinds, statics, key = [], [], [], []
    is_uneven = False
    for leaf in flat:
        if isinstance(leaf, PerReplica):
            is_uneven = is_uneven or leaf.num_active is not None
            kind, leaf = Kind.PER_REPLICA, leaf.array
            if type(leaf) not in ARRAY_TYPES and is_composite(leaf):
                args, kwargs = spread((args, kwargs))
                return flatten_call(args, kwargs, place)
        elif (
            isinstance(leaf, jax.Array | np.ndarray | np.generic)
            and not isinstance(leaf, str | bytes)  # Strings of NumPy.
        ) or (isinstance(leaf, _PYTHON_NUMBERS) and not isinstance(leaf, bool)):
            kind = Kind.MIRRORED
            if isinstance(leaf, np.ndarray | np.generic) and not holds_numbers(leaf):
                raise TypeError(
                    f"Strategy.run: got an array of {leaf.dtype}, {leaf!r}; expected "
                    "numbers or booleans. Encode it as numbers, or pass a string or a "
                    "tuple of strings, which becomes a part of the program."
                )
        elif is_foreign(leaf):
            raise TypeError(
                f"Strategy.run: got a {described(leaf)}, which JAX does not know. Put "
                "it into a dataset, whose batches are cut by rows, or pass a "
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
        make_arguments=lambda: Arguments(structure, kinds, statics),
        num_active=num_active_in(flat, "Strategy.run") if is_uneven else None,
    )


class ResultStructure:
    """The structure of the results of a replica function, which messages call `name`.

    Raises:
        TypeError: For composite arrays and `PerReplica`s.
    """

    def __init__(self, out: PyTree, name: str) -> None:
        for leaf in jax.tree.leaves(out, is_leaf=is_per_replica):
            if is_per_replica(leaf):
                raise TypeError(
                    f"{name}: returned {leaf!r}, the values of all replicas. Pass it "
                    "as an argument, strategy.run(fn, args=(value,)), so that each "
                    "replica has its own."
                )
        require_dense(out, f"{name}, as a result")
        leaves, self._structure = jax.tree.flatten(out)
        self._leaves = [None if _is_array_like(x) else x for x in leaves]
        self.num_arrays = self._leaves.count(None)

    def arrays(self, out: PyTree) -> list[jax.Array]:
        """The arrays of such results, and their numbers as arrays."""
        return [
            jnp.asarray(x.value if isinstance(x, keras.Variable) else x)
            for x in jax.tree.leaves(out)
            if _is_array_like(x)
        ]

    def unflatten(self, arrays: Sequence[PyTree]) -> PyTree:
        """The results, of their arrays; other leaves are those of the trace."""
        if self.num_arrays < len(self._leaves):
            rest = iter(arrays)
            arrays = [next(rest) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, arrays)


_ARRAY_LIKE = (
    jax.Array,
    np.ndarray,
    np.generic,
    int,
    float,
    complex,
    keras.Variable,
)


def _is_array_like(x: object) -> bool:
    return isinstance(x, _ARRAY_LIKE) and not isinstance(x, str | bytes)


class Outputs(enum.Enum):
    """The form in which a program returns a replica function's results."""

    PER_REPLICA = enum.auto()  # [...] where equal on all replicas, else [R, ...]
    ROWS = enum.auto()  # [R*b, ...]: the replicas' rows, one after another
    MIRRORED = enum.auto()  # [...]: already equal on all replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a program; the defaults are those of `strategy.run`.

    Attributes:
        gradient_op: How the optimizer seam combines gradients.
        num_active: Replicas that hold examples of the batch; None: all.
        num_steps: Steps in one dispatch; arguments then have them as first dimension.
            None: one step, without that dimension.
        outputs: The form of the results. Of several steps those of the last are
            kept, except ROWS, which keeps all.
        finish: Called with the last step's results when the variables have their new
            values; what it returns are the results.
        variables: All variables that the function may touch. None: they are discovered,
            as those of deferred updates have to be.
        facts: What else must be the same on all workers, by name.
    """

    gradient_op: ReduceOp = ReduceOp.SUM
    num_active: int | None = None
    num_steps: int | None = None
    outputs: Outputs = Outputs.PER_REPLICA
    finish: Callable[[PyTree], PyTree] | None = None
    # The function decides on these, so they are no part of a program's key.
    variables: Sequence[Variable] | None = dataclasses.field(
        default=None, compare=False
    )
    facts: Mapping[str, JSON] = dataclasses.field(default_factory=dict, compare=False)


# Results that are rows: `predict` concatenates those of the replicas along the first
# dimension. That is what one device returns only if each row of a batch makes equally
# many rows of a result.


def num_rows_of(arguments: PyTree) -> int:
    """The number of rows in one replica's part of a batch."""
    return jax.tree.leaves(arguments, is_leaf=is_composite)[0].shape[0]


def are_of_rows(shapes: Iterable[Shape], num_rows: int) -> bool:
    """Whether the first dimension has the number of rows, and no other dimension."""
    return all(s[:1] == (num_rows,) and num_rows not in s[1:] for s in shapes)


def require_rows(
    caller: str,
    results: PyTree,
    arguments: PyTree,
    call: Callable[[PyTree], PyTree],
) -> None:
    """Raise a ValueError for results that do not grow, row by row, with the batch.

    `arguments` are the replica's part of the batch that the `results` were computed
    from. `call` computes the results of others: it is traced, with twice as many rows,
    where the results' own shapes do not tell.
    """
    num_rows = num_rows_of(arguments)
    named = jax.tree_util.tree_leaves_with_path(results)
    shapes = [np.shape(x) for _, x in named]
    if are_of_rows(shapes, num_rows):
        return
    try:
        larger = _shapes_of_twice(arguments, call)
    except Exception:  # noqa: BLE001
        # Whatever it raises, the step takes batches of this size only. That must divide
        # the results' sizes.
        larger = [_doubled(s) if s and s[0] % num_rows == 0 else () for s in shapes]
    for (path, _), shape, expected in zip(named, shapes, larger, strict=True):
        if not shape or expected != _doubled(shape):
            name = f"output {jax.tree_util.keystr(path)}" if path else "the output"
            raise ValueError(
                f"{caller}: {name} has shape {shape} for {num_rows} rows. Several "
                "replicas share a batch, and their outputs are joined along the first "
                "dimension, which must be that of the rows. Transpose the output; "
                "leave out what belongs to no row, such as a weight, and read it from "
                "the model; compare rows, such as all pairs, in a loss and not in the "
                "model; or use a strategy of one replica, such as "
                "rx.OneDeviceStrategy('cpu:0')."
            )


def _shapes_of_twice(
    arguments: PyTree, call: Callable[[PyTree], PyTree]
) -> list[Shape]:
    """The shapes of the results of a batch with twice as many rows."""
    if any(map(is_composite, jax.tree.leaves(arguments, is_leaf=is_composite))):
        raise TypeError("The arrays of composite ones have other dimensions.")
    shapes: list[Shape] = []

    def traced(arguments: PyTree) -> None:
        shapes[:] = map(np.shape, jax.tree.leaves(call(arguments)))

    def larger(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_doubled(x.shape), x.dtype)

    jax.eval_shape(traced, jax.tree.map(larger, arguments))
    return shapes


def _doubled(shape: Shape) -> Shape:
    return (2 * shape[0], *shape[1:])
