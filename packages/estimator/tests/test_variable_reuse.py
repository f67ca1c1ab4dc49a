"""Functions whose later traces reuse the variables of the first trace."""

import random
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.seams import made_alike
from replicax_estimator.variable_reuse import VariableStore


def calls(strategy: Any, function: Any) -> tuple[VariableStore, Any]:
    """Return a store, and a step that calls `function` with this store."""
    store = VariableStore("the function")

    def step(x: Any) -> Any:
        with made_alike(seed=3), store.reuse():
            return function(x)

    return store, lambda x: strategy.reduce("mean", strategy.run(step, (x,)))


@pytest.fixture
def strategy() -> rx.Strategy:
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_later_traces_reuse_the_first_variables(strategy: Any) -> None:
    def function(x: Any) -> Any:
        layer = keras.layers.Dense(2)
        count = keras.Variable(3.0, trainable=False, aggregation="only_first_replica")
        count.assign_add(1.0)
        return keras.ops.sum(layer(x)) + count

    store, run = calls(strategy, function)
    kernel, bias = None, None
    for step, rows in enumerate((4, 4, 6)):  # A new shape causes a new trace.
        x = np.ones((rows, 3), "float32")
        result = run(x)
        assert len(store.variables) == 3
        count, *weights = (
            store.variables if store.variables[0].shape == () else store.variables[::-1]
        )
        kernel, bias = sorted(weights, key=lambda v: -v.ndim)
        expected = float(jnp.sum(x @ kernel.value + bias.value)) + 4.0 + step
        assert float(result) == pytest.approx(expected, rel=1e-5)
        assert float(count.value) == 4.0 + step
    assert kernel is not None
    assert kernel.path == "dense/kernel"


def test_names_and_seeds_restart_in_each_trace(strategy: Any) -> None:
    keras.layers.Dense(1)
    names, seeds = [], []

    def function(x: Any) -> Any:
        names.append(keras.layers.Dense(1).name)
        seeds.append(keras.initializers.GlorotUniform().seed)
        return x.sum()

    state = random.getstate()
    _, run = calls(strategy, function)
    run(np.ones(4, "float32"))
    run(np.ones(8, "float32"))
    assert set(names) == {"dense"}
    assert len(set(seeds)) == 1
    assert random.getstate() == state
    assert keras.layers.Dense(1).name != "dense"


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([1, 2], r"'dense/kernel' float32\[3, 2\] in place of 'dense/kernel' float32"),
        ([1, 1, 1], "one more: 'dense_1/kernel'"),
        ([], "none in place of 'dense/kernel'"),
    ],
)
def test_other_variables_are_an_error(
    units: list[int], message: str, strategy: Any
) -> None:
    later = [[1], units[1:] if len(units) != 0 else []]

    def function(x: Any) -> Any:
        chosen = later[1] if len(store.variables) else later[0]
        return sum(keras.ops.sum(keras.layers.Dense(n)(x)) for n in chosen) + x.sum()

    store, run = calls(strategy, function)
    with pytest.raises(rx.ContextError, match=message) as caught:
        run(np.ones((2, 3), "float32"))
    assert "the function: made other variables" in str(caught.value)
