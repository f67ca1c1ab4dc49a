"""Layout maps: the sharding of weights over the devices of one replica."""

from replicax.strategies.layout_maps import ATTENTION, DENSE, EMBEDDING, TRANSFORMER

__all__ = ["ATTENTION", "DENSE", "EMBEDDING", "TRANSFORMER"]
