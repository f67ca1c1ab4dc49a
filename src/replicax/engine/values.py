"""`PerReplica`: one value per replica, stored as one global array.

Legend: `R` replicas, `b` examples per replica, `B = R * b` in the global batch.
"""

import weakref
from collections.abc import Callable

import jax
import jax.core
import numpy as np
from jax import tree_util
from jax.typing import DTypeLike

from replicax._private.jax import ArrayImpl
from replicax._util.types import PyTree
from replicax.engine.composites import (
    described,
    is_array,
    is_composite,
    is_key,
    unstacked_like,
)

__all__ = [
    "ARRAY_TYPES",
    "PerReplica",
    "is_per_replica",
    "note_num_active",
    "num_active_of",
    "spread",
]

ARRAY_TYPES = frozenset({ArrayImpl, np.ndarray})
"""The types of nearly all arrays: a look-up here is faster than `isinstance`."""

_INSTEAD = (
    "is no array: it holds one value per replica. Compute with them inside "
    "strategy.run(fn, args=(value,)); combine them with strategy.reduce("
    "rx.ReduceOp.SUM, value, axis=None) or strategy.gather(value, axis=0); or take "
    "this process' values with strategy.experimental_local_results(value) or "
    "value.values[i]."
)


class PerReplica:
    """One value per replica: an argument or a result of `strategy.run`.

    The values are stored as a single array whose first dimension is the replica, so
    they stay on their devices until they are read. `PerReplica` is a pytree node:
    `jax.tree.map` sees the stacked array. Results that are equal on all replicas are
    ordinary arrays instead. With one replica, such as in a batch, a `PerReplica` works
    like an array. With several, arithmetic, indexing and JAX's functions raise an error
    that explains how to get the values; `np.asarray` returns them all, `[R, ...]`. (TF:
    `tf.distribute.PerReplica`.)

    Args:
        array: `[R, ...]`; entry `i` belongs to replica `i`. Sharded over the devices of
            the replicas along its first dimension. A sparse array has a batch dimension
            of replicas.
        num_active: Only the first `num_active` replicas hold examples; None: all. The
            others compute on copies, which `values`, `strategy.reduce` and
            `strategy.gather` leave out.

    Example:
        >>> import numpy as np, replicax as rx
        >>> rx.PerReplica(np.array([1.0, 2.0])).values
        (np.float64(1.0), np.float64(2.0))
    """

    __slots__ = ("array", "is_block", "is_result", "num_active")

    def __init__(self, array: PyTree, num_active: int | None = None) -> None:
        self.array = array
        self.num_active = num_active
        self.is_result = False  # Whether it is a result of `run`.
        self.is_block = False  # Whether it holds the blocks of a sharded state.

    @property
    def values(self) -> tuple[PyTree, ...]:
        """This process' values, in the order of its replicas, each on its device.

        Replicas without examples are left out. If a value is used with arrays on
        another device, JAX copies it there.
        """
        # A late import: it imports Keras, which reading data does not need.
        from replicax.engine.scope import outside_meshes

        return outside_meshes(self._local_values)

    def _local_values(self) -> tuple[PyTree, ...]:
        array = self.array
        if is_composite(array):
            parts = [self.with_array(x).values for x in jax.tree.leaves(array)]
            return tuple(unstacked_like(array, row) for row in zip(*parts, strict=True))
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            sharding = array.sharding
            if not sharding.is_fully_replicated or len(sharding.device_set) == 1:
                # All devices of a replica have the same rows.
                rows = {s.index[0].start or 0: s.data for s in array.addressable_shards}
                return tuple(
                    _uncommitted(row)
                    for start in sorted(rows)
                    for number, row in enumerate(rows[start], start)
                    if self.num_active is None or number < self.num_active
                )
        return tuple(array[i] for i in range(self.num_active or array.shape[0]))

    def with_array(self, array: PyTree) -> "PerReplica":
        """A `PerReplica` of another array `[R, ...]`, with the same `num_active`."""
        return PerReplica(array, self.num_active)

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

    # With one replica, operations use the only value. With several, they raise, since
    # the stacked array would give wrong results silently.

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
        # Python calls this for missing attributes only.
        if name not in _ARRAY_ATTRIBUTES:
            raise AttributeError(f"a PerReplica has no attribute {name!r}")
        if _holds_one(self):
            return getattr(_only_value(self, name), name)
        raise AttributeError(f"value.{name}: a PerReplica {_INSTEAD}")

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

    def __format__(self, spec: str) -> str:
        return format(_only_value(self, "format(value)"), spec) if spec else repr(self)

    def __repr__(self) -> str:
        array = self.array
        if not hasattr(array, "dtype"):  # `jax.tree.map` returned another object.
            return f"PerReplica({array!r})"
        if is_composite(array):
            return f"PerReplica({described(array)})"
        dtype = array.dtype if is_key(array) else np.dtype(array.dtype)
        text = (
            f"num_replicas={array.shape[0]}, shape={tuple(array.shape[1:])}, {dtype=!s}"
        )
        is_readable = (
            is_array(array)
            and not isinstance(array, jax.core.Tracer)
            and getattr(array, "is_fully_addressable", True)
        )
        if self.num_active is not None:
            text += f", num_active={self.num_active}"
        if is_readable and array.size <= 16 and not is_key(array):
            text += f", values={np.asarray(array).tolist()}"
        return f"PerReplica({text})"


