"""Numbers of an optimizer that both the servers and the user set: steps and rate."""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import keras
import numpy as np

from replicax._private import keras as internals
from replicax.engine import device_put

__all__ = ["OptimizerNumber", "Stored"]

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

    def noted(self, array: jax.Array) -> jax.Array:
        """Note the variable's next value, which is the servers', and return it."""
        self._array, self._number = array, _number(array)
        return array

    def cast(self, number: float) -> np.ndarray:
        """A number as an array of the variable's dtype."""
        return np.asarray(number, self.variable.dtype)

    def assigned(self, stored: Stored | None = None) -> float | None:
        """The number if it has changed since the last call or `noted`, else None."""
        (array,) = internals.read_values([self.variable])
        array = (stored or {}).get(id(self.variable), array)
        if array is None or array is self._array:
            return None
        before = self._number
        self.noted(array)
        return None if before in (None, self._number) else self._number


def _number(array: jax.Array) -> float:
    return float(np.asarray(device_put.local_value(array)))
