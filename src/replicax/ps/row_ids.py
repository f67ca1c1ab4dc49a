"""Numbers of a table's rows: whether they fit, and each of them once."""

import numpy as np

__all__ = ["check_ids", "sum_duplicates"]


def check_ids(ids: np.ndarray, num_rows: int, owner: str) -> np.ndarray:
    """`ids` as `int64[n]`, if they are rows of the table.

    Args:
        ids: Integers of shape `[n]`.
        num_rows: The table's rows.
        owner: What to name in errors, such as `"Table 'words'"`.

    Raises:
        ValueError: For another dtype or rank, and for an id out of range; it names the
            first one and its position.

    Example:
        >>> import numpy as np
        >>> check_ids(np.array([3, 12]), 10, "Table 'words'")
        Traceback (most recent call last):
            ...
        ValueError: Table 'words': id 12 at position 1 is not one of its rows 0 to 9.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{owner}: got ids of dtype {ids.dtype} and shape {ids.shape}, expected "
            "integers of shape (n,)."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        first = np.flatnonzero((ids < 0) | (ids >= num_rows))[0]
        raise ValueError(
            f"{owner}: id {ids[first]} at position {first} is not one of its rows 0 to "
            f"{num_rows - 1}."
        )
    return ids.astype(np.int64, copy=False)


def sum_duplicates(
    ids: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in ascending order, and the sums of their rows.

    Args:
        ids: `int64[n]`.
        gradients: `[n, dim]`.

    Example:
        >>> import numpy as np
        >>> gradients = np.array([[1.0], [2.0], [3.0]])
        >>> ids, sums = sum_duplicates(np.array([5, 2, 5]), gradients)
        >>> ids.tolist(), sums.tolist()
        ([2, 5], [[2.0], [4.0]])
    """
    if not ids.size:
        return ids, gradients
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    if len(starts) == len(ids):
        return ordered, gradients[order]
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
