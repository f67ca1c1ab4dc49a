"""Finds what the user has assigned to variables whose values servers have as well."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import keras
import numpy as np

from replicax._private import keras as internals
from replicax.engine import device_put

__all__ = ["OptimizerNumber", "Stored", "are_equal", "are_same"]

Stored: TypeAlias = Mapping[int, jax.Array]
"""Values by id of their variables, which do not have them now."""


class OptimizerNumber:
    """A variable of an optimizer whose value the servers have as well.

    A value that was not noted here was assigned by the user.
    """

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable
        self._array: jax.Array | None = None
        self._number: float | None = None
        self.assigned()

    def note(self, array: jax.Array, number: float) -> None:
        """Note the variable's next value, which is the servers', and its number."""
        self._array, self._number = array, number

    def cast(self, number: float) -> np.ndarray:
        """A number as an array of the variable's dtype."""
        return np.asarray(number, self.variable.dtype)

    def assigned(self, stored: Stored | None = None) -> float | None:
        """The number if it has changed since the last call or `note`, else None."""
        (array,) = internals.read_values([self.variable])
        array = (stored or {}).get(id(self.variable), array)
        if array is None or array is self._array:
            return None
        before, number = self._number, float(_host(array))
        self.note(array, number)
        return None if before in (None, number) else number


def are_same(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
    """Whether these are the very arrays, one by one, or share their memory."""
    return all(map(_is_same, values, others))


def are_equal(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
    """Whether arrays have equal values, one by one."""
    return all(
        np.array_equal(_host(a), _host(b)) for a, b in zip(values, others, strict=True)
    )


def _host(value: jax.Array) -> np.ndarray:
    return np.asarray(device_put.local_value(value))


def _is_same(a: jax.Array, b: jax.Array) -> bool:
    if a is b:
        return True
    if not isinstance(a, jax.Array) or a.is_deleted() or b.is_deleted():
        return False
    return (
        a.addressable_data(0).unsafe_buffer_pointer()
        == b.addressable_data(0).unsafe_buffer_pointer()
    )
