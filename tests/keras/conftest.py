"""One device is the oracle: the same work, plainly and under a strategy."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from tests.conftest import mirrored
from tests.strategies import parity

import replicax as rx


@pytest.fixture
def strategy_of() -> Callable[[int], rx.MirroredStrategy]:
    """Makes a strategy of so many replicas."""
    return mirrored


@pytest.fixture
def outcome() -> Callable[..., Any]:
    """`outcome(work, num_replicas)`: what `work()` returns; 0 stands for plain Keras.

    The same random numbers every time, so that initial weights are the same.
    """
    return _outcome


def _outcome(work: Callable[[], Any], num_replicas: int) -> Any:
    keras.utils.set_random_seed(1)
    scope = mirrored(num_replicas).scope() if num_replicas else None
    with scope or contextlib.nullcontext():
        return jax.tree.map(np.asarray, work())


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Compares two outcomes, array by array."""
    return _assert_same


# The replicas sum float32 numbers in another order. That is worth about 1e-7 of a
# gradient's size in each step, and grows with the steps; weights are about 1.
_assert_same = functools.partial(parity.assert_same, rtol=1e-4, atol=1e-5)


@pytest.fixture
def same_as_one_device() -> Callable[..., Any]:
    """Asserts that `work` gives the same on replicas as in plain Keras; returns it."""

    def check(work: Callable[[], Any], *num_replicas: int, **tolerances: float) -> Any:
        expected = _outcome(work, 0)
        for num in num_replicas:
            _assert_same(_outcome(work, num), expected, **tolerances)
        return expected

    return check
