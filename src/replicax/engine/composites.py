"""Composite arrays: pytree nodes of several arrays that together mean one.

A sparse array (`BCOO`) holds its entries and their indices, a quantised one its numbers
and their scale. JAX flattens them like a dict. What is done to rows, or to the values
of replicas, has to be done to the whole and not to each part.

Legend: `R` replicas. A composite array is *stacked* where each of its parts has a
dimension of replicas in front, `[R, ...]`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree, TreeStructure

__all__ = [
    "concatenated_sparse",
    "densified",
    "described",
    "is_array",
    "is_composite",
    "is_key",
    "of_examples",
    "one_of",
    "reduced_sparse",
    "require_sparse",
    "stacked",
]


# Met all the time, and no composite arrays.
_PLAIN = frozenset({list, tuple, dict, type(None), np.ndarray, int, float, bool, str})


def is_array(value: object) -> bool:
    """Whether `value` is an array of NumPy's or JAX's."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def is_key(value: object) -> bool:
    """Whether `value` is an array of keys of random numbers, unknown to NumPy."""
    return isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )


def is_composite(value: object) -> bool:
    """Whether `value` is one array to its user, and several arrays to JAX.

    It has the `shape` and `dtype` of an array, and JAX flattens it. A node around one
    array of that shape, as a Flax variable is, needs no care and does not count.
    """
    if type(value) in _PLAIN or is_array(value):
        return False
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or getattr(value, "dtype", None) is None:
        return False
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1:
        return leaves[0] is not value and np.shape(leaves[0]) != shape
    return len(leaves) > 1


def described(value: PyTree) -> str:
    """A composite array's type, dtype and shape, for errors."""
    return f"{type(value).__qualname__} {value.dtype}{list(value.shape)}"


def stacked(structure: TreeStructure, parts: Sequence[PyTree]) -> PyTree:
    """The values of all replicas as one composite array, of their parts `[R, ...]`.

    `structure` is that of one replica's value. A sparse array gets a batch dimension,
    `[R, ...]`; an object of another type is as it was, but for its parts.
    """
    value = jax.tree.unflatten(structure, parts)
    if isinstance(value, sparse.BCOO | sparse.BCSR):
        value.shape = (parts[0].shape[0], *value.shape)
    return value


def one_of(value: PyTree, parts: Sequence[PyTree]) -> PyTree:
    """One replica's value of a stacked composite array, from that replica's parts."""
    one = jax.tree.unflatten(jax.tree.structure(value), parts)
    if isinstance(one, sparse.BCOO | sparse.BCSR):
        one.shape = one.shape[1:]
    return one


def of_examples(array: PyTree, num_active: int | None) -> PyTree:
    """The stacked values `[num_active, ...]` of replicas with examples; None: all."""
    if num_active is None or not is_composite(array):
        return array[:num_active] if num_active else array
    one = one_of(array, [x[:num_active] for x in jax.tree.leaves(array)])
    return stacked(jax.tree.structure(one), jax.tree.leaves(one))


def densified(value: PyTree, caller: str) -> PyTree:
    """A sparse array as a dense one; a TypeError for another composite array."""
    require_sparse(value, caller)
    return value.todense() if is_composite(value) else value


def require_sparse(value: PyTree, caller: str) -> None:
    """Raise a TypeError for a composite array whose values cannot be combined."""
    if is_composite(value) and not isinstance(value, sparse.BCOO | sparse.BCSR):
        raise TypeError(
            f"{caller}: got {described(value)}, one array that consists of "
            f"{len(jax.tree.leaves(value))}, which cannot be combined one by one. "
            "Make a dense array of it in the replica function and combine that."
        )


def reduced_sparse(
    array: PyTree, dims: int | Sequence[int], *, is_mean: bool
) -> PyTree:
    """The sum or mean of a stacked sparse array over dimensions, as a BCOO."""
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    total = sparse.bcoo_reduce_sum(_as_bcoo(array), axes=axes)
    if not is_mean:
        return total
    number = math.prod(array.shape[i] for i in axes)
    return sparse.BCOO((total.data / number, total.indices), shape=total.shape)


def concatenated_sparse(array: PyTree, axis: int) -> PyTree:
    """The replicas' values of a stacked sparse array along a dimension, as a BCOO."""
    array = _as_bcoo(array)
    parts = jax.tree.leaves(array)
    ones = [one_of(array, [x[i] for x in parts]) for i in range(array.shape[0])]
    return sparse.bcoo_concatenate(ones, dimension=axis)


def _as_bcoo(array: PyTree) -> PyTree:
    return array.to_bcoo() if isinstance(array, sparse.BCSR) else array
