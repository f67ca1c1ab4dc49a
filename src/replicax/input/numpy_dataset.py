"""Arrays in memory as a dataset of single examples."""

from typing import TYPE_CHECKING, Any

import jax

from replicax.engine.composites import described
from replicax.engine.row_arrays import is_one_array
from replicax.input.split import leading_size

if TYPE_CHECKING:
    import grain

__all__ = ["numpy_dataset"]


def numpy_dataset(arrays: Any) -> "grain.MapDataset[Any]":
    """Make a Grain dataset whose elements are the rows of `arrays`.

    The dataset can be shuffled, mapped, batched and repeated like any other:
    `numpy_dataset((x, y)).shuffle(seed=0).batch(64)`.

    Args:
        arrays: Pytree of `[N, ...]` NumPy arrays, such as `(x, y)`. Not copied.

    Returns:
        A `grain.MapDataset` of `N` elements, pytrees of `[...]` arrays.

    Raises:
        ValueError: If the arrays differ in dimension 0, or if there is none.
    """
    for leaf in jax.tree.leaves(arrays, is_leaf=is_one_array):
        if is_one_array(leaf):
            raise TypeError(
                f"numpy_dataset: {described(leaf)} cannot be put together again from "
                "single examples. Pass the arrays with batch_size=... to "
                "strategy.experimental_distribute_dataset or to fit, which cut batches "
                "of them."
            )
    import grain  # Only who makes such datasets pays for the import.

    return grain.MapDataset.source(_Rows(arrays, leading_size(arrays, "numpy_dataset")))


class _Rows:
    """Grain's random-access data source. Its `repr` goes into Grain's checkpoints."""

    def __init__(self, arrays: Any, num_rows: int) -> None:
        self._arrays = arrays
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda x: x[index], self._arrays)

    def __repr__(self) -> str:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self._arrays)
        return f"numpy_dataset({shapes})"
