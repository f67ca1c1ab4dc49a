"""Python numbers in Equinox modules, which are constants of a program.

Optimizers would train a module's number, such as `p` of `eqx.nn.Dropout`, if it became
an array; `eqx.filter_jit` compiles it as a constant. In other pytrees, numbers such as
`step` of Flax' `TrainState` may change between steps, so they become arrays.
"""

import sys
from collections.abc import Sequence

from replicax._util.types import TreeStructure

__all__ = ["numbers_in_modules"]

_NUMBERS = (int, float, complex)  # A bool is an int.


def numbers_in_modules(
    leaves: Sequence[object], structure: TreeStructure
) -> frozenset[int]:
    """The positions of Python numbers in Equinox modules, among a tree's leaves."""
    if "equinox" not in sys.modules:
        return frozenset()
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _NUMBERS)]
    if not numbers:
        return frozenset()
    are_in_modules = _are_in_modules(structure)
    return frozenset(i for i in numbers if are_in_modules[i])


def _are_in_modules(structure: TreeStructure) -> list[bool]:
    """For each leaf, whether it is in an Equinox module."""
    node = structure.node_data()
    if node is None:
        return [False] * structure.num_leaves
    if issubclass(node[0], sys.modules["equinox"].Module):
        return [True] * structure.num_leaves
    return [x for child in structure.children() for x in _are_in_modules(child)]
