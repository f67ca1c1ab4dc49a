"""Checks that a replica function returns rows, as `predict` needs.

`predict` concatenates the replicas' results along the first dimension. So each row of
the batch must yield the same number of rows.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from replicax._util.types import PyTree, Shape
from replicax.engine.composites import is_composite

__all__ = ["are_of_rows", "require_rows"]


def are_of_rows(shapes: Iterable[Shape], num_rows: int) -> bool:
    """Whether in all shapes the first dimension, and no other, is `num_rows`."""
    return all(s[:1] == (num_rows,) and num_rows not in s[1:] for s in shapes)


def require_rows(
    caller: str,
    results: PyTree,
    arguments: PyTree,
    call: Callable[[PyTree], PyTree],
) -> None:
    """Raise a ValueError for results whose rows are not proportional to the batch's.

    `call` computed `results` from `arguments`, the replica's part of the batch. If
    shapes do not decide, it is traced again with twice as many rows.
    """
    num_rows = jax.tree.leaves(arguments, is_leaf=is_composite)[0].shape[0]
    leaves = jax.tree_util.tree_leaves_with_path(results)
    shapes = [np.shape(x) for _, x in leaves]
    if are_of_rows(shapes, num_rows):
        return
    try:
        doubled = _shapes_for_doubled_batch(arguments, call)
    except Exception:  # noqa: BLE001
        # The function accepts batches of this size only.
        doubled = [_doubled(s) if s and s[0] % num_rows == 0 else () for s in shapes]
    for (path, _), shape, actual in zip(leaves, shapes, doubled, strict=True):
        if not shape or actual != _doubled(shape):
            name = f"output {jax.tree_util.keystr(path)}" if path else "the output"
            raise ValueError(
                f"{caller}: {name} has shape {shape} for {num_rows} rows. Several "
                "replicas share a batch, and their outputs are joined along the first "
                "dimension, which must be that of the rows. Transpose the output; do "
                "not return values that belong to no row, such as a weight, but read "
                "them from the model; compare rows, such as all pairs, in a loss and "
                "not in the model; or use a strategy of one replica, such as "
                "rx.OneDeviceStrategy('cpu:0')."
            )


def _shapes_for_doubled_batch(
    arguments: PyTree, call: Callable[[PyTree], PyTree]
) -> list[Shape]:
    if any(map(is_composite, jax.tree.leaves(arguments, is_leaf=is_composite))):
        raise TypeError("The components of composite arrays have no rows to double.")
    shapes: list[Shape] = []

    def traced(arguments: PyTree) -> None:
        shapes[:] = map(np.shape, jax.tree.leaves(call(arguments)))

    def twice(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_doubled(x.shape), x.dtype)

    jax.eval_shape(traced, jax.tree.map(twice, arguments))
    return shapes


def _doubled(shape: Shape) -> Shape:
    return (2 * shape[0], *shape[1:])
