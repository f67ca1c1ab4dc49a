"""Updates that are not made where the gradients are.

Where the variables live elsewhere, `optimizer.apply` inside a replica function makes no
update: the summed gradients become results of the program, and the strategy makes the
updates, in order, when the program is over.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from replicax.errors import ContextError

__all__ = ["DeferredUpdates", "PendingValue", "Update"]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One `optimizer.apply` of a step.

    Attributes:
        optimizer: The Keras optimizer, built.
        variables: The variables that it has gradients for, in the gradients' order.
        owner: Name of the strategy that makes the update, for messages.
    """

    optimizer: Any
    variables: tuple[Any, ...]
    owner: str

    @property
    def changed(self) -> list[Any]:
        """All variables that the update writes: the trained ones and the slots."""
        return [*self.variables, *self.optimizer.variables]


class DeferredUpdates:
    """The updates that a run of a step function has asked for, with their gradients."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.gradients: list[list[Any]] = []
        self._pending: dict[int, Update] = {}

    def add(self, update: Update, gradients: Iterable[Any]) -> None:
        """Ask for an update, of variables that no other one of the step has changed."""
        for variable in update.variables:
            self.require_settled(variable)
        self.updates.append(update)
        self.gradients.append(list(gradients))
        self._pending |= {id(v): update for v in update.changed}

    def require_settled(self, variable: Any) -> None:
        """Raise if the variable has a new value by now that is not known here."""
        update = self._pending.get(id(variable))
        if update is not None:
            raise ContextError(_message(variable.path, update))


class PendingValue:
    """Stands for the new value of a variable, which this program does not have.

    Keras' stateless steps pass it on; whoever computes with it gets an error.
    """

    def __init__(self, variable: Any, update: Update) -> None:
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._message = _message(variable.path, update)

    def __jax_array__(self) -> Any:
        """JAX calls this to compute with the value."""
        raise ContextError(self._message)


def _message(path: str, update: Update) -> str:
    return (
        f"{update.owner}: variable {path!r} is used after optimizer.apply in the same "
        "step. Its update is made where the variable lives, when the step is over, so "
        "the step has no new value of it. Use it before optimizer.apply, or in the "
        "next step."
    )
