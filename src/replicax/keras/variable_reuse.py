"""The seam for functions that make the same variables anew on each trace.

Variables that such a function makes are reported to a `VariableReuse`, and get the same
names and seeds each time. The estimator is the user: a `model_fn` makes its layers.

Tested with Keras 3.14 to 3.15.
"""

import contextlib
import random
import threading
from collections.abc import Generator
from typing import Protocol

import jax
import jax.core
import keras
import numpy as np
from jax.typing import DTypeLike

from replicax._private.keras import names_counted_anew, seeds_drawn_from
from replicax._util.types import PyTree
from replicax.engine.variables import Variable

__all__ = [
    "VariableReuse",
    "constant_in_trace",
    "current_reuse",
    "made_alike",
    "reusing",
]


class VariableReuse(Protocol):
    """Called for the variables that a function makes in one trace."""

    def note(self, variable: Variable) -> bool:
        """Called for each variable that is made; whether it is to stay."""
        ...


class _Open(threading.local):
    reuse: VariableReuse | None = None


_local = _Open()


def current_reuse() -> VariableReuse | None:
    """The reuse that is open in this thread, or None."""
    return _local.reuse


@contextlib.contextmanager
def reusing(reuse: VariableReuse) -> Generator[None]:
    """Report the variables that are made in this context."""
    outer, _local.reuse = _local.reuse, reuse
    try:
        yield
    finally:
        _local.reuse = outer


@contextlib.contextmanager
def made_alike(seed: int) -> Generator[None]:
    """Give what this context makes the same names and seeds each time.

    Keras numbers names in the order in which a process makes objects, and draws seeds
    that nobody gave from Python's random numbers.
    """
    with names_counted_anew(), seeds_drawn_from(random.Random(seed)):
        yield


def constant_in_trace(variable: keras.Variable, initial: PyTree) -> PyTree:
    """A number or array that a variable begins with, as initializer, shape and dtype.

    Keras refuses them in a trace, as it cannot keep them; as an initializer it can.
    """
    if isinstance(initial, jax.core.Tracer):
        raise TypeError(
            f"{type(variable).__name__}: the initial value of a variable that is made "
            "in a model function depends on its arguments or on other variables, as "
            f"{initial!r} does. Give a number, an array or an initializer; for a "
            "learning rate that changes, a schedule such as "
            "keras.optimizers.schedules.ExponentialDecay."
        )
    value = np.asarray(initial)

    def constant(shape: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        return jax.numpy.asarray(value, dtype)

    return constant, value.shape, jax.dtypes.canonicalize_dtype(value.dtype)
