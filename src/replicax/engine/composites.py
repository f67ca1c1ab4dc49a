"""Composite arrays: pytree nodes of several arrays that a user sees as one array.

Examples are sparse arrays (`BCOO`: entries and indices) and quantised arrays (numbers
and scale). The first dimension of these components is not the array's rows.

Legend: `R` replicas. A composite array is *stacked* where each of its components is
`[R, ...]`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from replicax._util.arguments import short
from replicax._util.types import PyTree

__all__ = [
    "densified",
    "described",
    "is_array",
    "is_composite",
    "is_foreign",
    "is_key",
    "require_dense",
    "require_summable",
    "unstacked_like",
]


# Frequent types that are not composite arrays.
_PLAIN = frozenset({list, tuple, dict, type(None), np.ndarray, int, float, bool, str})


def is_array(value: object) -> bool:
    """Whether `value` is an array of NumPy or JAX."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def is_key(value: object) -> bool:
    """Whether `value` is an array of JAX's random keys, which NumPy cannot hold."""
    return isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )


def is_composite(value: object) -> bool:
    """Whether `value` has `shape` and `dtype`, and JAX flattens it.

    A node around one array of that shape, such as a Flax variable, does not count.
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
    """An array's dtype and shape, for errors, after the type of a composite array."""
    if is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__qualname__} {value.dtype}{list(value.shape)}"


def is_foreign(value: object) -> bool:
    """Whether `value` is a sparse array of SciPy or TensorFlow."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package == "scipy":
        return hasattr(value, "tocoo")
    # `tf.data.Dataset.as_numpy_iterator` yields a SparseTensorValue.
    names = ("SparseTensor", "SparseTensorValue")
    return package == "tensorflow" and kind.__name__ in names


def unstacked_like(stacked: PyTree, components: Sequence[PyTree]) -> PyTree:
    """Build one replica's composite array from its `components`."""
    one = jax.tree.unflatten(jax.tree.structure(stacked), components)
    if isinstance(one, sparse.BCOO):
        one.shape = one.shape[1:]
    return one


def densified(value: PyTree, caller: str) -> PyTree:
    """Convert a sparse array to a dense one; refuse other composite arrays."""
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


def require_summable(tree: PyTree, caller: str, instead: str) -> None:
    """Raise a TypeError for random keys, strings and objects, naming their path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_number = isinstance(leaf, bool | int | float | complex) or is_array(leaf)
        is_variable = hasattr(leaf, "__jax_array__")
        has_sum = (is_number or is_variable) and not isinstance(leaf, str)
        if is_key(leaf) or not has_sum:
            what = described(leaf) if is_key(leaf) else short(leaf)
            place = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{caller}: got {what}{place}, which has no sum. Leave it out, or use "
                f"{instead}."
            )
