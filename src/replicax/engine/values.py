"""`PerReplica`: one value per replica, held as one global array.

Legend: `R` replicas, `b` examples in a replica's batch, `B = R * b` in the global one.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.core
import numpy as np
from jax import tree_util
from jax.typing import DTypeLike

from replicax._private.jax import ArrayImpl
from replicax._util.types import PyTree
from replicax.engine.composites import described, is_array, is_composite, is_key, one_of

__all__ = ["ARRAY_TYPES", "PerReplica", "is_per_replica", "num_active_in", "spread"]

ARRAY_TYPES = frozenset({ArrayImpl, np.ndarray})
"""The types of nearly all arrays, which are found faster than by `isinstance`."""

_INSTEAD = (
    "is no array: it holds one value per replica. Compute with them inside "
    "strategy.run(fn, args=(value,)); combine them with strategy.reduce("
    "rx.ReduceOp.SUM, value, axis=None) or strategy.gather(value, axis=0); or take "
    "this process' values with strategy.experimental_local_results(value) or "
    "value.values[i]."
)


class PerReplica:
    """One value per replica, as `strategy.run` returns it and takes it.

    The values are stored as a single array whose first dimension is the replica, so
    they stay on their devices until somebody asks for them. `PerReplica` is a pytree
    node: `jax.tree.map` sees that one stacked array. The value of a single replica may
    be used as an array, as in TF, where `run` returns it as it is. Several are none:
    arithmetic, indexing and JAX's functions raise an error that says how to get at the
    values, and `np.asarray` gives all, `[R, ...]`. (TF: `tf.distribute.PerReplica`.)

    Args:
        array: `[R, ...]`, entry `i` belongs to replica `i`. Sharded over the devices of
            the replicas along its first dimension. A sparse array has a batch dimension
            of replicas.
        num_active: Only the first `num_active` replicas hold examples, where a batch
            does not divide by the replicas; the others compute on copies, which count
            for nothing: `values`, `strategy.reduce` and `strategy.gather` leave them
            out. None: all hold examples.
        is_batch: Whether it is a part of a distributed dataset's batch, by which
            `strategy.run` knows who holds examples.

    Example:
        >>> import numpy as np, replicax as rx
        >>> rx.PerReplica(np.array([1.0, 2.0])).values
        (np.float64(1.0), np.float64(2.0))
    """

    __slots__ = ("array", "is_batch", "num_active")

    def __init__(
        self, array: PyTree, num_active: int | None = None, *, is_batch: bool = False
    ) -> None:
        self.array = array
        self.num_active = num_active
        self.is_batch = is_batch

    @property
    def values(self) -> tuple[PyTree, ...]:
        """This process' values, in the order of its replicas, each on its device.

        Those of replicas without examples are left out. Like a number, each may be used
        with arrays on any device: JAX copies it there.
        """
        array = self.array
        if is_composite(array):
            parts = [self.with_array(x).values for x in jax.tree.leaves(array)]
            return tuple(one_of(array, row) for row in zip(*parts, strict=True))
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            sharding = array.sharding
            if not sharding.is_fully_replicated or len(sharding.device_set) == 1:
                # Devices that work on the same replica have the same rows.
                rows = {s.index[0].start or 0: s.data for s in array.addressable_shards}
                return tuple(
                    _uncommitted(row)
                    for start in sorted(rows)
                    for number, row in enumerate(rows[start], start)
                    if self.num_active is None or number < self.num_active
                )
        return tuple(array[i] for i in range(self.num_active or array.shape[0]))

    def with_array(self, array: PyTree) -> "PerReplica":
        """Another array `[R, ...]` of the same replicas' values."""
        return PerReplica(array, self.num_active, is_batch=self.is_batch)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        if isinstance(self.array, jax.core.Tracer):
            raise _refusal(self, "np.asarray(value), while JAX traces")
        if is_composite(self.array):
            raise TypeError(
                f"np.asarray({self!r}): the values are no dense arrays. Take "
                "value.values[i], such as value.values[0].todense()."
            )
        if isinstance(self.array, jax.Array) and not self.array.is_fully_addressable:
            raise ValueError(
                f"np.asarray({self!r}): some of the values are on other workers. "
                "Combine them with strategy.reduce or strategy.gather, or take this "
                "worker's with strategy.experimental_local_results."
            )
        values = np.array(self.array, dtype=dtype, copy=copy)
        return values[0, ...] if len(values) == 1 else values[: self.num_active]

    # What asks for an array gets the only value there is. Of several, which is meant is
    # not known: in silence it would be the stacked array, or the object.

    def __jax_array__(self) -> PyTree:
        return _only_value(self, "an array was expected")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: PyTree, **options: PyTree
    ) -> PyTree:
        what = f"np.{ufunc.__name__}"
        arrays = (
            np.asarray(_only_value(x, what)) if isinstance(x, PerReplica) else x
            for x in inputs
        )
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> PyTree:
        # Only called for what is not there. `hasattr` stays what it was.
        if name not in _OF_ARRAYS:
            raise AttributeError(f"a PerReplica has no attribute {name!r}")
        if _holds_one(self):
            return getattr(_only_value(self, name), name)
        raise AttributeError(f"value.{name}: a PerReplica {_INSTEAD}")

    def __getitem__(self, key: PyTree) -> PyTree:
        return _only_value(self, "value[...]")[key]

    def __len__(self) -> int:
        return len(_only_value(self, "len(value)"))

    def __iter__(self) -> Iterator[PyTree]:
        return iter(_only_value(self, "iter(value)"))

    def __contains__(self, item: PyTree) -> bool:
        return item in _only_value(self, "`in value`")

    def __eq__(self, other: PyTree) -> PyTree:
        if other is self or not _is_compared(other):
            return other is self
        return _only_value(self, "`==`") == other

    def __ne__(self, other: PyTree) -> PyTree:
        if other is self or not _is_compared(other):
            return other is not self
        return _only_value(self, "`!=`") != other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(_only_value(self, "bool(value)"))

    def __index__(self) -> int:
        return _only_value(self, "an index").__index__()

    def __complex__(self) -> complex:
        return complex(_only_value(self, "complex(value)"))

    def __format__(self, spec: str) -> str:
        return format(_only_value(self, "format(value)"), spec) if spec else repr(self)

    def __float__(self) -> float:
        return float(_only_value(self, "float(value)"))

    def __int__(self) -> int:
        return int(_only_value(self, "int(value)"))

    def __repr__(self) -> str:
        array = self.array
        if not hasattr(array, "dtype"):  # Something else mapped over the pytree.
            return f"PerReplica({array!r})"
        if is_composite(array):
            return f"PerReplica({described(array)})"
        dtype = array.dtype if is_key(array) else np.dtype(array.dtype)
        text = (
            f"num_replicas={array.shape[0]}, shape={tuple(array.shape[1:])}, {dtype=!s}"
        )
        is_here = (
            is_array(array)
            and not isinstance(array, jax.core.Tracer)
            and getattr(array, "is_fully_addressable", True)
        )
        if self.num_active is not None:
            text += f", num_active={self.num_active}"
        if is_here and array.size <= 16 and not is_key(array):
            text += f", values={np.asarray(array).tolist()}"
        return f"PerReplica({text})"


