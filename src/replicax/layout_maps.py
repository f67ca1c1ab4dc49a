"""Layout maps: the sharding of weights over the devices of one replica."""

from replicax.strategies.layout_maps import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    TRANSFORMER,
    largest_axis,
    matches_nothing,
    rule,
)

__all__ = [
    "ATTENTION",
    "DENSE",
    "EMBEDDING",
    "TRANSFORMER",
    "largest_axis",
    "matches_nothing",
    "rule",
]
