"""Reuses the variables that a function creates anew on each trace.

A TF 1 script makes its layers, its optimizer and its metrics inside the function that
describes the model. Such a function is traced here more than once: the k-th variable
that a later trace makes stands for the k-th one of the first, checked by path, dtype
and shape.
"""

import contextlib
from collections.abc import Generator

import jax
import keras
from jax.typing import ArrayLike

from replicax._private.keras import current_scope
from replicax.engine.variables import Variable
from replicax.errors import ContextError
from replicax.keras.variables import reusing

__all__ = ["MadeVariables"]


class MadeVariables:
    """The variables that a function makes.

    Args:
        caller: What errors call the function, such as `"model_fn"`.

    Attributes:
        variables: Those of the first trace, in the order they were made.
    """

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.variables: list[Variable] = []
        self._is_complete = False
        self._original: dict[int, Variable] = {}

    @contextlib.contextmanager
    def reused(self) -> Generator[None]:
        """Call the function in it. The first time, the variables are made.

        Raises:
            ContextError: If the function makes other variables than the first time.
        """
        if not self._is_complete:
            self.variables.clear()  # Of a first call that has failed.
        reuse = _Reuse(self, is_first=not self._is_complete)
        with reusing(reuse.note), reuse:
            yield
        reuse.close()
        self._is_complete = True

    def original(self, variable: Variable) -> Variable:
        """The variable that one made by the latest trace stands for."""
        return self._original.get(id(variable), variable)

    def note_latest(self, pairs: list[tuple[Variable, Variable]]) -> None:
        """Keep which variable each one of the latest trace stands for."""
        self._latest = [made for made, _ in pairs]  # Ids are theirs while they live.
        self._original = {id(made): original for made, original in pairs}


class _Reuse(keras.StatelessScope):
    """One call of the function: what it makes is forwarded to what was made first.

    Reads and writes go to the scope outside, for the variable that is meant.
    """

    def __init__(self, store: MadeVariables, *, is_first: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.is_first = is_first
        self._store = store
        self._pairs: list[tuple[Variable, Variable]] = []
        self._meant: dict[int, Variable] = {}
        self._outside: keras.StatelessScope

    def __enter__(self) -> "_Reuse":
        outside = current_scope()
        if outside is None:
            raise ContextError(
                f"{self._store.caller}: called outside a program. Only a strategy "
                "calls it."
            )
        self._outside = outside
        super().__enter__()
        return self

    def note(self, variable: Variable) -> bool:
        """Called for each variable that is made; whether it is to stay."""
        store, number = self._store, len(self._pairs)
        if self.is_first:
            store.variables.append(variable)
            self._pairs.append((variable, variable))
            return True
        if number >= len(store.variables):
            raise self._differs(f"one more: {_described(variable)}")
        meant = store.variables[number]
        if _described(variable) != _described(meant):
            raise self._differs(
                f"{_described(variable)} in place of {_described(meant)}"
            )
        self._pairs.append((variable, meant))
        self._meant[id(variable)] = meant
        return False

    def close(self) -> None:
        """Called when the function has returned."""
        made = len(self._pairs)
        if made < len(self._store.variables):
            missing = self._store.variables[made]
            raise self._differs(f"none in place of {_described(missing)}")
        self._store.note_latest(self._pairs)

    def get_current_value(self, variable: Variable) -> jax.Array | None:
        """Keras calls this for `variable.value`."""
        return self._outside.get_current_value(self._meant.get(id(variable), variable))

    def add_update(self, update: tuple[Variable, ArrayLike]) -> None:
        """Keras calls this for `variable.assign`."""
        variable, value = update
        self._outside.add_update((self._meant.get(id(variable), variable), value))

    def _differs(self, what: str) -> ContextError:
        return ContextError(
            f"{self._store.caller}: made other variables than the first time it was "
            f"called, {what}. It is called more than once: it must make the same "
            "layers, in the same order, each time."
        )


def _described(variable: Variable) -> str:
    return f"{variable.path!r} {variable.dtype}{list(variable.shape)}"
