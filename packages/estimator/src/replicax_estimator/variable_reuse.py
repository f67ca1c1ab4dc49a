"""Reuses the variables of a function that makes new variables on each trace.

The first trace makes the original variables. The k-th variable of a later trace stands
for the k-th original, and must have the same path, dtype and shape.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import keras
from jax.typing import ArrayLike

import replicax as rx
from replicax.seams import current_scope, reusing

__all__ = ["VariableStore"]


class VariableStore:
    """The variables that a function makes, in the order of their creation.

    Error messages call the function `caller`. The function may also read the variables
    `others`.
    """

    def __init__(self, caller: str, others: tuple[keras.Variable, ...] = ()) -> None:
        self.caller = caller
        self.others = others
        self.variables: list[keras.Variable] = []
        self._is_complete = False

    @contextlib.contextmanager
    def reuse(self, *, writes: bool = True) -> Generator[None]:
        """A context for one call of the function; the first call creates variables.

        With `writes=False` the call changes no variable, such as a moving average.
        ContextError: The function makes other variables than in the first call, or
        reads a variable that it has not made.
        """
        if not self._is_complete:
            self.variables.clear()  # The first call has failed.
        scope = _ReuseScope(self, is_first=not self._is_complete, writes=writes)
        with reusing(scope.on_creation), scope:
            yield
        scope.require_all()
        self._is_complete = True


class _ReuseScope(keras.StatelessScope):
    """The scope of one call of the function, which replaces variables by originals.

    The scope around the call, `_outer`, has the values of the original variables.
    """

    def __init__(self, store: VariableStore, *, is_first: bool, writes: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._is_first = is_first
        self._writes = writes
        self._store = store
        self._created: list[keras.Variable] = []  # Keeps ids unique.
        self._originals = {id(variable): variable for variable in store.others}
        self._outer: Any = None

    def __enter__(self) -> "_ReuseScope":
        self._outer = current_scope()
        super().__enter__()
        return self

    def on_creation(self, variable: keras.Variable) -> bool:
        """Record a new variable; return whether it is an original."""
        store, number = self._store, len(self._created)
        self._created.append(variable)
        if self._is_first:
            store.variables.append(variable)
            self._originals[id(variable)] = variable
            return True
        if number >= len(store.variables):
            raise self._difference(f"one more: {_description(variable)}")
        original = store.variables[number]
        if _description(variable) != _description(original):
            raise self._difference(
                f"{_description(variable)} in place of {_description(original)}"
            )
        self._originals[id(variable)] = original
        return False

    def require_all(self) -> None:
        """Raise ContextError if this call has made fewer variables than the first."""
        number = len(self._created)
        if number < len(self._store.variables):
            missing = self._store.variables[number]
            raise self._difference(f"none in place of {_description(missing)}")

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        return self._outer.get_current_value(self._original(variable))

    def add_update(self, update: tuple[keras.Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        variable, value = update
        if self._writes:
            self._outer.add_update((self._original(variable), value))

    def _original(self, variable: keras.Variable) -> keras.Variable:
        original = self._originals.get(id(variable))
        if original is None:
            raise rx.ContextError(
                f"{self._store.caller}: uses the variable {variable.path!r}, which it "
                "has not made. Make layers, optimizers and metrics in the "
                f"{self._store.caller}; for a Keras model use "
                "rx.estimator.model_to_estimator(keras_model=...)."
            )
        return original

    def _difference(self, what: str) -> rx.ContextError:
        return rx.ContextError(
            f"{self._store.caller}: made other variables than in its first call: "
            f"{what}. Each call must make the same layers, in the same order."
        )


def _description(variable: keras.Variable) -> str:
    return f"{variable.path!r} {variable.dtype}{list(variable.shape)}"
