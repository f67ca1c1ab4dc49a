"""Keras layers whose variables parameter servers may hold."""

from replicax.ps.embedding import Embedding, RowSource
from replicax.ps.table import TableSpec

__all__ = ["Embedding", "RowSource", "TableSpec"]
