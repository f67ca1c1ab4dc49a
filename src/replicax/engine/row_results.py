"""Checks that a step's results are rows, by which replicas' results are joined.

`predict` concatenates the results of the replicas along the first dimension. That is
what one device returns only if each row of a batch makes equally many rows of a result.
"""

from collections.abc import Callable

import jax
import numpy as np

from replicax._util.types import PyTree, Shape
from replicax.engine.composites import is_composite

__all__ = ["num_rows_of", "require_rows"]


def num_rows_of(arguments: PyTree) -> int:
    """The number of rows in one replica's part of a batch."""
    return jax.tree.leaves(arguments, is_leaf=is_composite)[0].shape[0]


def require_rows(
    caller: str,
    results: PyTree,
    arguments: PyTree,
    call: Callable[[PyTree], PyTree],
) -> None:
    """Raise for results that do not grow, row by row, with the batch.

    Args:
        caller: The public call to name.
        results: One replica's results, a pytree of arrays.
        arguments: The replica's part of the batch that they were computed from.
        call: Computes the results of other arguments. It is traced, with twice as many
            rows, where the results' own shapes do not tell.

    Raises:
        ValueError: For a scalar, for a result of another size, and for one that has
            the batch in another dimension.
    """
    num_rows = num_rows_of(arguments)
    named = jax.tree_util.tree_leaves_with_path(results)
    shapes = [np.shape(x) for _, x in named]
    if all(s[:1] == (num_rows,) and num_rows not in s[1:] for s in shapes):
        return
    try:
        larger = _shapes_of_twice(arguments, call)
    except Exception:  # noqa: BLE001
        # Whatever it raises, the step takes batches of this size only. That must divide
        # the results' sizes.
        larger = [_doubled(s) if s and s[0] % num_rows == 0 else () for s in shapes]
    for (path, _), shape, expected in zip(named, shapes, larger, strict=True):
        if not shape or expected != _doubled(shape):
            name = f"output {jax.tree_util.keystr(path)}" if path else "the output"
            raise ValueError(
                f"{caller}: {name} has shape {shape} for {num_rows} rows. Several "
                "replicas share a batch, and their outputs are joined along the first "
                "dimension, which must be that of the rows. Transpose the output; "
                "leave out what belongs to no row, such as a weight, and read it from "
                "the model; or use a strategy of one replica, such as "
                "rx.OneDeviceStrategy('cpu:0')."
            )


def _shapes_of_twice(
    arguments: PyTree, call: Callable[[PyTree], PyTree]
) -> list[Shape]:
    """The shapes of the results of a batch with twice as many rows."""
    if any(map(is_composite, jax.tree.leaves(arguments, is_leaf=is_composite))):
        raise TypeError("The arrays of composite ones have other dimensions.")
    shapes: list[Shape] = []

    def traced(arguments: PyTree) -> None:
        shapes[:] = map(np.shape, jax.tree.leaves(call(arguments)))

    def larger(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_doubled(x.shape), x.dtype)

    jax.eval_shape(traced, jax.tree.map(larger, arguments))
    return shapes


def _doubled(shape: Shape) -> Shape:
    return (2 * shape[0], *shape[1:])
