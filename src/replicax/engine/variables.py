"""Scopes that record or provide the Keras variables of a traced step.

Keras lets code run "stateless": inside a `keras.StatelessScope` reads and writes of
variables go through the scope. The scopes here build programs on that.

Where the variables live elsewhere, or in blocks, `optimizer.apply` is deferred: the
summed gradients become results of the replicas' part, and the updates follow it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import NoReturn, Self

import jax
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import find_top_trace
from jax.typing import ArrayLike

from replicax._private.keras import (
    inner_of,
    scope_around,
    stored_dtype,
    trained_by,
)
from replicax._util.arrays import dtype_on_devices
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.jaxprs import AnyJaxpr, inner_jaxprs, open_jaxpr
from replicax.errors import ContextError

__all__ = [
    "ChildScope",
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
    "explained_traces",
    "fold_replica_into_seed",
    "is_seed_state",
    "restore_seed",
    "used_variables",
]


Variable = keras.Variable


def checked_variables(given: object, caller: str) -> list[Variable]:
    """The Keras variables in an iterable, or a single one, that `caller` was given.

    Raises:
        TypeError: For anything else among them.
    """
    if isinstance(given, keras.Variable):
        return [given]
    found: list[Variable] = []
    for v in given if isinstance(given, Iterable) else [given]:
        if not isinstance(v, keras.Variable):
            raise TypeError(
                f"{caller}: variables must be Keras variables, such as "
                f"model.trainable_variables; got {v!r} among them."
            )
        found.append(v)
    return found


_TRACED_APART = (
    "a function that JAX traces by itself, such as a branch of jax.lax.cond, a body of "
    "jax.lax.scan, or one under jax.jit, jax.grad or jax.vmap"
)
_RETURN_IT = (
    "Return the new value from that function, and assign it outside: "
    "variable.assign(jax.lax.cond(condition, lambda: new, lambda: old))."
)


_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def explained_traces(caller: str) -> Generator[None]:
    """Add advice to JAX's errors of values that a traced function has not, or leaks.

    The scopes here refuse an assignment that leaks one themselves. Where Keras runs a
    layer in a scope of its own, as in its train steps, JAX alone sees it.
    """
    try:
        yield
    except TypeError as error:  # All of these are.
        is_leaked = isinstance(error, jax.errors.UnexpectedTracerError)
        if isinstance(error, _NEEDS_A_VALUE):
            error.add_note(
                f"{caller}: the function is compiled, so its arrays have no values "
                "while its Python code runs. Use keras.ops.where or jax.lax.cond in "
                "place of `if`, and keras.ops or jax.numpy in place of NumPy, float() "
                "and int(); or return the array, and look at it outside."
            )
        elif is_leaked or "Tracer'>" in str(error):
            error.add_note(
                f"{caller}: a value has left {_TRACED_APART}: it was assigned to a "
                f"variable there, or kept in a Python object. {_RETURN_IT}"
            )
        raise


_VALUE_OF = "replicax_value_of"
"""The name, before a variable's id, of its value in a trace."""


class UndeclaredVariableError(ContextError):
    """A program uses a variable that it does not take as an input."""


class UpdatePendingError(ContextError):
    """A step needs the new value of a variable whose update is made after it."""