def _holds_one(value: PerReplica) -> bool:
    """Whether there is one replica, whose value may be used as an array."""
    return is_array(value.array) and value.array.shape[0] == 1


def _only_value(value: PerReplica, what: str) -> PyTree:
    """The value of the only replica.

    Raises:
        TypeError: If there are several.
    """
    if not _holds_one(value):
        raise _refusal(value, what)
    return value.values[0]


def _refusal(value: PerReplica, what: str) -> TypeError:
    shape, each = getattr(value.array, "shape", None), ""
    if isinstance(shape, tuple) and shape:
        each = f" of {shape[0]} values of shape {shape[1:]}"
    return TypeError(f"{what}: a PerReplica{each} {_INSTEAD}")


def _operator(symbol: str, apply: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A method that applies an operator to the value of the only replica."""

    def method(value: PerReplica, *others: PyTree) -> PyTree:
        return apply(_only_value(value, f"`{symbol}`"), *others)

    return method


def _reflected(apply: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """An operator with its sides exchanged, for a value at its right."""
    return lambda value, other: apply(other, value)


_OPERATORS: dict[str, tuple[str, Callable[..., PyTree]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "truediv": ("/", operator.truediv),
    "floordiv": ("//", operator.floordiv),
    "mod": ("%", operator.mod),
    "divmod": ("divmod", divmod),
    "pow": ("**", operator.pow),
    "matmul": ("@", operator.matmul),
    "and": ("&", operator.and_),
    "or": ("|", operator.or_),
    "xor": ("^", operator.xor),
    "lshift": ("<<", operator.lshift),
    "rshift": (">>", operator.rshift),
}
_OTHERS: dict[str, tuple[str, Callable[..., PyTree]]] = {
    "neg": ("-", operator.neg),
    "pos": ("+", operator.pos),
    "invert": ("~", operator.invert),
    "abs": ("abs", abs),
    "round": ("round", round),
    "lt": ("<", operator.lt),
    "le": ("<=", operator.le),
    "gt": (">", operator.gt),
    "ge": (">=", operator.ge),
}
"""Operators with one side, and those whose mirror image is another one of them."""
for _name, (_symbol, _apply) in {**_OPERATORS, **_OTHERS}.items():
    setattr(PerReplica, f"__{_name}__", _operator(_symbol, _apply))
    if _name in _OPERATORS:
        setattr(PerReplica, f"__r{_name}__", _operator(_symbol, _reflected(_apply)))

_OF_ARRAYS = frozenset(
    name
    for kind in (jax.Array, np.ndarray)
    for name in dir(kind)
    if not name.startswith("_")
) | {"numpy"}


def _is_compared(other: object) -> bool:
    return is_array(other) or isinstance(other, PerReplica | int | float | complex)


def _uncommitted(array: PyTree) -> PyTree:
    """The same array, which JAX may copy to where other arrays are.

    A part of an array over several devices is bound to its own: with anything that lies
    elsewhere, such as a mirrored variable, JAX would refuse it.
    """
    if type(array) is not ArrayImpl:  # Keys of random numbers.
        return array
    return ArrayImpl(
        array.aval, array.sharding, [array], committed=False, _skip_checks=True
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _PerReplicaData:
    """What a tree's structure says of a `PerReplica`.

    A batch and a result may be mapped together.
    """

    num_active: int | None
    is_batch: bool = dataclasses.field(compare=False)


tree_util.register_pytree_node(
    PerReplica,
    lambda value: ((value.array,), _PerReplicaData(value.num_active, value.is_batch)),
    lambda data, children: PerReplica(
        children[0], data.num_active, is_batch=data.is_batch
    ),
)


def is_per_replica(value: object) -> bool:
    """Whether it is a `PerReplica`: a leaf, where trees are mapped value by value."""
    return isinstance(value, PerReplica)


def num_active_in(leaves: Iterable[object], name: str) -> int | None:
    """The number of replicas that hold examples of a call's arguments; None: all.

    Batches say so. Without any, results of an earlier call do; beside a batch, results
    may be state, such as weights, that outlives the batch they were made of.

    Args:
        leaves: The arguments' leaves.
        name: What is called, for messages.

    Raises:
        ValueError: If they differ.
    """
    values = [x for x in leaves if isinstance(x, PerReplica)]
    batches = [x for x in values if x.is_batch]
    found = {x.num_active for x in batches or values}
    if not batches:
        found.discard(None)
    if len(found) > 1:
        listed = ", ".join(map(repr, batches or values))
        raise ValueError(
            f"{name}: got values of batches that different numbers of replicas hold "
            f"examples of: {listed}. Combine the earlier ones with strategy.reduce or "
            "strategy.gather, or make batches of a size that the replicas divide."
        )
    return found.pop() if found else None


def spread(tree: PyTree) -> PyTree:
    """`tree`, with each stacked composite array as one replica's, of `PerReplica`s."""

    def one(value: PyTree) -> PyTree:
        if not isinstance(value, PerReplica) or not is_composite(value.array):
            return value
        return one_of(
            value.array, [value.with_array(x) for x in jax.tree.leaves(value.array)]
        )

    return jax.tree.map(one, tree, is_leaf=is_per_replica)
