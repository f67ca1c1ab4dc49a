"""`PerReplica`: one value per replica, held as one global array.

Legend: `R` replicas, `b` examples in a replica's batch, `B = R * b` in the global one.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

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
    node: `jax.tree.map` sees that one stacked array. It is no array itself: arithmetic,
    indexing and JAX's functions raise an error that says how to get at the values.
    `np.asarray` gives all of them, `[R, ...]`. (TF: `tf.distribute.PerReplica`.)

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
        if not is_array(array) and is_composite(array):
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
            _refuse(self, "np.asarray(value), while JAX traces")
        if not is_array(self.array) and is_composite(self.array):
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
        return values[: self.num_active]

    # What asks for an array gets an error: each replica has one, and which is meant is
    # not known. In silence it would be the stacked one, or the object.

    def __jax_array__(self) -> NoReturn:
        _refuse(self, "an array was expected")

    def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> NoReturn:
        _refuse(self, f"np.{ufunc.__name__}")

    def __getattr__(self, name: str) -> NoReturn:
        # Only called for what is not there. `hasattr` stays what it was.
        if name in _OF_ARRAYS:
            raise AttributeError(f"value.{name}: a PerReplica {_INSTEAD}")
        raise AttributeError(f"a PerReplica has no attribute {name!r}")

    def __getitem__(self, key: object) -> NoReturn:
        _refuse(self, "value[...]")

    def __len__(self) -> NoReturn:
        _refuse(self, "len(value)")

    def __iter__(self) -> Iterator[PyTree]:
        _refuse(self, "iter(value)")

    def __contains__(self, item: object) -> NoReturn:
        _refuse(self, "`in value`")

    def __eq__(self, other: object) -> bool:
        if other is not self and _is_compared(other):
            _refuse(self, "`==`")
        return other is self

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self._only_value("bool"))

    def __index__(self) -> int:
        return self._only_value("an index").__index__()

    def __complex__(self) -> complex:
        return complex(self._only_value("complex"))

    def __format__(self, spec: str) -> str:
        return format(self._only_value("format"), spec) if spec else repr(self)

    def __float__(self) -> float:
        return float(self._only_value("float"))

    def __int__(self) -> int:
        return int(self._only_value("int"))

    def _only_value(self, kind: str) -> PyTree:
        if self.array.shape[0] != 1:
            raise TypeError(
                f"{kind}(PerReplica): there are {self.array.shape[0]} values, one per "
                "replica. Combine them first: strategy.reduce(rx.ReduceOp.SUM, value, "
                "axis=None), or take one with value.values[i]."
            )
        return self.array[0]

    def __repr__(self) -> str:
        array = self.array
        if not hasattr(array, "dtype"):  # Something else mapped over the pytree.
            return f"PerReplica({array!r})"
        if not is_array(array) and is_composite(array):
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


def _refuse(value: PerReplica, what: str) -> NoReturn:
    shape, each = getattr(value.array, "shape", None), ""
    if isinstance(shape, tuple) and shape:
        each = f" of {shape[0]} values of shape {shape[1:]}"
    raise TypeError(f"{what}: a PerReplica{each} {_INSTEAD}")


def _refusal(symbol: str) -> Callable[..., PyTree]:
    def refuse(value: PerReplica, *_: object) -> NoReturn:
        _refuse(value, f"`{symbol}`")

    return refuse


_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "divmod": "divmod",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
for _name, _symbol in _OPERATORS.items():
    for _prefix in ("", "r"):
        setattr(PerReplica, f"__{_prefix}{_name}__", _refusal(_symbol))
for _name, _symbol in {
    **{"neg": "-", "pos": "+", "invert": "~", "abs": "abs", "round": "round"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}.items():
    setattr(PerReplica, f"__{_name}__", _refusal(_symbol))

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
        if not isinstance(value, PerReplica) or is_array(value.array):
            return value
        if not is_composite(value.array):
            return value
        return one_of(
            value.array, [value.with_array(x) for x in jax.tree.leaves(value.array)]
        )

    return jax.tree.map(one, tree, is_leaf=is_per_replica)
