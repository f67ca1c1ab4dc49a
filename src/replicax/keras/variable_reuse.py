"""Hooks for functions that make Keras objects while they are traced.

Installed by `hooks`, as `_private.wraps` says. Tested with Keras 3.14 to 3.15.
"""

import collections
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.core
import keras
import numpy as np
from jax.typing import DTypeLike
from keras.src.backend.common import global_state

from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine.variable_reuse import current_reuse

__all__ = ["default_seed", "init_variable", "made_alike", "register", "start_from"]

_NAMES = "object_name_uids"


@contextlib.contextmanager
def made_alike(seed: int) -> Iterator[None]:
    """What is made in it gets the same names and seeds each time.

    Keras numbers names in the order in which a process makes objects, and draws seeds
    that nobody gave from Python's random numbers.
    """
    names, draws = global_state.get_global_attribute(_NAMES), _local.draws
    global_state.set_global_attribute(_NAMES, collections.defaultdict(int))
    _local.draws = random.Random(seed)
    try:
        yield
    finally:
        _local.draws = draws
        global_state.set_global_attribute(_NAMES, names)


class _Local(threading.local):
    def __init__(self) -> None:
        self.draws: random.Random | None = None


_local = _Local()


def default_seed(original: Original) -> int:
    """`make_default_seed`: not from Python's own numbers, which input may draw from."""
    return original() if _local.draws is None else _local.draws.randint(1, 10**9)


def init_variable(
    original: Original,
    variable: keras.Variable,
    initializer: PyTree,
    shape: PyTree = None,
    dtype: DTypeLike | None = None,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    """`KerasVariable.__init__`: numbers as initial values are allowed in a trace.

    Keras refuses them there, as it cannot keep them; as an initializer it can.
    """
    given = not (callable(initializer) or isinstance(initializer, str))
    if current_reuse() is None or not given:
        original(variable, initializer, shape, dtype, *args, **kwargs)
        return
    if isinstance(initializer, jax.core.Tracer):
        raise TypeError(
            f"{type(variable).__name__}: the initial value of a variable that is made "
            "in a model function depends on its arguments or on other variables, as "
            f"{initializer!r} does. Give a number, an array or an initializer; for a "
            "learning rate that changes, a schedule such as "
            "keras.optimizers.schedules.ExponentialDecay."
        )
    value = np.asarray(initializer)
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(value.dtype).name

    original(variable, _constant(value), value.shape, dtype, *args, **kwargs)


def register(original: Original, variable: keras.Variable) -> None:
    """`register_uninitialized_variable`: one that stands for another gets no value."""
    reuse = current_reuse()
    if reuse is None or reuse.note(variable):
        original(variable)


def start_from(variables: Sequence[PyTree], values: Sequence[PyTree]) -> None:
    """Let variables that get their values later begin with these.

    Args:
        variables: Made in this trace; the others are left alone.
        values: One array for each.

    Raises:
        ValueError: If number or shapes differ.
    """
    shapes = [tuple(v.shape) for v in variables]
    given = [tuple(x.shape) for x in values]
    if shapes != given:
        raise ValueError(
            f"model: the copy has variables of the shapes {shapes}, the model itself "
            f"of {given}."
        )
    for variable, value in zip(variables, values, strict=True):
        if variable._value is None:
            variable._initializer = _constant(value)


def _constant(value: PyTree) -> PyTree:
    def constant(shape: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        return jax.numpy.asarray(value, dtype)

    return constant
