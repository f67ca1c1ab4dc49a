"""Sums and concatenations of the replicas' sparse arrays, in a traced program.

Legend: `R` replicas; a stacked array has a first batch dimension of replicas.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import sparse

from replicax.engine.composites import described, is_composite, one_of

__all__ = ["concatenated_sparse", "densified", "reduced_sparse", "require_sparse"]


def densified(value: Any, caller: str) -> Any:
    """A sparse array as a dense one; anything else as it is.

    Raises:
        TypeError: For another composite array.
    """
    require_sparse(value, caller)
    return value.todense() if is_composite(value) else value


def require_sparse(value: Any, caller: str) -> None:
    """Raise for a composite array whose values cannot be combined.

    Raises:
        TypeError: Naming its type.
    """
    if is_composite(value) and not isinstance(value, sparse.BCOO | sparse.BCSR):
        raise TypeError(
            f"{caller}: got {described(value)}, one array that consists of "
            f"{len(jax.tree.leaves(value))}, which cannot be combined one by one. "
            "Make a dense array of it in the replica function and combine that."
        )


def reduced_sparse(array: Any, dims: int | Sequence[int], *, is_mean: bool) -> Any:
    """The sum or mean of a stacked sparse array over dimensions, as a BCOO."""
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    total = sparse.bcoo_reduce_sum(_as_bcoo(array), axes=axes)
    if not is_mean:
        return total
    number = math.prod(array.shape[i] for i in axes)
    return sparse.BCOO((total.data / number, total.indices), shape=total.shape)


def concatenated_sparse(array: Any, axis: int) -> Any:
    """The replicas' values of a stacked sparse array along a dimension, as a BCOO."""
    array = _as_bcoo(array)
    parts = jax.tree.leaves(array)
    ones = [one_of(array, [x[i] for x in parts]) for i in range(array.shape[0])]
    return sparse.bcoo_concatenate(ones, dimension=axis)


def _as_bcoo(array: Any) -> Any:
    return array.to_bcoo() if isinstance(array, sparse.BCSR) else array
