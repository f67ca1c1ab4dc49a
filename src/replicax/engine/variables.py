"""Scopes that record or provide the Keras variables of a traced step.

Inside a `keras.StatelessScope`, Keras reads and writes variables through the scope.

If variables are not on the replicas, or are sharded, the update of `optimizer.apply` is
deferred: the replica function returns the summed gradients, and the update follows it.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol, Self

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import set_current_trace
from jax.typing import ArrayLike

from replicax._private.keras import (
    inner_of,
    scope_around,
    stored_dtype,
    stored_value,
    trained_by,
)
from replicax._private.tape import program_trace
from replicax._util.arrays import dtype_on_devices
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.jaxprs import AnyJaxpr, inner_jaxprs, open_jaxpr
from replicax.errors import ContextError

__all__ = [
    "ChildScope",
    "OpenTape",
    "PendingValue",
    "RecordingScope",
    "UndeclaredVariableError",
    "Update",
    "UpdatePendingError",
    "ValueScope",
    "Variable",
    "WritesScope",
    "checked_variables",
    "distinct",
    "fold_replica_into_seed",
    "is_seed_state",
    "restore_seed",
    "used_variables",
]


Variable = keras.Variable


def checked_variables(argument: object, caller: str) -> list[Variable]:
    """Return the argument, a Keras variable or an iterable of them, as a list.

    Raises:
        TypeError: For anything else; the message names `caller`.
    """
    if isinstance(argument, keras.Variable):
        return [argument]
    variables: list[Variable] = []
    for v in argument if isinstance(argument, Iterable) else [argument]:
        if not isinstance(v, keras.Variable):
            raise TypeError(
                f"{caller}: variables must be Keras variables, such as "
                f"model.trainable_variables; got {v!r} among them."
            )
        variables.append(v)
    return variables


_TRACED_APART = (
    "a function that JAX traces by itself, such as a branch of jax.lax.cond, a body of "
    "jax.lax.scan, or the function of jax.jit, jax.grad or jax.vmap"
)
_RETURN_IT = (
    "Return the new value from that function, and assign it outside: "
    "variable.assign(jax.lax.cond(condition, lambda: new, lambda: old))."
)


_VALUE_OF = "replicax_value_of"
"""In a trace, `checkpoint_name` gives a variable's value the name `<this>:<its id>`."""


class UndeclaredVariableError(ContextError):
    """A program uses a variable that is not one of its inputs."""


class UpdatePendingError(ContextError):
    """A step uses the new value of a variable whose update follows the step."""


class OpenTape(Protocol):
    """A tape that records now."""

    def value_of(self, variable: Variable, value: jax.Array) -> jax.Array:
        """The array to use for a variable that is read while the tape records."""
        ...


class WritesScope(keras.StatelessScope):
    """A scope that records which variables are written.

    Attributes:
        written: The written variables by id, in order.
        tapes: The tapes that record now, the outermost first.
        deferred: The updates that follow the step, with their gradients.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True)  # Else `add_loss` is lost.
        self.written: dict[int, Variable] = {}
        self.tapes: list[OpenTape] = []
        self.deferred: dict[Update, list[jax.Array]] = {}
        self._pending: dict[int, Update] = {}
        self._trace: object = None

    def __enter__(self) -> Self:
        self._trace = program_trace()
        super().__enter__()
        return self

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        self._require_not_pending(variable)
        value = self._untaped_value(variable)
        for tape in self.tapes:
            value = stored_value(variable) if value is None else value
            value = tape.value_of(variable, value)
        return value

    def _untaped_value(self, variable: Variable) -> jax.Array | None:
        """The variable's value in this scope; None if the scope has none."""
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        variable, _ = update
        self._require_not_pending(variable)
        if program_trace() is not self._trace:
            # The tracer would leak.
            raise ContextError(
                f"variable {variable.path!r} is assigned inside {_TRACED_APART}. "
                f"{_RETURN_IT}"
            )
        self.written[id(variable)] = variable
        super().add_update(update)

    def defer(
        self, update: "Update", gradients: list[jax.Array], *, follows_writes: bool
    ) -> None:
        """Defer an update; no two updates of a step may train the same variable.

        `follows_writes`: whether the update uses values that the step assigned.
        """
        trained = {id(v) for other in self.deferred for v in other.variables}
        for variable in update.variables:
            if id(variable) in self.written and not follows_writes:
                raise UpdatePendingError(
                    f"{update.owner}: variable {variable.path!r} is assigned in a "
                    "step with an optimizer.apply that trains it. The update is made "
                    "where the variable lives, from its value before the step. Assign "
                    "the variable in a separate step, before this one."
                )
            if id(variable) in trained:
                raise UpdatePendingError(
                    f"{update.owner}: optimizer.apply is called a second time for "
                    f"variable {variable.path!r} in the same step. Add up its "
                    "gradients and apply them once, or make two steps."
                )
        self.deferred[update] = gradients
        self._pending |= {id(v): update for v in update.changed}

    def _in_own_trace(self) -> AbstractContextManager[None]:
        """A context for creating values that the whole step may use.

        The step may first read the variable in a function that JAX traces separately.
        """
        return set_current_trace(self._trace)

    def _require_not_pending(self, variable: Variable) -> None:
        update = self._pending.get(id(variable))
        if update is not None:
            raise UpdatePendingError(_message(variable.path, update))

    def is_value_of(self, variable: Variable, value: jax.Array) -> bool:
        """Whether `value` is the variable's value in this scope."""
        return self.get_current_value(variable) is value

    def updates(self) -> list[tuple[Variable, jax.Array]]:
        """The written variables with their latest values."""
        return [(v, self.state_mapping[id(v)]) for v in self.written.values()]