class WritesScope(keras.StatelessScope):
    """A scope that remembers, in order, which variables were written.

    Attributes:
        written: These, by id.
        deferred: The updates that are made afterwards, with their gradients.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True)  # Else `add_loss` is lost.
        self.written: dict[int, Variable] = {}
        self.deferred: dict[Update, list[jax.Array]] = {}
        self._pending: dict[int, Update] = {}
        self._trace: object = None

    def __enter__(self) -> Self:
        self._trace = find_top_trace(())
        super().__enter__()
        return self

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        self._require_settled(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        variable, _ = update
        self._require_settled(variable)
        if find_top_trace(()) is not self._trace:
            # The value could not leave, or would be assigned whatever branch is taken.
            raise ContextError(
                f"variable {variable.path!r} is assigned inside {_TRACED_APART}. "
                f"{_RETURN_IT}"
            )
        self.written[id(variable)] = variable
        super().add_update(update)

    def defer(
        self, update: "Update", gradients: list[jax.Array], *, follows_writes: bool
    ) -> None:
        """Ask for an update, of variables that no other one of the step trains.

        `follows_writes` says whether it is made of what the step has assigned.
        """
        trained = {id(v) for other in self.deferred for v in other.variables}
        for variable in update.variables:
            if id(variable) in self.written and not follows_writes:
                raise UpdatePendingError(
                    f"{update.owner}: variable {variable.path!r} is assigned in a "
                    "step with an optimizer.apply that trains it. Its update is "
                    "made where the variable lives, of the value from before the "
                    "step. Assign it in a step of its own, before this one."
                )
            if id(variable) in trained:
                raise UpdatePendingError(
                    f"{update.owner}: optimizer.apply is called a second time for "
                    f"variable {variable.path!r} in the same step. Add up its "
                    "gradients and apply them once, or make two steps."
                )
        self.deferred[update] = gradients
        self._pending |= {id(v): update for v in update.changed}

    def _require_settled(self, variable: Variable) -> None:
        """Raise if the variable has a new value by now that is not known here."""
        update = self._pending.get(id(variable))
        if update is not None:
            raise UpdatePendingError(_message(variable.path, update))

    def is_value_of(self, variable: Variable, value: jax.Array) -> bool:
        """Whether `value` is what the variable has here; True where nobody knows."""
        return self.get_current_value(variable) is value

    def updates(self) -> list[tuple[Variable, jax.Array]]:
        """The written variables with their latest values."""
        return [(v, self.state_mapping[id(v)]) for v in self.written.values()]


class RecordingScope(WritesScope):
    """Notes which variables a function reads, while it is traced abstractly.

    Variables created while it is open are initialised when the outermost scope closes.
    Reads are reported to `recorder` as well.
    """

    def __init__(self, recorder: "RecordingScope | None" = None) -> None:
        super().__init__()
        self.read: dict[int, Variable] = {} if recorder is None else recorder.read
        self._unassigned: dict[int, jax.Array] = {}

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        self.read.setdefault(id(variable), variable)
        value = super().get_current_value(variable)
        if value is None:
            # Not the stored array: in a replica program some operations refuse one that
            # lies on the mesh. Only shape and dtype matter here, and one that is made
            # in this trace has no array yet.
            value = self._unassigned.get(id(variable))
        if value is None:
            zeros = jnp.zeros(variable.shape, dtype_on_devices(stored_dtype(variable)))
            value = checkpoint_name(zeros, f"{_VALUE_OF}:{id(variable)}")
            self._unassigned[id(variable)] = value
        return value

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        self.read.setdefault(id(update[0]), update[0])
        super().add_update(update)


def used_variables(jaxpr: AnyJaxpr) -> set[int]:
    """Ids of the variables that equations use, of a function traced in such a scope."""
    jaxpr = open_jaxpr(jaxpr)
    atoms = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    atoms |= set(map(id, jaxpr.outvars))
    used: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name" and id(equation.outvars[0]) in atoms:
            name, _, number = equation.params["name"].rpartition(":")
            if name == _VALUE_OF:
                used.add(int(number))
        for inner in inner_jaxprs(equation):
            used |= used_variables(inner)
    return used


class ValueScope(WritesScope):
    """Gives a fixed set of variables the values of a program, in the same order.

    The function may touch no others; `caller` is named in the error. Those of `unused`
    ids are read, but their values make no difference.
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
        self._known = {id(v) for v in variables}
        self._unused = unused
        self._zeros: dict[int, jax.Array] = {}
        self._caller = caller

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        if id(variable) in self._unused:
            if id(variable) not in self._zeros:  # One: another would be a new value.
                zeros = jnp.zeros(variable.shape, stored_dtype(variable))
                self._zeros[id(variable)] = zeros
            return self._zeros[id(variable)]
        self._require_known(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        self._require_known(update[0])
        super().add_update(update)

    def is_value_of(self, variable: Variable, value: jax.Array) -> bool:
        """Whether `value` is what the variable has here; True where nobody knows."""
        return id(variable) in self._unused or super().is_value_of(variable, value)

    def _require_known(self, variable: Variable) -> None:
        if id(variable) not in self._known:
            raise UndeclaredVariableError(
                f"{self._caller}: variable {variable.path!r} {variable.shape} was not "
                "there when the function was traced first and is now. Functions are "
                "traced more than once: create layers, metrics and optimizers outside "
                "the function, once, and do not let Python state decide which are used."
            )


class ChildScope(WritesScope):
    """A scope inside another: sees the outer values but keeps its own writes.

    It may be outside any. Some variables may have other `values` in here.
    """

    def __init__(
        self,
        outer: keras.StatelessScope | None,
        values: Mapping[int, jax.Array] | None = None,
    ) -> None:
        super().__init__()
        self._outer = outer
        self.state_mapping = dict(values or {})

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        value, scope = super().get_current_value(variable), self._outer
        while value is None and scope is not None:
            value = scope.get_current_value(variable)
            # Keras computes losses in one that has the model's own variables only.
            is_of_keras = type(scope) is keras.StatelessScope
            scope = scope_around(scope) if is_of_keras else None
        return value


def distinct(variables: Iterable[Variable]) -> list[Variable]:
    """Drop repeated variables; keep the order of the first ones."""
    return list({id(v): v for v in variables}.values())


def is_seed_state(variable: Variable) -> bool:
    """Whether `variable` is the `uint32[2]` seed and counter of a `SeedGenerator`."""
    return variable.name == "seed_generator_state" and variable.shape == (2,)


def fold_replica_into_seed(state: jax.Array, replica_id: jax.Array) -> jax.Array:
    """A seed state of this replica's own; replica 0 keeps the one given.

    The odd multiplier (2**32 divided by the golden ratio) spreads neighbouring replicas
    over the seeds; Keras hashes the seed into its random key afterwards.
    """
    # Not state.at[0].add: XLA for GPUs does not compile a change of one in place.
    return state + replica_id.astype(state.dtype) * jnp.array(
        [2654435769, 0], state.dtype
    )


def restore_seed(state: jax.Array, original: jax.Array) -> jax.Array:
    """The seed state after a step: its counter moved on, its seed not folded."""
    return declare_mirrored(jnp.where(jnp.array([True, False]), original, state))


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One `optimizer.apply` of a step.

    Attributes:
        optimizer: The Keras optimizer, built.
        variables: The variables that it has gradients for, in the gradients' order.
        owner: Name of the strategy that makes the update, for messages.
    """

    optimizer: keras.Optimizer
    variables: tuple[Variable, ...]
    owner: str

    @functools.cached_property
    def changed(self) -> list[Variable]:
        """All variables that the update writes: the trained ones and the slots."""
        found = [*self.variables, *self.optimizer.variables]
        # An average is kept of all that it trains, also where no gradient is.
        if inner_of(self.optimizer).use_ema:
            found += trained_by(self.optimizer)
        return distinct(found)

    def make(
        self, values: Sequence[jax.Array], gradients: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The new values of `changed`, from the old ones; to be traced."""
        with ValueScope(self.changed, values, "optimizer.apply") as scope:
            self.optimizer.apply(list(gradients), list(self.variables))
            new = [scope.get_current_value(v) for v in self.changed]
        return [jnp.asarray(x, old.dtype) for x, old in zip(new, values, strict=True)]


class PendingValue:
    """Stands for the new value of a variable, which this program does not have.

    Keras' stateless steps pass it on; whoever computes with it gets an error.
    """

    def __init__(self, variable: Variable, update: Update) -> None:
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._message = _message(variable.path, update)

    def __getattr__(self, name: str) -> NoReturn:
        # JAX asks for `__jax_array__` before it computes with something unknown.
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
        "step. Its update is made where the variable lives, when the step is over, so "
        "the step has no new value of it. Use it before optimizer.apply, or in the "
        "next step."
    )
