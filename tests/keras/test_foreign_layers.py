"""Layers of other libraries: their state on several replicas."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.strategies.parity import STRATEGIES

import replicax as rx

X = np.random.default_rng(0).normal(1.0, 2.0, size=(24, 4)).astype("float32")
Y = np.arange(24) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
OPTIONS: dict[str, Any] = {"batch_size": 12, "verbose": 0, "shuffle": False}

STATE = {
    "batch_stats": {"mean": np.zeros(4, "float32"), "var": np.ones(4, "float32")},
    "counters": {"steps": np.zeros((), "int32")},
    "keys": {"key": np.array([0, 1], "uint32")},
}


def normalized(params: Any, state: Any, inputs: Any, training: bool) -> Any:
    """Batch normalization, a counter and a key, as a function."""
    if not training:
        stats = state["batch_stats"]
        scaled = (inputs - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-3)
        return scaled @ params["kernel"], state
    mean, var = inputs.mean(0), inputs.var(0)
    stats = {
        name: 0.9 * state["batch_stats"][name] + 0.1 * value
        for name, value in (("mean", mean), ("var", var))
    }
    new = {
        "batch_stats": stats,
        "counters": {"steps": state["counters"]["steps"] + 1},
        "keys": {"key": jax.random.split(state["keys"]["key"])[0]},
    }
    return ((inputs - mean) / jnp.sqrt(var + 1e-3)) @ params["kernel"], new


def initialized(rng: Any, inputs: Any) -> Any:
    kernel = np.random.default_rng(2).normal(size=(inputs.shape[-1], 3))
    return {"kernel": jnp.asarray(kernel, "float32")}, jax.tree.map(jnp.asarray, STATE)


def compiled(*parts: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model


def jax_layer(call_fn: Any = normalized, kind: Any = layers.JaxLayer) -> Any:
    kernel = np.random.default_rng(2).normal(size=(4, 3)).astype("float32")
    return kind(call_fn=call_fn, params={"kernel": kernel}, state=STATE)


def native() -> Any:
    kernel = np.random.default_rng(2).normal(size=(4, 3)).astype("float32")
    norm = layers.BatchNormalization(momentum=0.9, center=False, scale=False)
    dense = layers.Dense(3, use_bias=False, kernel_initializer=lambda *_, **__: kernel)
    return norm, dense


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_are_those_of_batch_normalization(
    num_replicas: int, strategy_of: Any, assert_same: Any
) -> None:
    found = []
    for make in (lambda: [jax_layer()], native):
        strategy = strategy_of(num_replicas)
        with strategy.scope():
            model = compiled(*make())
        model.fit(X, Y, epochs=2, **OPTIONS)
        strategy.check_replicas()
        found.append(model)
    ours, keras_own = found
    mean, var, steps, key = (np.asarray(v) for v in ours.layers[0].tracked_state)
    norm, dense = keras_own.layers
    assert_same(mean, np.asarray(norm.moving_mean))
    assert_same(var, np.asarray(norm.moving_variance))
    assert_same(np.asarray(ours.trainable_variables[0]), np.asarray(dense.kernel))
    assert steps == 4
    assert key.dtype == np.uint32
    # Evaluation and prediction do not change the state.
    ours.evaluate(X, Y, batch_size=12, verbose=0)
    ours.predict(X, batch_size=12, verbose=0)
    np.testing.assert_array_equal(ours.layers[0].tracked_state[0], mean)
    np.testing.assert_array_equal(ours.layers[0].tracked_state[1], var)


@pytest.mark.parametrize("has_input", [True, False])
def test_a_layer_that_makes_its_own_weights(
    has_input: bool, strategy_of: Any, assert_same: Any
) -> None:
    """Keras' initialization of the layer calls TensorFlow, which may be missing."""
    found = []
    for make in (
        lambda: jax_layer(),
        lambda: layers.JaxLayer(call_fn=normalized, init_fn=initialized),
    ):
        with strategy_of(2).scope():
            model = compiled(make())
        if not has_input:
            with strategy_of(2).scope():
                model = keras.Sequential([make()])
                model.build((None, 4))
                model.compile(keras.optimizers.SGD(0.1), LOSS)
        model.fit(X, Y, **OPTIONS)
        found.append([np.asarray(v) for v in model.layers[0].variables])
    assert_same(*found)