class RecordingScope(WritesScope):
    """Records which variables a function reads, while it is traced abstractly.

    Reads are added to those of `recorder`. Variables created in the scope are
    initialised when the outermost scope closes.
    """

    def __init__(self, recorder: "RecordingScope | None" = None) -> None:
        super().__init__()
        self.read: dict[int, Variable] = {} if recorder is None else recorder.read
        self._unassigned: dict[int, jax.Array] = {}

    def _untaped_value(self, variable: Variable) -> jax.Array | None:
        self.read.setdefault(id(variable), variable)
        value = super()._untaped_value(variable)
        if value is None:
            # Zeros in place of the variable's array: a variable that this trace creates
            # has none, and some operations refuse an array that is on the mesh.
            value = self._unassigned.get(id(variable))
        if value is None:
            with self._in_own_trace():
                zeros = jnp.zeros(
                    variable.shape, dtype_on_devices(stored_dtype(variable))
                )
                value = checkpoint_name(zeros, f"{_VALUE_OF}:{id(variable)}")
            self._unassigned[id(variable)] = value
        return value

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        self.read.setdefault(id(update[0]), update[0])
        super().add_update(update)


def used_variables(jaxpr: AnyJaxpr) -> set[int]:
    """Ids of the variables that a jaxpr, traced in a `RecordingScope`, uses."""
    jaxpr = open_jaxpr(jaxpr)
    atoms = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    atoms |= set(map(id, jaxpr.outvars))
    used: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name" and id(equation.outvars[0]) in atoms:
            prefix, _, variable_id = equation.params["name"].rpartition(":")
            if prefix == _VALUE_OF:
                used.add(int(variable_id))
        for inner in inner_jaxprs(equation):
            used |= used_variables(inner)
    return used


class ValueScope(WritesScope):
    """Provides the `values` of a fixed set of `variables`; others raise an error.

    Errors name `caller`. Variables with an id in `unused` may be read, too; their value
    is zeros, which the function does not use.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        values: Sequence[jax.Array],
        caller: str,
        unused: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.state_mapping = {id(v): x for v, x in zip(variables, values, strict=True)}
        self._declared = set(self.state_mapping)
        self._unused = unused
        self._zeros: dict[int, jax.Array] = {}
        self._caller = caller

    def _untaped_value(self, variable: Variable) -> jax.Array | None:
        if id(variable) in self._unused:
            if id(variable) not in self._zeros:  # Each read returns the same array.
                with self._in_own_trace():
                    zeros = jnp.zeros(variable.shape, stored_dtype(variable))
                self._zeros[id(variable)] = zeros
            return self._zeros[id(variable)]
        self._require_declared(variable)
        return super()._untaped_value(variable)

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        self._require_declared(update[0])
        super().add_update(update)

    def is_value_of(self, variable: Variable, value: jax.Array) -> bool:
        """Whether `value` is the variable's value; True if the value is unused."""
        return id(variable) in self._unused or super().is_value_of(variable, value)

    def _require_declared(self, variable: Variable) -> None:
        if id(variable) not in self._declared:
            raise UndeclaredVariableError(
                f"{self._caller}: variable {variable.path!r} {variable.shape} was not "
                "used when the function was first traced, but is used now. Functions "
                "are traced more than once: create layers, metrics and optimizers "
                "outside the function, once, and do not let Python state decide which "
                "variables are used."
            )


