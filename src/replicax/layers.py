"""Keras layers whose variables a strategy may keep elsewhere."""

from replicax.ps.embedding import Embedding, RowSource

__all__ = ["Embedding", "RowSource"]
