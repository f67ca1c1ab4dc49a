"""Type aliases: pytrees, tensors, shapes, JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = [
    "JSON",
    "JSONObject",
    "Logs",
    "PyTree",
    "Shape",
    "Tensor",
    "TreeStructure",
]

PyTree: TypeAlias = Any
"""A tree of arrays, or one array: any argument of `jax.tree.map`."""

Tensor: TypeAlias = Any
"""A `jax.Array`, traced or not; Keras does not annotate its operations."""

Logs: TypeAlias = dict[str, Any]
"""Values of losses and metrics by name, as Keras' callbacks get them."""

Shape: TypeAlias = tuple[int, ...]
"""The shape of an array."""

JSON: TypeAlias = (
    "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
)
"""A value that `json.dumps` writes."""

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object that is read by its fields, such as a message's header."""


class TreeStructure(Protocol):
    """The structure of a tree without its leaves, from `jax.tree.structure`."""

    @property
    def num_leaves(self) -> int: ...

    def children(self) -> "Sequence[TreeStructure]": ...

    def node_data(self) -> tuple[type, object] | None: ...

    def unflatten(self, leaves: Iterable[PyTree], /) -> PyTree: ...
