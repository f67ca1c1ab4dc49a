"""Splits a batch into one batch per replica: arithmetic on shapes only.

Legend: `R` replicas, `b` examples in one replica's batch, `B = R * b` in a global one.
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
from replicax.input.sparse_rows import DividedRows, SparseRows

__all__ = [
    "Remainder",
    "Split",
    "leading_size",
    "leaf_name",
    "replicas_for",
    "rows_with_copies",
    "split_global_batch",
    "stack_replica_batches",
]


class Remainder(enum.StrEnum):
    """The policy for examples that do not divide equally between the replicas.

    Members compare equal to their strings: `"keep"`, `"drop"`, `"pad"`, `"error"`.

    Attributes:
        KEEP: The largest number of replicas that divides the batch shares it.
        DROP: They are dropped.
        PAD: Copies of the last examples fill up; a mask is False for them.
        ERROR: They are a `ValueError`.

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
    def of(cls, policy: "Remainder | str", caller: str) -> "Remainder":
        """Convert `policy` to a `Remainder`.

        Raises:
            ValueError: If it is none of the four.
        """
        try:
            return cls(policy)
        except ValueError:
            raise ValueError(
                f"{caller}: unknown remainder={policy!r}. Use 'keep' (give the batch "
                "to fewer replicas), 'drop' (leave the last examples out), 'pad' (add "
                "copies and yield a mask) or 'error'."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """A batch that was divided between replicas. `split_global_batch` returns it.

    Legend: `R` replicas, `b` examples in one replica's batch.

    Attributes:
        batch: Pytree of `[R, b, ...]` arrays, or None if the whole batch was dropped.
        mask: `bool[R, b]`, True for real examples; None unless padding is allowed.
        num_dropped: Number of dropped examples.
        num_active: Only the first `num_active` replicas have examples of their own, the
            others copies; None: all have.

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
        ValueError: If there is no array, a scalar, no row, or if the sizes differ.
        TypeError: If a leaf is no array.
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
    """The number of replicas that share so many rows equally; None: all.

    A batch that does not divide by the replicas goes to the largest number of them that
    divides it. The others compute along on copies that count for nothing, which keeps
    the step exact, batch normalization included.
    """
    if num_rows % num_replicas == 0:
        return None
    return max(k for k in range(1, num_replicas) if num_rows % k == 0)


def rows_with_copies(num_rows: int, num_active: int, num_replicas: int) -> np.ndarray:
    """The numbers of the rows of all replicas: those behind the active ones get copies.

    4 rows for 2 active replicas of 3: `[0, 1, 2, 3, 0, 1]`.
    """
    copies = np.tile(np.arange(num_rows // num_active), num_replicas - num_active)
    return np.concatenate([np.arange(num_rows), copies])


def split_global_batch(
    batch: PyTree, num_replicas: int, remainder: Remainder | str = Remainder.KEEP
) -> Split:
    """Divide a global batch between replicas, in order.

    With 2 replicas, `x[5, d]` becomes `[2, 5, d]`, of which only the first replica's
    rows count (`"keep"`); or `[2, 2, d]`, and one example is dropped (`"drop"`); or
    `[2, 3, d]` with the last row twice and a mask
    `[[True, True, True], [True, True, False]]` (`"pad"`).

    Args:
        batch: Pytree of `[B, ...]` arrays, NumPy or JAX.
        num_replicas: `R`.
        remainder: The policy if `R` does not divide `B`.

    Returns:
        A `Split` of `[R, b, ...]` views of the arrays (copies where rows were added),
        with the mask under `"pad"`.

    Raises:
        ValueError: If arrays disagree in `B` or are scalars; if the policy is unknown;
            under `"error"` if `R` does not divide `B`; under that and `"drop"`, if
            `B < R`.

    Example:
        >>> split = split_global_batch(np.arange(5), 2, "pad")
        >>> split.batch.tolist(), split.mask.tolist()
        ([[0, 1, 2], [3, 4, 4]], [[True, True, True], [True, True, False]])
    """
    caller = "distributed dataset"
    policy = Remainder.of(remainder, caller)
    if num_replicas < 1:
        raise ValueError(f"{caller}: got num_replicas={num_replicas!r}, expected >= 1.")
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
    if extra:  # Else all rows stay, of JAX's arrays without a copy.
        batch = jax.tree.map(lambda x: x[rows], batch)
    batch = jax.tree.map(lambda x: _rows(x, num_replicas), batch)
    return Split(batch=batch, mask=mask, num_dropped=num_dropped, num_active=num_active)


def stack_replica_batches(
    batches: Sequence[PyTree],
    num_replicas: int,
    remainder: Remainder | str = Remainder.KEEP,
) -> Split:
    """Stack per-replica batches, the first for replica 0.

    The last group of an epoch may be incomplete: fewer batches than replicas, or a last
    batch with fewer rows. Its batches go to as many replicas, those of unequal size as
    one batch that is divided anew; or the whole group is dropped, or padded with copies
    that the mask marks.

    Raises:
        ValueError: If the batches differ in structure or shape, or if the group is
            incomplete under `"error"`.
    """
    caller = "distribute_datasets_from_function"
    policy = Remainder.of(remainder, caller)
    sizes = [leading_size(batch, caller) for batch in batches]
    # Only the end of the data makes a batch shorter, so only the last one may be.
    short = len(set(sizes)) > 1
    if short and (len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]):
        policy = Remainder.ERROR
    if short and policy is Remainder.KEEP:
        return split_global_batch(
            jax.tree.map(lambda *xs: _joined(xs), *batches), num_replicas
        )
    is_whole = not short and len(sizes) == num_replicas
    if not is_whole and policy not in (Remainder.PAD, Remainder.KEEP):
        if policy is Remainder.DROP:
            return Split(batch=None, num_dropped=sum(sizes))
        raise ValueError(
            f"{caller}: one step needs {num_replicas} batches of equal size, one per "
            f"replica; got {len(sizes)} with sizes {sizes}. Drop the dataset's short "
            "batches (drop_remainder=True), repeat it, or pass remainder='keep' or "
            "'pad'."
        )
    padded = [
        jax.tree.map(lambda x, n=sizes[0] - size: _pad(x, n), batch)
        for batch, size in zip(batches, sizes, strict=True)
    ]
    padded += padded[-1:] * (num_replicas - len(padded))
    mask = num_active = None
    if policy is Remainder.KEEP and not is_whole:
        num_active = len(sizes)
    if policy is Remainder.PAD:
        real = np.array(sizes + [0] * (num_replicas - len(sizes)))
        mask = np.arange(sizes[0]) < real[:, None]
    return Split(batch=jax.tree.map(_stack, *padded), mask=mask, num_active=num_active)


def leaf_name(path: tree_util.KeyPath) -> str:
    """Format the leaf at `path` of a batch, for errors."""
    return f"leaf {tree_util.keystr(path)}" if path else "the batch"


def _rows(array: PyTree, num_replicas: int) -> PyTree:
    """Reshape `[R*b, ...]` to `[R, b, ...]`; a view for NumPy arrays."""
    if isinstance(array, SparseRows):
        return array.divided(num_replicas)
    per_replica = array.shape[0] // num_replicas
    return array.reshape(num_replicas, per_replica, *array.shape[1:])


def _pad(array: PyTree, num_rows: int) -> PyTree:
    """Add `num_rows` rows: the array's last rows, repeated if need be."""
    return array[_padded_rows(array.shape[0], num_rows)] if num_rows else array


def _padded_rows(size: int, num_rows: int) -> np.ndarray:
    """The numbers of `size` rows, and `num_rows` of the last of them again."""
    rows = np.arange(size)
    return np.concatenate([rows, np.resize(rows[-num_rows:], num_rows)])


def _joined(parts: Sequence[PyTree]) -> PyTree:
    """The rows of all parts, one part after another."""
    if isinstance(parts[0], SparseRows):
        return SparseRows.joined(parts)
    numpy = jnp if any(isinstance(x, jax.Array) for x in parts) else np
    return numpy.concatenate(parts)


def _stack(*arrays: PyTree) -> PyTree:
    if isinstance(arrays[0], SparseRows):
        return DividedRows(arrays)
    numpy = jnp if any(isinstance(x, jax.Array) for x in arrays) else np
    return numpy.stack(arrays)
