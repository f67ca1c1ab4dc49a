"""A worker's client of a group's optimizer, which the servers step.

A worker has no optimizer state but two numbers, which are variables of its own: the
number of steps and, unless a schedule sets it, the learning rate.

- A group counts its steps in this job. The optimizer has made `steps_ahead` more.
- All workers use the chief's `steps_ahead`. They read it from the board when they
  connect to the group, and when an epoch begins.
- If such a variable has a value that this worker did not write, the user has assigned
  it. Only the chief sends it to the servers.
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
"""Values by ids of variables, whose values were moved out."""


class RemoteOptimizer:
    """The optimizer that trains a group on the servers."""

    def __init__(self, group: "RemoteGroup", sharding: NamedSharding) -> None:
        self.group = group
        self._sharding = sharding
        self._steps: _SharedNumber | None = None
        self._rate: _SharedNumber | None = None

    # Its numbers, which are variables of this worker.

    def watch(self, count: keras.Variable | None, rate: keras.Variable | None) -> None:
        """Follow assignments to its number of steps and, if a variable, its rate."""
        if self._steps is None and count is not None:
            self._steps = _SharedNumber(count)
            self._rate = None if rate is None else _SharedNumber(rate)

    @property
    def count(self) -> keras.Variable | None:
        """The variable with its number of steps; None: this task has none yet."""
        return None if self._steps is None else self._steps.variable

    def hand_out_steps(self, stored: dict[int, jax.Array]) -> None:
        """Add the number of steps to `stored`, by the id of its variable."""
        if self._steps is not None:
            stored[id(self._steps.variable)] = self._next_steps(self._steps)

    def write_steps(self) -> None:
        """Write the number of steps into its variable."""
        if self._steps is not None and internals.has_value(self._steps.variable):
            value = self._next_steps(self._steps)
            internals.write_values([self._steps.variable], [value])

    def _next_steps(self, steps: "_SharedNumber") -> jax.Array:
        made = self.group.steps + self.group.steps_ahead
        array = device_put.laid_out(steps.cast(made), self._sharding)
        steps.note(array, made)
        return array

    def follow(self, stored: Stored | None = None) -> float | None:
        """On the chief: send a rate and a number of steps that the user has assigned.

        Returns:
            On the chief the rate, if the user has assigned another one; else None.
        """
        steps = self._steps and self._steps.assigned(stored)
        rate = self._rate and self._rate.assigned(stored)
        if not self.group.session.is_chief:
            return None
        if self._rate is not None and rate is not None:
            self.assign_slots({("learning_rate", None): self._rate.cast(rate)})
        if self._steps is not None and steps is not None:
            self.assign_slots({("iteration", None): self._steps.cast(steps)})
            self._count_from(steps)
        return rate

    def _count_from(self, steps: float) -> None:
        """Set `steps_ahead` so that the optimizer has made a number of steps."""
        self.group.steps_ahead = int(steps) - self.group.steps

    # Its state, by slots.

    def slots(self, name: str | None = None) -> dict[VariableSlot, np.ndarray]:
        """Read its slots of a name, or all; the shards of each are joined."""
        answers = self.group.servers.ask_all(GetSlots(self.group.name, name))
        on_servers = {
            server: slots_from_message(answer.slots, vectors)
            for server, (answer, vectors) in answers.items()
        }
        return join_slots(self.group.placement, on_servers)

    def assign_slots(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Set some of its slots."""
        placement = self.group.placement
        messages, vectors = {}, {}
        for server in self.group.servers.numbers:
            cut = cut_slots(placement, values, server)
            header, vectors[server] = slots_to_message(cut)
            messages[server] = SetSlots(placement.name, header)
        self.group.servers.ask_all(messages, vectors)

    def restore(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Set all of its slots to those of a checkpoint."""
        try:
            self.assign_slots(values)
        except ServerRefused as refused:
            raise CheckpointError(
                f"Checkpoint.restore: what was saved of the optimizer does not fit the "
                f"one of {self.group.name!r}: {refused} Compile the model with the "
                "optimizer that was saved."
            ) from refused
        steps = values.get(("iteration", None))
        if steps is not None:
            self._count_from(float(steps))

    def averages(self) -> list[jax.Array]:
        """Its moving averages of the variables' values; none if it keeps none."""
        averages = self.slots("average")
        return [
            device_put.laid_out(averages["average", i], self._sharding)
            for i in range(len(self.group.variables))
            if averages
        ]


class _SharedNumber:
    """A variable of this worker whose value the servers have as well.

    It remembers the last value, so that one that the user assigns is found.
    """

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable
        self._array: jax.Array | None = None
        self._number: float | None = None
        self.assigned(None)

    def note(self, array: jax.Array, number: float) -> None:
        """Remember the servers' value, which the variable gets next, and its number."""
        self._array, self._number = array, number

    def cast(self, number: float) -> np.ndarray:
        """A number as an array of the variable's dtype."""
        return np.asarray(number, self.variable.dtype)

    def assigned(self, stored: Stored | None) -> float | None:
        """The number, if the user has assigned another one; else None."""
        (array,) = internals.read_values([self.variable])
        array = (stored or {}).get(id(self.variable), array)
        if array is None or array is self._array:
            return None
        before, number = self._number, float(_host(array))
        self.note(array, number)
        return None if before in (None, number) else number


def _host(value: jax.Array) -> np.ndarray:
    return np.asarray(device_put.local_value(value))
