"""Composite arrays: pytree nodes of several arrays that together mean one.

A sparse array (`BCOO`) holds its entries and their indices, a quantised one its numbers
and their scale. JAX flattens them like a dict. What is done to rows, or to the values
of replicas, has to be done to the whole and not to each part.

Legend: `R` replicas. A composite array is *stacked* where each of its parts has a
dimension of replicas in front, `[R, ...]`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from replicax._util.types import PyTree

__all__ = [
    "densified",
    "described",
    "is_array",
    "is_composite",
    "is_foreign",
    "is_key",
    "one_of",
    "require_dense",
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


def is_foreign(value: object) -> bool:
    """Whether `value` is a sparse array of SciPy's or TensorFlow's."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == "scipy":
        return hasattr(value, "tocoo")
    # TensorFlow's own, and what a tf.data.Dataset yields as NumPy arrays.
    names = ("SparseTensor", "SparseTensorValue")
    return package == "tensorflow" and kind.__name__ in names


def one_of(value: PyTree, parts: Sequence[PyTree]) -> PyTree:
    """One replica's value of a stacked composite array, from that replica's parts."""
    one = jax.tree.unflatten(jax.tree.structure(value), parts)
    if isinstance(one, sparse.BCOO):
        one.shape = one.shape[1:]
    return one


def densified(value: PyTree, caller: str) -> PyTree:
    """A sparse array as a dense one; a TypeError for another composite array."""
    if isinstance(value, sparse.JAXSparse):
        return value.todense()
    require_dense(value, caller)
    return value


def require_dense(tree: PyTree, caller: str) -> None:
    """Raise a TypeError for a composite array in a tree."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_composite):
        if is_composite(leaf):
            raise TypeError(
                f"{caller}: got {described(leaf)}, expected dense arrays. Convert it "
                "in the replica function, such as with x.todense()."
            )
