"""How the arguments of a call become inputs of a program."""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from replicax.engine.cache import static_key
from replicax.engine.composites import is_composite
from replicax.engine.row_arrays import whole
from replicax.engine.sparse_rows import is_foreign
from replicax.engine.values import ARRAY_TYPES, PerReplica, spread

__all__ = ["Arguments", "Kind", "flatten_call"]


class Kind(enum.Enum):
    """Where one leaf of the arguments comes from."""

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
        self, structure: Any, kinds: Sequence[Kind], statics: Sequence[Any] = ()
    ) -> None:
        self._structure = structure
        self._kinds = tuple(kinds)
        self._statics = tuple(statics)

    def specs(self, axis_name: str, leading: tuple[None, ...]) -> tuple[Any, ...]:
        """How each array is split, after `leading` dimensions that are not."""
        split, whole = PartitionSpec(*leading, axis_name), PartitionSpec()
        return tuple(
            whole if kind is Kind.MIRRORED else split
            for kind in self._kinds
            if kind is not Kind.STATIC
        )

    def on_device(
        self, arrays: Sequence[Any], num_replicas: int
    ) -> tuple[list[Any], list[int | None]]:
        """One device's parts of the arrays, for a `vmap` over its replicas.

        Args:
            arrays: The device's parts.
            num_replicas: Number of replicas on the device.

        Returns:
            The arrays, those that are split with a dimension of replicas in front, and
            `in_axes` for them.
        """
        dynamic = [kind for kind in self._kinds if kind is not Kind.STATIC]
        split = [None if kind is Kind.MIRRORED else 0 for kind in dynamic]
        parts = [
            x
            if axis is None
            else x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:])
            for x, axis in zip(arrays, split, strict=True)
        ]
        return parts, split

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One replica's `(args, kwargs)` from its parts of the arrays."""
        dynamic, static = iter(arrays), iter(self._statics)
        leaves = []
        for kind in self._kinds:
            if kind is Kind.STATIC:
                leaves.append(next(static))
            elif kind is Kind.PER_REPLICA:
                leaves.append(next(dynamic)[0])
            else:
                leaves.append(next(dynamic))
        return jax.tree.unflatten(self._structure, leaves)


_PYTHON_NUMBERS = (int, float, complex)


def flatten_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    place: Callable[[Any, Kind], Any],
) -> tuple[Hashable, list[Any], Callable[[], Arguments]]:
    """Split the arguments of `strategy.run` into arrays and everything else.

    `PerReplica` leaves are split, arrays and Python numbers are given whole to every
    replica, and the rest (booleans, strings, models, variables) is part of the program.
    SciPy's sparse arrays become JAX's.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        place: Puts an array where the replicas are.

    Returns:
        A key that is equal for calls that may share a program, the arrays, and a maker
        of the `Arguments`.
    """
    flat, structure = jax.tree.flatten(
        (tuple(args), dict(kwargs)), is_leaf=lambda x: isinstance(x, PerReplica)
    )
    arrays, kinds, statics, key = [], [], [], []
    for leaf in flat:
        if isinstance(leaf, PerReplica):
            kind, leaf = Kind.PER_REPLICA, leaf.array
            if type(leaf) not in ARRAY_TYPES and is_composite(leaf):
                args, kwargs = spread((args, kwargs))
                return flatten_call(args, kwargs, place)
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic) or (
            isinstance(leaf, _PYTHON_NUMBERS) and not isinstance(leaf, bool)
        ):
            kind = Kind.MIRRORED
        elif is_foreign(leaf):
            args, kwargs = jax.tree.map(whole, (args, kwargs))
            return flatten_call(args, kwargs, place)
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
    return (
        (structure, tuple(key)),
        arrays,
        lambda: Arguments(structure, kinds, statics),
    )