class ChildScope(WritesScope):
    """A scope with `values` by id and its own writes, inside an outer scope."""

    def __init__(
        self,
        outer: keras.StatelessScope | None,
        values: Mapping[int, jax.Array] | None = None,
    ) -> None:
        super().__init__()
        self._outer = outer
        self.state_mapping = dict(values or {})

    def _untaped_value(self, variable: Variable) -> jax.Array | None:
        value, scope = super()._untaped_value(variable), self._outer
        while value is None and scope is not None:
            value = scope.get_current_value(variable)
            # Keras computes losses in a scope with only the model's own variables.
            is_of_keras = type(scope) is keras.StatelessScope
            scope = scope_around(scope) if is_of_keras else None
        return value


def distinct(variables: Iterable[Variable]) -> list[Variable]:
    """Drop repeated variables, in order."""
    return list({id(v): v for v in variables}.values())


def is_seed_state(variable: Variable) -> bool:
    """Whether `variable` is the `uint32[2]` seed and counter of a `SeedGenerator`."""
    return variable.name == "seed_generator_state" and variable.shape == (2,)


def fold_replica_into_seed(state: jax.Array, replica_id: jax.Array) -> jax.Array:
    """This replica's seed state; replica 0 has `state`.

    The multiplier, 2**32 divided by the golden ratio, spreads replicas over the seeds.
    """
    # Not state.at[0].add: XLA for GPUs does not compile this update in place.
    return state + replica_id.astype(state.dtype) * jnp.array(
        [2654435769, 0], state.dtype
    )


def restore_seed(state: jax.Array, original: jax.Array) -> jax.Array:
    """The seed state after a step: the `original` seed, and the new counter."""
    return declare_mirrored(jnp.where(jnp.array([True, False]), original, state))


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One `optimizer.apply` of a step.

    Attributes:
        optimizer: The Keras optimizer, built.
        variables: The variables that have gradients, in the order of the gradients.
        owner: Name of the strategy that makes the update, for messages.
    """

    optimizer: keras.Optimizer
    variables: tuple[Variable, ...]
    owner: str

    @functools.cached_property
    def changed(self) -> list[Variable]:
        """All variables that the update writes: weights and optimizer state."""
        changed = [*self.variables, *self.optimizer.variables]
        # With `use_ema`, Keras also averages trained variables without a gradient.
        if inner_of(self.optimizer).use_ema:
            changed += trained_by(self.optimizer)
        return distinct(changed)

    def make(
        self, values: Sequence[jax.Array], gradients: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The new values of `changed`, from the old `values`; traced by the caller."""
        with ValueScope(self.changed, values, "optimizer.apply") as scope:
            self.optimizer.apply(list(gradients), list(self.variables))
            new = [scope.get_current_value(v) for v in self.changed]
        return [jnp.asarray(x, old.dtype) for x, old in zip(new, values, strict=True)]


class PendingValue:
    """Stands for the new value of a variable whose update is deferred.

    Keras' stateless steps may return it; computing with it raises an error.
    """

    def __init__(self, variable: Variable, update: Update) -> None:
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._message = _message(variable.path, update)

    def __getattr__(self, name: str) -> NoReturn:
        # JAX looks up `__jax_array__` before it computes with an unknown type.
        if name.startswith("_") and name != "__jax_array__":
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise UpdatePendingError(self._message)

    # Python looks for these on the class.
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __getitem__ = __iter__ = __len__ = __float__ = __array__ = _refuse


def _message(path: str, update: Update) -> str:
    return (
        f"{update.owner}: variable {path!r} is used after optimizer.apply in the same "
        "step. The update is made where the variable lives, after the step, so the "
        "step does not have its new value. Use the variable before optimizer.apply, or "
        "in the next step."
    )
