"""The variables of Flax NNX objects, which a restore changes in place.

Flax is not imported here: a user who has NNX objects has already imported it.
"""

import functools
import sys
from collections.abc import Callable, Iterator

from replicax._util.types import PyTree

__all__ = ["is_nnx_object", "variables_of"]


def is_nnx_object(value: object) -> bool:
    """Whether this is a module, an optimizer, a metric or a variable of NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree | nnx.Variable)


def variables_of(
    owner: PyTree,
) -> Iterator[tuple[str, PyTree, Callable[[PyTree], None]]]:
    """Yield the path, the content and the setter of each variable and array attribute.

    A shared variable is yielded once.
    """
    nnx = sys.modules["flax.nnx"]
    _, state = nnx.graph.flatten(owner, graph=True)
    for keys, leaf in state:
        path = "/".join(map(str, keys))
        if isinstance(leaf, nnx.Variable):
            yield path, leaf.get_raw_value(), leaf.set_raw_value
        else:
            yield path, leaf, functools.partial(_set_attribute, owner, keys)


def _set_attribute(owner: PyTree, keys: tuple[PyTree, ...], array: PyTree) -> None:
    nnx = sys.modules["flax.nnx"]
    nnx.update(owner, nnx.from_flat_state([(keys, array)]))
