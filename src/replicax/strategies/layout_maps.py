"""Layout maps: rules that shard weights over the devices of one replica, by path.

A map's keys are regular expressions on variables' paths; a value is a tuple with an
axis name or None for each dimension, as in `keras.distribution.LayoutMap`. The axis of
the devices of one replica is `"model"`.
"""

import math
from collections.abc import Callable, Mapping

from jax.sharding import PartitionSpec

from replicax._util.arguments import matching_expression
from replicax._util.types import PyTree
from replicax.engine.layouts import FEWEST_ELEMENTS
from replicax.jax_loops.placement import MatchedRule

__all__ = [
    "ATTENTION",
    "DENSE",
    "EMBEDDING",
    "TRANSFORMER",
    "largest_axis",
    "matched_rule",
    "rule",
]

MODEL_AXIS = "model"

DENSE: Mapping[str, tuple[str | None, ...]] = {
    r"(.*/)?[^/]*dense[^/]*/kernel": (None, MODEL_AXIS),
    r"(.*/)?[^/]*dense[^/]*/bias": (MODEL_AXIS,),
}
"""`Dense` layers with Keras' default names: each device has some of the outputs."""

ATTENTION: Mapping[str, tuple[str | None, ...]] = {
    r"(.*/)?(query|key|value)/kernel": (None, MODEL_AXIS, None),
    r"(.*/)?(query|key|value)/bias": (MODEL_AXIS, None),
    r"(.*/)?attention_output/kernel": (MODEL_AXIS, None, None),
}
"""`MultiHeadAttention` and `GroupQueryAttention`: each device has some of the heads.

(Shoeybi et al. 2019, Megatron-LM.) The number of devices must divide that of heads.
"""

EMBEDDING: Mapping[str, tuple[str | None, ...]] = {
    r"(.*/)?[^/]*embedding[^/]*/embeddings": (None, MODEL_AXIS),
}
"""`Embedding` layers: each device has some of the features of every row."""

TRANSFORMER: Mapping[str, tuple[str | None, ...]] = {**DENSE, **ATTENTION, **EMBEDDING}
"""Stacks of attention and dense layers."""

Rule = Callable[[str, tuple[int, ...]], PartitionSpec]


def rule(layout_map: object, num_devices: int, caller: str) -> Rule:
    """Convert a layout map to a function of a weight's path and shape.

    The map is a `keras.distribution.LayoutMap`, a mapping of regular expressions to
    tuples, or None for `largest_axis`. The function raises errors of paths and shapes.
    """
    if layout_map is None:
        return lambda _, shape: largest_axis(shape, num_devices)
    matched = matched_rule(layout_map, {MODEL_AXIS: num_devices}, caller)
    return lambda path, shape: matched(path, shape) or PartitionSpec()


def matched_rule(
    layout_map: object, axes: Mapping[str, int], caller: str
) -> MatchedRule:
    """Convert a layout map to a function that returns None for a path without match.

    `axes` are the mesh axes that weights may be sharded over, with their sizes. For a
    weight of another rank than the matching entry's, the function returns None as well:
    optimizer state may have fewer dimensions than its weight.
    """
    if not isinstance(layout_map, Mapping):
        raise TypeError(
            f"{caller}: layout_map must be a keras.distribution.LayoutMap or a dict of "
            f"regular expressions to tuples of axis names; got {layout_map!r}."
        )
    entries: dict[str, tuple[str | None, ...]] = {}
    for pattern in layout_map:
        layout: PyTree = layout_map[pattern]  # Keras may have made a `TensorLayout`.
        entries[pattern] = tuple(getattr(layout, "axes", layout))
    for pattern, names in entries.items():
        unknown = sorted({str(n) for n in names if n is not None and n not in axes})
        if unknown:
            raise ValueError(
                f"{caller}: layout_map[{pattern!r}] is {names}, but the only axis that "
                f"weights are sharded over is {' or '.join(map(repr, axes))}, "
                f"not {', '.join(unknown)}. Batches need no entry: every batch is "
                "sharded over the replicas."
            )

    def by_path(path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        pattern = matching_expression(entries, path, caller, "layout_map")
        if pattern is None or len(entries[pattern]) != len(shape):
            return None
        names = entries[pattern]
        for dim, name in enumerate(names):
            if name is not None and shape[dim] % axes[name]:
                raise ValueError(
                    f"{caller}: layout_map[{pattern!r}] shards dimension "
                    f"{dim} of {path!r} {shape} over {axes[name]} devices, "
                    "which does not divide it. Choose another dimension or another "
                    f"{'model_parallel' if name == MODEL_AXIS else 'number of devices'}"
                    "."
                )
        return PartitionSpec(*names)

    return by_path


def largest_axis(shape: tuple[int, ...], num_devices: int) -> PartitionSpec:
    """Shard a weight along its largest dimension that the devices divide.

    Of equal dimensions the last one is sharded. Small weights are not sharded.
    """
    divisible = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
    if num_devices == 1 or not divisible or math.prod(shape) < FEWEST_ELEMENTS:
        return PartitionSpec()
    chosen = max(divisible, key=lambda dim: (shape[dim], dim))
    return PartitionSpec(
        *(MODEL_AXIS if dim == chosen else None for dim in range(len(shape)))
    )
