"""Keras layers whose variables parameter servers may hold."""

from replicax.ps.embedding import Embedding

__all__ = ["Embedding"]
