"""A tape differentiates what the step returns, or says that it cannot."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import ops
from tests.conftest import mirrored

import replicax as rx

KINDS: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored": lambda: mirrored(2),
    "several on a device": lambda: rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas_per_device=2
    ),
    "sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=KINDS)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return KINDS[request.param]()


def variable(strategy: rx.Strategy, value: Any = (1.0, 2.0, 3.0, 4.0)) -> Any:
    with strategy.scope():
        return keras.Variable(value)


class State:
    """Python state that a step reads."""

    def __init__(self) -> None:
        self.number = 0
        self.numbers = itertools.count(1)

    def next(self) -> int:
        self.number += 1
        return self.number


def in_jit(number: int, w: Any) -> Any:
    return jax.jit(lambda v: (v * number).sum())(w.value)


def in_scan(number: int, w: Any) -> Any:
    return lax.scan(lambda c, x: (c + x * number, None), 0.0, w.value)[0]


CHANGES: dict[str, Callable[[State, Any], Any]] = {
    "counter": lambda state, w: ops.sum(w) * 10.0 ** state.next(),
    "iterator": lambda state, w: ops.sum(w) * next(state.numbers),
    "random": lambda state, w: ops.sum(w) * random.random(),
    "array": lambda state, w: ops.sum(w * np.random.normal(size=4).astype("float32")),
    "path": lambda state, w: ops.sum(ops.tanh(w) if state.next() % 2 else ops.exp(w)),
    "shape": lambda state, w: ops.sum(ops.concatenate([w] * state.next())),
    "axis": lambda state, w: ops.sum(ops.cumsum(w.value[None], state.next() % 2)),
    "key": lambda state, w: ops.sum(
        w * jax.random.normal(jax.random.key(state.next()), (4,))
    ),
    "in jit": lambda state, w: in_jit(state.next(), w),
    "in scan": lambda state, w: in_scan(state.next(), w),
    "other input": lambda state, w: ops.sum(w.value[0] if state.next() % 2 else w[1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changes_in_between_is_an_error(
    name: str, strategy: rx.Strategy
) -> None:
    w, state = variable(strategy), State()

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = CHANGES[name](state, w)
        return loss, tape.gradient(loss, [w])

    with pytest.raises(rx.RetraceError, match=r"keras\.Variable") as caught:
        strategy.run(step)
    assert re.search(rf"at {re.escape(__file__)}:\d+ in ", str(caught.value))


def test_error_names_the_line() -> None:
    strategy, state = mirrored(2), State()
    w = variable(strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            hidden = ops.tanh(w)
            scaled = hidden * state.next()
            loss = ops.sum(scaled)
        return tape.gradient(loss, [w])

    line = step.__code__.co_firstlineno + 3
    with pytest.raises(rx.RetraceError, match=rf":{line} in .*step, there is"):
        strategy.run(step)


def test_iterator_that_ends_in_the_replay_says_so() -> None:
    strategy = mirrored(2)
    w, numbers = variable(strategy), iter([1.0, 2.0, 3.0])

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = ops.sum(w) * next(numbers)
        return tape.gradient(loss, [w])

    with pytest.raises((StopIteration, RuntimeError)) as caught:
        strategy.run(step)
    assert any("traced again" in x for x in caught.value.__notes__)


def test_call_that_does_not_happen_again_is_an_error() -> None:
    strategy, state = mirrored(2), State()
    w = variable(strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = ops.sum(w)
        return tape.gradient(loss, [w]) if state.next() % 2 else loss

    with pytest.raises(rx.RetraceError, match="did not happen"):
        strategy.run(step)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_train_step_with_a_tape(run_eagerly: bool, changes: bool) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.numbers = itertools.count(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with rx.GradientTape() as tape:
                loss = ops.mean((self(x) - y) ** 2)
                loss = loss * (next(self.numbers) if changes else 2.0)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    with mirrored(2).scope():
        model = Model()
        model.compile("sgd", run_eagerly=run_eagerly)
    x = np.ones((8, 3), "float32")
    if not changes:
        assert model.fit(x, x[:, :1], verbose=0).history["loss"]
        return
    with pytest.raises(rx.RetraceError):
        model.fit(x, x[:, :1], verbose=0)


def test_state_that_changes_before_the_program_is_none() -> None:
    """The first trace only finds the variables, as Keras' first call builds a model."""
    strategy, state = mirrored(2), State()
    w = variable(strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = ops.sum(w) * (1.0 if state.number else float("nan"))
            state.number = 1
        return loss, tape.gradient(loss, w)

    loss, grad = strategy.run(step)
    np.testing.assert_array_equal(np.asarray(loss), 10.0)
    np.testing.assert_array_equal(np.asarray(grad), np.ones(4))


@jax.custom_jvp
def cubed(x: Any) -> Any:
    return x**3


cubed.defjvp(lambda x, dx: (cubed(x[0]), 3 * x[0] ** 2 * dx[0]))


def both(before: Any, w: Any) -> Any:
    """A call that closes over the variable as it was before the tape, and in it."""
    return jax.jit(lambda: (before * w.value).sum())()


FINE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "array": lambda w, x, before: ops.sum(w * np.arange(4.0, dtype="float32")),
    "new array": lambda w, x, before: ops.sum(w * ops.arange(4, dtype="float32")),
    "key": lambda w, x, before: ops.sum(
        w * keras.random.normal((4,), seed=3) * jax.random.normal(jax.random.key(2))
    ),
    "nan": lambda w, x, before: jnp.where(w.value > 0, w.value, float("nan")).sum(),
    "jit": lambda w, x, before: jax.jit(lambda v: jnp.sin(v).sum() + x.sum())(w.value),
    "remat": lambda w, x, before: jax.checkpoint(lambda v: cubed(v).sum())(w.value),
    "scan": lambda w, x, before: lax.scan(
        lambda c, v: (c * v + x.mean(), v), 1.0, w.value
    )[0],
    "while": lambda w, x, before: lax.fori_loop(
        0, 3, lambda i, c: c * w.value.sum(), 1.0
    ),
    "cond": lambda w, x, before: lax.cond(
        x.sum() > 0, lambda: ops.sum(w), lambda: ops.sum(w * w)
    ),
    "vmap": lambda w, x, before: jax.vmap(lambda v: (v * w.value).sum())(x).mean(),
    "grad": lambda w, x, before: jax.grad(lambda v: cubed(v).sum())(w.value).sum(),
    "before": lambda w, x, before: ops.sum(w * before),
    "before, in jit": lambda w, x, before: both(before, w),
    "constant": lambda w, x, before: ops.sum(x) * 0.0 + 3.0 * ops.sum(w),
    "stopped": lambda w, x, before: ops.sum(w * ops.stop_gradient(w)),
    "collective": lambda w, x, before: ops.sum(
        w * rx.get_replica_context().all_reduce("mean", ops.mean(x, 0))
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_what_repeats_is_no_error(name: str, strategy: rx.Strategy) -> None:
    w = variable(strategy)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def step(x: Any) -> Any:
        before = ops.convert_to_tensor(w)
        with rx.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with rx.GradientTape() as tape:
                loss = FINE[name](w, x, before)
            (grad,) = tape.gradient(loss, [w])
            total = loss + ops.sum(grad**2)
        return outer.gradient(total, [w]), outer.gradient(loss, x)

    strategy.run(step, (x,))
