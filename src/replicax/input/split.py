"""Splits a batch into one batch per replica, on the host.

Legend: `R` replicas, `b` examples in one replica's batch, `B` in a global batch.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import numpy as np
from jax import numpy as jnp
from jax import tree_util

from replicax._util.types import PyTree
from replicax.engine.composites import is_composite
from replicax.input.sparse_rows import SparseRows

__all__ = [
    "Remainder",
    "Split",
    "leading_size",
    "leaf_name",
    "replicas_for",
    "rows_with_copies",
    "split_global_batch",
    "split_replica_batches",
]


class Remainder(enum.StrEnum):
    """The policy for examples that do not divide equally between the replicas.

    Members compare equal to their strings: `"keep"`, `"drop"`, `"pad"`, `"error"`.

    Attributes:
        KEEP: Use the largest number of replicas that can share the batch equally.
        DROP: Drop the last examples.
        PAD: Add copies of the last examples; a mask is False for the copies.
        ERROR: Raise a `ValueError`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> batch = np.arange(5)
        >>> rx.input.split_global_batch(batch, 2, rx.input.Remainder.KEEP).num_active
        1
        >>> rx.input.split_global_batch(batch, 2, rx.input.Remainder.DROP).num_dropped
        1
    """

    KEEP = "keep"
    DROP = "drop"
    PAD = "pad"
    ERROR = "error"

    @classmethod
    def _missing_(cls, value: object) -> "Remainder":
        raise ValueError(
            f"unknown remainder={value!r}. Use 'keep' (give the batch to fewer "
            "replicas), 'drop' (drop the last examples), 'pad' (add copies and yield a "
            "mask) or 'error'."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """The result of `split_global_batch`: a batch divided between replicas.

    Legend: `R` replicas, `b` examples in one replica's batch.

    Attributes:
        batch: Pytree of `[R, b, ...]` arrays, or None if the whole batch was dropped.
        mask: `bool[R, b]`, False for copies; None unless the policy is `"pad"`.
        num_dropped: Number of dropped examples.
        num_active: Number of replicas with examples of their own; the last replicas
            have copies. None: all have their own, or the policy is `"pad"`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.arange(6, dtype="float32")
        >>> split = rx.input.split_global_batch({"x": x}, 2)
        >>> split.batch["x"].tolist(), split.num_active
        ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], None)
    """

    batch: PyTree
    mask: np.ndarray | None = None
    num_dropped: int = 0
    num_active: int | None = None


def leading_size(tree: PyTree, caller: str) -> int:
    """Return the size of dimension 0, which all arrays of `tree` must share.

    Raises:
        ValueError: If there is no array, an array is a scalar or has no row, or sizes
            differ.
        TypeError: If a leaf is not an array.
    """
    sizes: dict[str, int] = {}
    for path, leaf in tree_util.tree_leaves_with_path(tree, is_leaf=is_composite):
        name = leaf_name(path)
        shape = getattr(leaf, "shape", None)
        if shape is None:
            raise TypeError(
                f"{caller}: {name} is a {type(leaf).__name__}, expected an array. "
                "Convert it with np.asarray."
            )
        if len(shape) == 0:
            raise ValueError(
                f"{caller}: {name} is a scalar, expected an array with one row per "
                "example. Batch the dataset first; broadcast a value that all examples "
                "share outside of it; np.asarray a list of numbers; pad a list of rows "
                "of unequal length with keras.utils.pad_sequences."
            )
        sizes[name] = int(shape[0])
    if not sizes:
        raise ValueError(f"{caller}: got {tree!r}, which holds no array.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"{caller}: arrays differ in dimension 0, the number of examples; got "
            f"{{{listed}}}, expected equal sizes."
        )
    size = next(iter(sizes.values()))
    if size == 0:
        raise ValueError(f"{caller}: got arrays of 0 examples, expected 1 or more.")
    return size


def replicas_for(num_rows: int, num_replicas: int) -> int | None:
    """Return the largest number of replicas that can share rows equally; None: all.

    The other replicas compute on copies, which losses, gradients and batch statistics
    ignore: the step has the result of the unpadded batch.
    """
    if num_rows % num_replicas == 0:
        return None
    return max(k for k in range(1, num_replicas) if num_rows % k == 0)


def rows_with_copies(num_rows: int, num_active: int, num_replicas: int) -> np.ndarray:
    """Return the row numbers for all replicas; inactive replicas copy replica 0's rows.

    For 4 rows, 2 active replicas and 3 in all: `[0, 1, 2, 3, 0, 1]`.
    """
    copies = np.tile(np.arange(num_rows // num_active), num_replicas - num_active)
    return np.concatenate([np.arange(num_rows), copies])


def split_global_batch(
    batch: PyTree, num_replicas: int, remainder: Remainder | str = Remainder.KEEP
) -> Split:
    """Divide a global batch between replicas, in order.

    With 2 replicas, `x[5, d]` becomes:

    - `"keep"`: `[2, 5, d]`; the second replica has copies, which do not count.
    - `"drop"`: `[2, 2, d]`; the last example is dropped.
    - `"pad"`: `[2, 3, d]`; the last row is repeated, and the mask is
      `[[True, True, True], [True, True, False]]`.

    Args:
        batch: Pytree of `[B, ...]` arrays, NumPy or JAX.
        num_replicas: `R`.
        remainder: The policy if `R` does not divide `B`.

    Returns:
        A `Split` of arrays `[R, b, ...]`, views unless rows were added.

    Raises:
        ValueError: If arrays differ in `B` or are scalars; if the policy is unknown; if
            `R` does not divide `B` (policy `"error"`); if `B < R` (`"error"` and
            `"drop"`).

    Example:
        >>> split = split_global_batch(np.arange(5), 2, "pad")
        >>> split.batch.tolist(), split.mask.tolist()
        ([[0, 1, 2], [3, 4, 4]], [[True, True, True], [True, True, False]])
    """
    caller = "distributed dataset"
    policy = Remainder(remainder)

    size = leading_size(batch, caller)
    extra = size % num_replicas
    if size < num_replicas and policy not in (Remainder.KEEP, Remainder.PAD):
        raise ValueError(
            f"{caller}: a batch of {size} examples cannot be shared by {num_replicas} "
            "replicas, each needs one. Make batches larger, or pass remainder='keep' "
            "or 'pad'."
        )
    if extra and policy is Remainder.ERROR:
        raise ValueError(
            f"{caller}: {size} examples do not divide between {num_replicas} replicas "
            f"({extra} are left over). Choose a batch size that is a multiple of "
            f"{num_replicas}, or pass remainder='keep', 'drop' or 'pad'."
        )
    num_active = replicas_for(size, num_replicas) if policy is Remainder.KEEP else None
    mask, num_dropped = None, 0
    rows: np.ndarray | slice = slice(size - extra)
    if num_active is not None:
        rows = rows_with_copies(size, num_active, num_replicas)
    elif policy is Remainder.PAD:
        rows = _padded_rows(size, -size % num_replicas)
        mask = _rows(np.arange(len(rows)) < size, num_replicas)
    else:
        num_dropped = extra
    if extra:  # If there are none, indexing would only copy JAX arrays.
        batch = jax.tree.map(lambda x: x[rows], batch)
    batch = jax.tree.map(lambda x: _rows(x, num_replicas), batch)
    return Split(batch=batch, mask=mask, num_dropped=num_dropped, num_active=num_active)


def split_replica_batches(
    batches: Sequence[PyTree],
    num_replicas: int,
    remainder: Remainder | str = Remainder.KEEP,
) -> Split:
    """Concatenate the per-replica batches of one step, and split them again.

    With one equal batch per replica, the first batch is for replica 0. At the end of
    the data there may be fewer batches, or a last batch with fewer rows. Then the
    policy `"drop"` drops all batches; otherwise see `split_global_batch`.

    Raises:
        ValueError: If the batches differ in structure or shape; if batches or rows are
            missing (policy `"error"`).
    """
    caller = "distribute_datasets_from_function"
    policy = Remainder(remainder)
    sizes = [leading_size(batch, caller) for batch in batches]
    is_complete = sizes == sizes[:1] * num_replicas
    # Only a shorter last batch is the end of the data; other sizes are an error.
    is_end = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    if not is_end or (policy is Remainder.ERROR and not is_complete):
        raise ValueError(
            f"{caller}: one step needs {num_replicas} batches of equal size, one per "
            f"replica; got {len(sizes)} with sizes {sizes}. Drop the dataset's short "
            "batches (drop_remainder=True), repeat it, or pass remainder='keep' or "
            "'pad'."
        )
    if policy is Remainder.DROP and not is_complete:
        return Split(batch=None, num_dropped=sum(sizes))
    batch = jax.tree.map(lambda *xs: _concatenate(xs), *batches)
    return split_global_batch(batch, num_replicas, policy)


def leaf_name(path: tree_util.KeyPath) -> str:
    """Format the leaf at `path` of a batch, for errors."""
    return f"leaf {tree_util.keystr(path)}" if path else "the batch"


def _rows(array: PyTree, num_replicas: int) -> PyTree:
    """Reshape `[R*b, ...]` to `[R, b, ...]`; a view for NumPy arrays."""
    if isinstance(array, SparseRows):
        return array.divided(num_replicas)
    per_replica = array.shape[0] // num_replicas
    return array.reshape(num_replicas, per_replica, *array.shape[1:])


def _padded_rows(size: int, num_rows: int) -> np.ndarray:
    """Return the numbers of `size` rows, then the last `num_rows` of them again."""
    rows = np.arange(size)
    return np.concatenate([rows, np.resize(rows[-num_rows:], num_rows)])


def _concatenate(arrays: Sequence[PyTree]) -> PyTree:
    if isinstance(arrays[0], SparseRows):
        return SparseRows.joined(arrays)
    numpy = jnp if any(isinstance(x, jax.Array) for x in arrays) else np
    return numpy.concatenate(arrays)
