"""A worker's client of a group's optimizer, which runs on the servers.

A worker has only two numbers of the optimizer's state, in local variables: the step
count and, unless a schedule sets it, the learning rate.

- The step count is the group's updates in this job plus `steps_ahead`, the steps before
  this job.
- All workers use the chief's `steps_ahead`. They read it from the board when they
  connect to the group, and when an epoch begins.
- If a variable has a number that this worker did not write, the user assigned it. Only
  the chief sends assigned numbers to the servers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax.engine import device_put
from replicax.errors import CheckpointError
from replicax.ps.connection import ServerRefused
from replicax.ps.group_vectors import (
    VariableSlot,
    cut_slots,
    join_slots,
    slots_from_message,
    slots_to_message,
)
from replicax.ps.messages import GetSlots, SetSlots

if TYPE_CHECKING:
    from replicax.ps.remote import RemoteGroup

__all__ = ["RemoteOptimizer", "Stored"]

Stored: TypeAlias = Mapping[int, jax.Array]
"""The present values of variables by their ids, while a program runs."""


class RemoteOptimizer:
    """The optimizer that trains a group on the servers."""

    def __init__(self, group: "RemoteGroup", sharding: NamedSharding) -> None:
        self.group = group
        self._sharding = sharding
        self._steps: _SharedNumber | None = None
        self._rate: _SharedNumber | None = None

    # The step count and the learning rate.

    def watch(self, count: keras.Variable | None, rate: keras.Variable | None) -> None:
        """Watch the variables of the step count and the rate for assignments."""
        if self._steps is None and count is not None:
            self._steps = _SharedNumber(count)
            self._rate = None if rate is None else _SharedNumber(rate)

    @property
    def count(self) -> keras.Variable | None:
        """The variable of the step count; None before `watch`."""
        return None if self._steps is None else self._steps.variable

    def store_steps(self, stored: dict[int, jax.Array]) -> None:
        """Add the step count to `stored`, by the id of its variable."""
        if self._steps is not None:
            stored[id(self._steps.variable)] = self._current_steps(self._steps)

    def write_steps(self) -> None:
        """Write the step count into its variable."""
        if self._steps is not None and internals.has_value(self._steps.variable):
            value = self._current_steps(self._steps)
            internals.write_values([self._steps.variable], [value])

    def _current_steps(self, steps: "_SharedNumber") -> jax.Array:
        number = self.group.steps + self.group.steps_ahead
        array = device_put.laid_out(steps.cast(number), self._sharding)
        steps.remember(array, number)
        return array

    def send_assigned(self, stored: Stored | None = None) -> float | None:
        """On the chief, send a rate or a step count that the user has assigned.

        Returns:
            On the chief the assigned rate, if any; else None.
        """
        steps = self._steps and self._steps.pop_assigned(stored)
        rate = self._rate and self._rate.pop_assigned(stored)
        if not self.group.session.is_chief:
            return None
        if self._rate is not None and rate is not None:
            self.assign_slots({("learning_rate", None): self._rate.cast(rate)})
        if self._steps is not None and steps is not None:
            self.assign_slots({("iteration", None): self._steps.cast(steps)})
            self._set_steps_ahead(steps)
        return rate

    def _set_steps_ahead(self, steps: float) -> None:
        """Set `steps_ahead` so that the step count is `steps`."""
        self.group.steps_ahead = int(steps) - self.group.steps

    # The optimizer's state on the servers.

    def slots(self, name: str | None = None) -> dict[VariableSlot, np.ndarray]:
        """Read all slots, or the slots called `name`; join the shards of each slot."""
        message = GetSlots(self.group.name, name)
        messages = dict.fromkeys(self.group.servers, message)
        answers = self.group.session.exchange_all(messages)
        on_servers = {
            server: slots_from_message(answer.slots, vectors)
            for server, (answer, vectors) in answers.items()
        }
        return join_slots(self.group.placement, on_servers)

    def assign_slots(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Set the slots in `values` on the servers."""
        placement = self.group.placement
        messages, vectors = {}, {}
        for server in self.group.servers:
            cut = cut_slots(placement, values, server)
            header, vectors[server] = slots_to_message(cut)
            messages[server] = SetSlots(placement.name, header)
        self.group.session.exchange_all(messages, vectors)

    def restore(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Set all slots to the values from a checkpoint."""
        try:
            self.assign_slots(values)
        except ServerRefused as refused:
            raise CheckpointError(
                f"Checkpoint.restore: the saved optimizer state does not fit the "
                f"optimizer of {self.group.name!r}: {refused} Compile the model with "
                "the optimizer that was saved."
            ) from refused
        steps = values.get(("iteration", None))
        if steps is not None:
            self._set_steps_ahead(float(steps))

    def averages(self) -> list[jax.Array]:
        """The optimizer's moving averages of the variables; empty without averages."""
        averages = self.slots("average")
        return [
            device_put.laid_out(averages["average", i], self._sharding)
            for i in range(len(self.group.variables))
            if averages
        ]


class _SharedNumber:
    """A local variable, and the servers' copy of its number.

    Keeps the last number from the servers, to detect a number that the user assigns.
    """

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable
        self._array: jax.Array | None = None
        self._number: float | None = None
        self.pop_assigned(None)

    def remember(self, array: jax.Array, number: float) -> None:
        """Remember the servers' number, and the array that the variable gets."""
        self._array, self._number = array, number

    def cast(self, number: float) -> np.ndarray:
        """A number as an array of the variable's dtype."""
        return np.asarray(number, self.variable.dtype)

    def pop_assigned(self, stored: Stored | None) -> float | None:
        """Return the number that the user has assigned since the last call, if any."""
        (array,) = internals.read_values([self.variable])
        array = (stored or {}).get(id(self.variable), array)
        if array is None or array is self._array:
            return None
        number = float(np.asarray(device_put.local_value(array)))
        previous = self._number
        self.remember(array, number)
        return None if previous in (None, number) else number
