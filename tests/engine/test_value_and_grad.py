"""`value_and_grad`, and properties that it shares with `GradientTape`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops
from tests.conftest import mirrored, values_of

import replicax as rx


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(2)


def first(tree: Any) -> Any:
    def value(x: Any) -> np.ndarray:
        return np.asarray(x.values[0] if isinstance(x, rx.PerReplica) else x)

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, rx.PerReplica))


def tape_step(model: keras.Model) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = ops.mean((model(x, training=True) - y) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def functional_step(model: keras.Model) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            return ops.mean((model(x, training=True) - y) ** 2)

        return rx.value_and_grad(loss_fn, model.trainable_variables)()

    return step


def flops(strategy: rx.Strategy, step: Callable[..., Any], args: Any) -> float:
    """FLOPs of the compiled program."""
    strategy.run(step, args)
    program = list(strategy.runner.programs)[-1]
    lowered = program.lower([v.value for v in program.inputs], args)
    return lowered.compile().cost_analysis()["flops"]


def dense(sizes: tuple[int, ...]) -> list[keras.layers.Layer]:
    return [keras.layers.Dense(n, "relu") for n in sizes]


@pytest.mark.slow(but=["mlp"])
@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_flops_of_a_step_with_a_tape(strategy, kind) -> None:
    with strategy.scope():
        if kind == "mlp":
            layers = [keras.Input((96,)), *dense((256, 256, 10))]
            x = np.ones((32, 96), "float32")
        else:
            layers = [keras.Input((12, 16)), keras.layers.LSTM(32), *dense((10,))]
            x = np.ones((8, 12, 16), "float32")
        model = keras.Sequential(layers)
    y = np.ones((x.shape[0], 10), "float32")
    with_tape = flops(strategy, tape_step(model), (x, y))
    functional = flops(strategy, functional_step(model), (x, y))
    print(f"{kind}: flops {with_tape=} {functional=}")
    assert with_tape == functional
    assert with_tape > 1e5


@pytest.mark.parametrize(
    "num_replicas",
    [
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_tape_equals_value_and_grad_for_a_model_of_many_layers(num_replicas) -> None:
    """Also dropout masks, moving statistics and seeds."""
    layers = keras.layers
    x = np.random.default_rng(0).normal(size=(num_replicas, 6, 8, 4)).astype("float32")
    y = np.ones((num_replicas, 6, 3), "float32")
    results = []
    for make_step in (tape_step, functional_step):
        keras.utils.set_random_seed(1)
        strategy = mirrored(num_replicas)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((8, 4)),
                    layers.Conv1D(6, 3, padding="same"),
                    layers.BatchNormalization(),
                    layers.GRU(5, return_sequences=True, dropout=0.2),
                    layers.Dropout(0.5),
                    layers.LayerNormalization(),
                    layers.LSTM(4),
                    layers.GaussianNoise(0.1),
                    layers.Dense(3),
                ]
            )
        step = make_step(model)
        for _ in range(2):
            out = strategy.run(step, (rx.PerReplica(x), rx.PerReplica(y)))
        state = [np.asarray(v.value) for v in model.variables]
        results.append((jax.tree.map(np.asarray, out), state))
    tape, functional = map(jax.tree.leaves, results)
    for a, b in zip(tape, functional, strict=True):
        np.testing.assert_array_equal(a, b)


def test_mixed_precision_gradients_are_of_the_variables_dtype(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, dtype="mixed_bfloat16")]
        )
    x, y = np.ones((2, 4), "float32"), np.zeros((2, 3), "float32")
    _, by_tape = first(strategy.run(tape_step(model), (x, y)))
    _, by_function = first(strategy.run(functional_step(model), (x, y)))
    assert [g.dtype for g in by_tape] == ["float32", "float32"]
    for a, b in zip(by_tape, by_function, strict=True):
        np.testing.assert_array_equal(a, b)


def test_model_is_built_inside_the_tape(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)

    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = ops.mean(model(x) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = [
        first(strategy.run(step, (np.ones((4, 2), "float32"),))) for _ in range(5)
    ]
    assert len(model.trainable_variables) == 4
    assert losses[-1] < losses[0], losses
    assert len(strategy.runner.programs) == 1


def test_value_and_grad_keeps_what_the_loss_function_writes(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(3.0)
        seen = keras.Variable(0.0, trainable=False)

    def step(x: Any) -> Any:
        def loss_fn(x: Any, *, scale: float) -> Any:
            seen.assign_add(1.0)
            return scale * w * x, {"seen": seen.value}

        (loss, aux), (grad,) = rx.value_and_grad(loss_fn, [w], has_aux=True)(
            x, scale=2.0
        )
        return loss, aux, grad, seen.value

    assert first(strategy.run(step, (5.0,))) == (30.0, {"seen": 1.0}, 10.0, 1.0)
    assert float(seen.value) == 1.0


def test_value_and_grad_outside_run() -> None:
    w = keras.Variable(3.0)
    seen = keras.Variable(0.0, trainable=False)

    def loss_fn() -> Any:
        seen.assign_add(1.0)
        return w * w

    loss, grads = rx.value_and_grad(loss_fn, [w])()
    assert (float(loss), float(grads[0]), float(seen.value)) == (9.0, 6.0, 1.0)
    assert float(w.value) == 3.0


def test_value_and_grad_inside_value_and_grad(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(2.0)

    def step() -> Any:
        def slope() -> Any:
            return rx.value_and_grad(lambda: w**3, [w])()[1][0]

        return rx.value_and_grad(slope, [w])()

    assert first(strategy.run(step)) == (12.0, [12.0])


def test_value_and_grad_inside_a_tape(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(2.0)

    def step() -> Any:
        with rx.GradientTape() as tape:
            _, (slope,) = rx.value_and_grad(lambda: w**3, [w])()
        return tape.gradient(slope, w)

    assert first(strategy.run(step)) == 12.0


def test_value_and_grad_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"variables is empty\. Build the model first"):
        rx.value_and_grad(lambda: 1.0, [])


def test_tape_outside_run_is_refused() -> None:
    w = keras.Variable(3.0)
    with (
        pytest.raises(
            rx.ContextError, match=r"GradientTape: used outside.*strategy\.run"
        ),
        rx.GradientTape(),
    ):
        _ = w * w


def test_gradient_after_the_step_is_refused(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(3.0)
    kept: list[rx.GradientTape] = []

    def step() -> Any:
        with rx.GradientTape(persistent=True) as tape:
            y = w * w
        kept.append(tape)
        return y

    strategy.run(step)
    with pytest.raises(rx.ContextError, match=r"GradientTape\.gradient: used outside"):
        kept[0].gradient(jnp.ones(()), w)

    def another() -> Any:
        return kept[0].gradient(w * w, w)

    with pytest.raises(rx.ContextError, match="not entered in this call of the step"):
        strategy.run(another)


def test_integer_target_is_refused(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(3.0)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = ops.cast(w * w, "int32")
        return tape.gradient(y, w)

    with pytest.raises(TypeError, match=r"target has dtype int32.*the loss"):
        strategy.run(step)


def test_unwatched_variables_are_refused() -> None:
    with pytest.raises(ValueError, match="watch_accessed_variables=False is not"):
        rx.GradientTape(watch_accessed_variables=False)


def test_error_inside_the_tape_leaves_the_strategy_usable(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(3.0)

    def broken() -> Any:
        with rx.GradientTape() as tape:
            y = w * w
        tape.gradient(y, w)
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        strategy.run(broken)
    assert float(w.value) == 3.0
    assert values_of(strategy.run(lambda: w * 2.0))[0] == 6.0
