"""Updates that are not made where the gradients are.

Where the variables live elsewhere, `optimizer.apply` inside a replica function makes no
update: the summed gradients become results of the program, and the strategy makes the
updates, in order, when the program is over.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from replicax._private.keras import trained_by
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

    @functools.cached_property
    def changed(self) -> list[Any]:
        """All variables that the update writes: the trained ones and the slots."""
        found = [*self.variables, *self.optimizer.variables]
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if inner.use_ema:  # Of all that it trains, also where no gradient is.
            found += trained_by(self.optimizer)
        return list({id(v): v for v in found}.values())


class DeferredUpdates:
    """The updates that a run of a step function has asked for, with their gradients."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.gradients: list[list[Any]] = []
        self._pending: dict[int, Update] = {}
        self._trained: set[int] = set()

    def add(self, update: Update, gradients: Iterable[Any]) -> None:
        """Ask for an update, of variables that no other one of the step trains."""
        for variable in update.variables:
            if id(variable) in self._trained:
                raise ContextError(
                    f"{update.owner}: optimizer.apply is called a second time for "
                    f"variable {variable.path!r} in the same step. Add up its "
                    "gradients and apply them once, or make two steps."
                )
        self._trained.update(map(id, update.variables))
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

    def __getattr__(self, name: str) -> Any:
        # JAX asks for `__jax_array__` before it computes with something unknown.
        if name.startswith("_") and name != "__jax_array__":
            raise AttributeError(name)
        raise ContextError(self._message)

    def _refuse(self, *_: Any) -> Any:
        raise ContextError(self._message)

    # Python looks for these on the class.
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __getitem__ = __iter__ = __len__ = __float__ = __array__ = _refuse


def _message(path: str, update: Update) -> str:
    return (
        f"{update.owner}: variable {path!r} is used after optimizer.apply in the same "
        "step. Its update is made where the variable lives, when the step is over, so "
        "the step has no new value of it. Use it before optimizer.apply, or in the "
        "next step."
    )
