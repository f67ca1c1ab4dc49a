"""Keras layers whose variables parameter servers may hold."""

from replicax.ps.embedding import Embedding, RowSource

__all__ = ["Embedding", "RowSource"]