def _holds_one(value: PerReplica) -> bool:
    return is_array(value.array) and value.array.shape[0] == 1


def _only_value(value: PerReplica, operation: str) -> PyTree:
    """The only replica's value; a TypeError names `operation` if there are several."""
    if not _holds_one(value):
        raise _refusal(value, operation)
    return value.values[0]


def _refusal(value: PerReplica, operation: str) -> TypeError:
    shape, values = getattr(value.array, "shape", None), ""
    if isinstance(shape, tuple) and shape:
        values = f" of {shape[0]} values of shape {shape[1:]}"
    return TypeError(f"{operation}: a PerReplica{values} {_INSTEAD}")


def _operator(name: str) -> Callable[..., PyTree]:

    def method(value: PerReplica, *others: PyTree) -> PyTree:
        return getattr(_only_value(value, f"value.{name}"), name)(*others)

    return method


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_OTHERS = (
    "neg pos invert abs round lt le gt ge getitem len iter bool index complex float int"
)
for _name in [
    *_BINARY.split(),
    *(f"r{name}" for name in _BINARY.split()),
    *_OTHERS.split(),
]:
    setattr(PerReplica, f"__{_name}__", _operator(f"__{_name}__"))

_ARRAY_ATTRIBUTES = frozenset(
    name
    for kind in (jax.Array, np.ndarray)
    for name in dir(kind)
    if not name.startswith("_")
) | {"numpy"}


def _is_compared(other: object) -> bool:
    return is_array(other) or isinstance(other, PerReplica | int | float | complex)


def _uncommitted(array: PyTree) -> PyTree:
    """The same array; JAX may copy it to another device, as it is not committed."""
    if type(array) is not ArrayImpl:  # Random keys.
        return array
    return ArrayImpl(
        array.aval, array.sharding, [array], committed=False, _skip_checks=True
    )


tree_util.register_pytree_node(
    PerReplica,
    lambda value: ((value.array,), value.num_active),
    lambda num_active, children: PerReplica(children[0], num_active),
)


def is_per_replica(value: object) -> bool:
    """Whether `value` is a `PerReplica`; an `is_leaf` function."""
    return isinstance(value, PerReplica)


_num_active: dict[int, int] = {}


def note_num_active(array: jax.Array, number: int) -> None:
    """Record how many replicas `strategy.reduce` and `gather` count for an array.

    `array` is a result of `run` that is equal on all replicas.
    """
    _num_active[id(array)] = number
    weakref.finalize(array, _num_active.pop, id(array), None)


def num_active_of(array: object) -> int | None:
    """The number that `note_num_active` recorded; None: all replicas."""
    return _num_active.get(id(array))


def spread(tree: PyTree) -> PyTree:
    """Replace each stacked composite array by a composite array of `PerReplica`s."""

    def spread_leaf(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, PerReplica) or not is_composite(leaf.array):
            return leaf
        components = [leaf.with_array(x) for x in jax.tree.leaves(leaf.array)]
        return unstacked_like(leaf.array, components)

    return jax.tree.map(spread_leaf, tree, is_leaf=is_per_replica)
