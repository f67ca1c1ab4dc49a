"""Names of types that Python, NumPy and JAX have no name for."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["JSON", "JSONObject", "PyTree", "Shape", "Tensor"]

PyTree: TypeAlias = Any
"""A tree of arrays, or one array, as `jax.tree` takes it: any object may be a leaf."""

Tensor: TypeAlias = Any
"""A `jax.Array`, traced or not, as Keras' operations return it: they say no type."""

Shape: TypeAlias = tuple[int, ...]
"""The shape of an array."""

JSON: TypeAlias = (
    "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
)
"""A value that `json.dumps` writes."""

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object that is read by its fields, such as a message's header."""
