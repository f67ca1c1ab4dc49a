"""Keras variables seen from inside a traced step: what is read, what is written.

Keras lets code run "stateless": inside a `keras.StatelessScope` reads and writes of
variables go through the scope. The scopes here build programs on that.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from replicax.engine.divergence import declare_mirrored
from replicax.engine.updates import DeferredUpdates
from replicax.errors import ContextError

__all__ = [
    "ChildScope",
    "RecordingScope",
    "ValueScope",
    "Variable",
    "fold_replica_into_seed",
    "is_seed_state",
    "restore_seed",
]

Variable = keras.Variable


class _WritesScope(keras.StatelessScope):
    """A scope that remembers, in order, which variables were written."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)  # Else `add_loss` is lost.
        self.written: dict[int, Variable] = {}
        self.deferred = DeferredUpdates()

    def get_current_value(self, variable: Variable) -> Any:
        """Keras calls this for `variable.value`."""
        self.deferred.require_settled(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Variable, Any]) -> None:
        """Keras calls this for `variable.assign`."""
        variable, _ = update
        self.deferred.require_settled(variable)
        self.written[id(variable)] = variable
        super().add_update(update)

    def updates(self) -> list[tuple[Variable, Any]]:
        """The written variables with their latest values."""
        return [(v, self.state_mapping[id(v)]) for v in self.written.values()]


class RecordingScope(_WritesScope):
    """Notes which variables a function reads, while it is traced abstractly.

    Variables created while it is open are initialised when the outermost scope closes.

    Args:
        recorder: Scope to report reads and writes to as well.
    """

    def __init__(self, recorder: "RecordingScope | None" = None) -> None:
        super().__init__()
        self.read: dict[int, Variable] = {} if recorder is None else recorder.read

    def get_current_value(self, variable: Variable) -> Any:
        """Keras calls this for `variable.value`."""
        self.read.setdefault(id(variable), variable)
        value = super().get_current_value(variable)
        if value is None:
            # Not the stored array: in a replica program some operations refuse one that
            # lies on the mesh. Only shape and dtype matter here, and one that is made
            # in this trace has no array yet.
            value = jnp.zeros(variable.shape, variable.dtype)
        return value

    def add_update(self, update: tuple[Variable, Any]) -> None:
        """Keras calls this for `variable.assign`."""
        self.read.setdefault(id(update[0]), update[0])
        super().add_update(update)


class ValueScope(_WritesScope):
    """Gives a fixed set of variables the values of a program.

    Args:
        variables: All variables the function may touch.
        values: Their values, same order and shapes.
        caller: The public call to name in errors.
        unused: Ids of variables that are read, but whose values make no difference.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        values: Sequence[Any],
        caller: str,
        unused: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.state_mapping = {id(v): x for v, x in zip(variables, values, strict=True)}
        self._known = {id(v) for v in variables}
        self._unused = unused
        self._caller = caller

    def get_current_value(self, variable: Variable) -> Any:
        """Keras calls this for `variable.value`."""
        if id(variable) in self._unused:
            return jnp.zeros(variable.shape, variable.dtype)
        self._require_known(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Variable, Any]) -> None:
        """Keras calls this for `variable.assign`."""
        self._require_known(update[0])
        super().add_update(update)

    def is_value_of(self, variable: Variable, value: Any) -> bool:
        """Whether `value` is what the variable has here; True where nobody knows."""
        return id(variable) in self._unused or self.get_current_value(variable) is value

    def _require_known(self, variable: Variable) -> None:
        if id(variable) not in self._known:
            raise ContextError(
                f"{self._caller}: variable {variable.path!r} {variable.shape} was not "
                "there when the function was traced first and is now. Functions are "
                "traced more than once: create layers, metrics and optimizers outside "
                "the function, once, and do not let Python state decide which are used."
            )


class ChildScope(_WritesScope):
    """A scope inside another: sees the outer values but keeps its own writes.

    Args:
        outer: The enclosing scope, or None outside any.
        values: Variables that have another value in here.
    """

    def __init__(self, outer: Any, values: Mapping[int, Any] | None = None) -> None:
        super().__init__()
        self._outer = outer
        self.state_mapping = dict(values or {})

    def get_current_value(self, variable: Variable) -> Any:
        """Keras calls this for `variable.value`."""
        value = super().get_current_value(variable)
        if value is None and self._outer is not None:
            return self._outer.get_current_value(variable)
        return value


def is_seed_state(variable: Variable) -> bool:
    """Whether `variable` is the `uint32[2]` seed and counter of a `SeedGenerator`."""
    return variable.name == "seed_generator_state" and variable.shape == (2,)


def fold_replica_into_seed(state: jax.Array, replica_id: jax.Array) -> jax.Array:
    """A seed state of this replica's own; replica 0 keeps the one given.

    The odd multiplier (2**32 divided by the golden ratio) spreads neighbouring replicas
    over the seeds; Keras hashes the seed into its random key afterwards.
    """
    spread = replica_id.astype(state.dtype) * jnp.asarray(2654435769, state.dtype)
    return state.at[0].add(spread)


def restore_seed(state: jax.Array, original: jax.Array) -> jax.Array:
    """The seed state after a step: its counter moved on, its seed not folded."""
    return declare_mirrored(state.at[0].set(original[0]))