def counting_rows(params: Any, state: Any, inputs: Any, training: bool) -> Any:
    outputs, new = normalized(params, state, inputs, training)
    seen = jnp.sum(inputs > 0).astype("int32")  # The line that the message names.
    return outputs, {**new, "counters": {"steps": state["counters"]["steps"] + seen}}


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, 1) if text in line)
    return f"{Path(__file__).name}, line {number}"


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}])
def test_numbers_that_have_no_mean_are_refused(
    options: dict[str, int], strategy_of: Any
) -> None:
    with strategy_of(2).scope():
        model = compiled(jax_layer(counting_rows))
        model.compile("sgd", LOSS, **options)
    with pytest.raises(rx.DivergenceError, match=r"^fit\(.*aggregation") as caught:
        model.fit(X, Y, **OPTIONS)
    assert 'new, "counters"' not in str(caught.value)
    assert line_of('{**new, "counters"') in str(caught.value)


class Summed(layers.JaxLayer):
    """Declares the aggregation of its state."""

    def add_weight(self, *args: Any, trainable: bool = True, **kwargs: Any) -> Any:
        if not trainable:
            kwargs["aggregation"] = "only_first_replica"
        return super().add_weight(*args, trainable=trainable, **kwargs)


def test_a_layer_may_declare_an_aggregation(strategy_of: Any) -> None:
    with strategy_of(2).scope():
        model = compiled(jax_layer(counting_rows, Summed))
    model.fit(X, Y, **OPTIONS)
    rows = [*X[:6], *X[12:18]]  # The first replica's.
    assert int(model.layers[0].tracked_state[2].value) == np.sum(np.stack(rows) > 0)


def test_flax_batch_statistics(strategy_of: Any, assert_same: Any) -> None:
    linen = pytest.importorskip("flax.linen")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any, training: bool) -> Any:
            x = linen.BatchNorm(
                use_running_average=not training,
                momentum=0.9,
                epsilon=1e-3,
                use_bias=False,
                use_scale=False,
            )(x)
            steps = self.variable("counters", "steps", lambda: jnp.zeros((), jnp.int32))
            if training:
                steps.value = steps.value + 1
            x = linen.Dropout(0.0, deterministic=not training)(x)
            return linen.Dense(3, use_bias=False)(x)

    variables = Network().init(jax.random.PRNGKey(0), X[:2], training=False)
    # The first model's steps take JAX arrays that it was given, as in plain Keras.
    variables = jax.tree.map(np.asarray, variables)
    found = []
    for num_replicas in (1, 2):
        with strategy_of(num_replicas).scope():
            model = compiled(layers.FlaxLayer(Network(), variables=variables))
        model.fit(X, Y, epochs=2, **OPTIONS)
        mean, _, steps = (np.asarray(v) for v in model.layers[0].tracked_state[:3])
        assert steps == 4
        found.append(mean)
    assert_same(*found)  # The mean of the replicas' means is the mean.


@pytest.mark.parametrize(
    "name", ["mirrored 2", "virtual", "fully sharded", "central storage"]
)
def test_the_error_names_the_line_of_a_step(name: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        variable = keras.Variable(np.zeros((), "float16"), name="mine")

    def step() -> None:
        index = rx.get_replica_context().replica_id_in_sync_group
        variable.assign(ops.cast(index, "float32") * 2.5)  # Cast on the way.

    with pytest.raises(rx.DivergenceError, match="'mine'") as caught:
        strategy.run(step)
    assert line_of("Cast on the way.") in str(caught.value)
