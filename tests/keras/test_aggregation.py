"""Rules of a strategy for state that layers compute from a replica's own rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import replicax as rx

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(1, keepdims=True)

RULES: dict[str, Any] = {
    ".*scaled/(peak|wide)": "max",
    ".*scaled/least": "min",
    ".*scaled/running": "mean",
    ".*scaled/seen": "sum",
    ".*scaled/corner": "first",
    ".*scaled/power": lambda values: ops.sqrt(ops.mean(ops.square(values), 0)),
}


class Scaled(keras.layers.Layer):
    """Divides rows by the largest number so far, and keeps other numbers of them."""

    def build(self, shape: Any) -> None:
        names = ("peak", "least", "running", "seen", "corner", "power", "wide")
        self.state = {
            name: self.add_weight(
                name=name,
                shape=(4, 512) if name == "wide" else (),
                initializer="zeros",
                trainable=False,
            )
            for name in names
        }

    def call(self, x: Any, training: bool = False) -> Any:
        state = self.state
        if training:
            largest = ops.maximum(state["peak"], ops.max(x))
            state["peak"].assign(largest)
            state["wide"].assign(ops.maximum(state["wide"], ops.max(x)))
            state["least"].assign(ops.minimum(state["least"], ops.min(x)))
            state["running"].assign(0.9 * state["running"] + 0.1 * ops.mean(x))
            state["seen"].assign_add(x.shape[0])
            state["corner"].assign(x[0, 0])
            state["power"].assign(ops.sqrt(ops.mean(ops.square(x))))
        # Gradients reach the row with the largest number, on whichever replica it is.
        return x / (1 + state["peak"]) + state["power"]


def trained(strategy: Any, layer: Callable[[], Any] = lambda: Scaled(name="scaled")):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(3), layer(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    # Of ten rows the last batch has two, which fewer replicas hold.
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


def on(*numbers: int) -> list[str]:
    return [f"cpu:{number}" for number in numbers]


STRATEGIES: dict[str, Callable[..., rx.Strategy]] = {
    "mirrored": lambda **rules: rx.MirroredStrategy(on(0, 1), **rules),
    "more replicas than rows": lambda **rules: rx.MirroredStrategy(
        on(0, 1, 2, 3), **rules
    ),
    "several on a device": lambda **rules: rx.MirroredStrategy(
        on(0, 1), replicas_per_device=2, **rules
    ),
    "sharded update": lambda **rules: rx.MirroredStrategy(
        on(0, 1), shard_update=True, **rules
    ),
    "fully sharded": lambda **rules: rx.FullyShardedStrategy(on(0, 1), **rules),
    "model parallel": lambda **rules: rx.ModelParallelStrategy(
        devices=on(0, 1, 2, 3), model_parallel=2, **rules
    ),
    "central storage": lambda **rules: rx.CentralStorageStrategy(on(0, 1), **rules),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_state_and_weights_are_those_of_one_device(name: str) -> None:
    expected = trained(rx.MirroredStrategy(on(0), aggregation=RULES))
    model = trained(STRATEGIES[name](aggregation=RULES))
    for got, want in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-6, err_msg=want.path
        )


def test_replicas_without_examples_do_not_count() -> None:
    strategy = rx.MirroredStrategy(
        on(0, 1, 2), aggregation={"count": lambda values: values.sum(0), "low": "min"}
    )
    with strategy.scope():
        count = keras.Variable(0.0, trainable=False, name="count")
        low = keras.Variable(9.0, trainable=False, name="low")

    def step(x: Any) -> Any:
        count.assign(1.0)
        low.assign(ops.min(x))
        return count.value

    batches = strategy.experimental_distribute_dataset(X[:5] + 5, batch_size=3)
    counts = [float(strategy.run(step, args=(batch,))) for batch in batches]
    assert counts == [3.0, 2.0]  # Read in the step, after the assignment.
    np.testing.assert_allclose(low.numpy(), (X[3:5] + 5).min())


def test_trained_variables_optimizers_and_seeds_have_no_rules() -> None:
    def layer() -> Any:
        return keras.layers.Dropout(0.5, seed=1)

    expected = trained(rx.MirroredStrategy(on(0, 1)), layer)
    model = trained(rx.MirroredStrategy(on(0, 1), aggregation={".*": "max"}), layer)
    for got, want in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (["max"], TypeError, r"aggregation must be a dict .*\['max'\]"),
        ({".*/peak": "largest"}, ValueError, r"'\.\*/peak'.*'max'.*got 'largest'"),
        ({".*/peak": 3}, ValueError, r"'\.\*/peak'.*got 3"),
        ({"(peak": "max"}, ValueError, r"'\(peak'.*regular expression"),
        ({3: "max"}, ValueError, r"aggregation\[3\].*regular expression"),
    ],
)
def test_wrong_rules(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"MirroredStrategy: .*{message}"):
        rx.MirroredStrategy(on(0), aggregation=rules)


def test_an_expression_that_matches_nothing() -> None:
    strategy = rx.MirroredStrategy(on(0, 1), aggregation={**RULES, ".*/paek": "max"})
    with pytest.raises(ValueError, match=r"'\.\*/paek'.*near paths: .*/scaled/peak"):
        trained(strategy)


def test_two_expressions_for_one_variable() -> None:
    rules = {".*/peak": "max", ".*scaled/.*": "mean"}
    with pytest.raises(ValueError, match=r"/scaled/peak' matches several.*scaled/"):
        trained(rx.MirroredStrategy(on(0, 1), aggregation=rules))


def test_a_function_of_another_shape() -> None:
    rules = {**RULES, ".*scaled/power": lambda values: values}
    with pytest.raises(ValueError, match=r"fit.*/scaled/power'.*\(\).*got shape \(2,"):
        trained(rx.MirroredStrategy(on(0, 1), aggregation=rules))


def test_the_error_about_other_state_names_the_option() -> None:
    with pytest.raises(
        rx.DivergenceError, match=r"aggregation='mean'.* aggregation=\{'\.\*peak': 'max"
    ):
        trained(rx.MirroredStrategy(on(0, 1)))
