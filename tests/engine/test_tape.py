"""A tape records what runs: each operation once, in any function of JAX."""

import itertools
from collections import Counter
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
from replicax.engine.jaxprs import inner_jaxprs, open_jaxpr

KINDS: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored": lambda: mirrored(2),
    "several on a device": lambda: rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas_per_device=2
    ),
    "sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture(params=KINDS)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return KINDS[request.param]()


def variable(strategy: rx.Strategy, value: Any = (1.0, 2.0, 3.0, 4.0)) -> Any:
    with strategy.scope():
        return keras.Variable(value)


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@jax.custom_jvp
def cubed(x: Any) -> Any:
    return x**3


cubed.defjvp(lambda x, dx: (cubed(x[0]), 3 * x[0] ** 2 * dx[0]))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, x > 2), lambda is_big, g: (jnp.where(is_big, 0, g),))

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "two outputs": lambda w, x: sum(map(jnp.sum, jnp.split(jnp.sin(w.value), 2))),
    "jit": lambda w, x: jax.jit(lambda v: jnp.sin(v).sum() + x.sum())(w.value),
    "closure": lambda w, x: jax.jit(lambda: (x * w.value).sum())(),
    "remat": lambda w, x: jax.checkpoint(lambda v: cubed(v).sum())(w.value),
    "scan": lambda w, x: lax.scan(
        lambda c, v: (c * v * w.value[0] + x.mean(), v), 1.0, w.value
    )[0],
    "fori": lambda w, x: lax.fori_loop(0, 3, lambda i, c: c * w.value.sum(), 1.0),
    "cond": lambda w, x: lax.cond(
        x.sum() > 0, lambda: ops.sum(w), lambda: ops.sum(w * w)
    ),
    "vmap": lambda w, x: jax.vmap(lambda v: (v * w.value).sum())(x).mean(),
    "grad": lambda w, x: jax.grad(lambda v: cubed(v).sum())(w.value).sum(),
    "custom vjp": lambda w, x: clipped(w.value * x).sum(),
    "stopped": lambda w, x: ops.sum(w * ops.stop_gradient(w)),
    "key": lambda w, x: (w * jax.random.normal(jax.random.key(2), (4,))).sum(),
    "collective": lambda w, x: ops.sum(
        w * rx.get_replica_context().all_reduce("mean", ops.mean(x, 0))
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_equal_value_and_grad(name: str, strategy: rx.Strategy) -> None:
    w = variable(strategy)

    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = FUNCTIONS[name](w, x)
        return loss, tape.gradient(loss, [w])

    def functional(x: Any) -> Any:
        return rx.value_and_grad(lambda: FUNCTIONS[name](w, x), [w])()

    got, want = (arrays(strategy.run(fn, (X,))) for fn in (step, functional))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_equal_value_and_grad(name: str) -> None:
    strategy = mirrored(2)
    w = variable(strategy)

    def step(x: Any) -> Any:
        with rx.GradientTape() as outer:
            with rx.GradientTape() as tape:
                loss = FUNCTIONS[name](w, x)
            (grad,) = tape.gradient(loss, [w])
            total = loss + ops.sum(grad**2)
        return total, outer.gradient(total, [w])

    def functional(x: Any) -> Any:
        def total() -> Any:
            loss, (grad,) = rx.value_and_grad(lambda: FUNCTIONS[name](w, x), [w])()
            return loss + ops.sum(grad**2)

        return rx.value_and_grad(total, [w])()

    got, want = (arrays(strategy.run(fn, (X,))) for fn in (step, functional))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_second_derivatives_in_a_model(run_eagerly: bool) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.w = self.add_weight((), "ones")

        def call(self, x: Any) -> Any:
            return x * self.w**3

        def train_step(self, data: Any) -> Any:
            x, _ = data
            with rx.GradientTape() as outer:
                with rx.GradientTape() as inner:
                    y = ops.sum(self(x))
                slope = inner.gradient(y, self.w)
                partly = slope * ops.stop_gradient(self.w)
            return {"slope": slope, "curvature": outer.gradient(partly, self.w)}

    with mirrored(1).scope():
        model = Model()
        model.compile("sgd", run_eagerly=run_eagerly)
    x = np.ones((2, 1), "float32")
    logs = model.fit(x, x, verbose=0).history
    assert (logs["slope"], logs["curvature"]) == ([6.0], [12.0])


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda numbers, w: ops.sum(w) * 10.0 ** next(numbers),
    "random": lambda numbers, w: ops.sum(w * np.random.normal(size=4).astype("f")),
    "path": lambda numbers, w: ops.sum(w * 2 if next(numbers) % 2 else w * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_python_state_may_change(name: str, strategy: rx.Strategy) -> None:
    w, numbers = variable(strategy, [1.0] * 4), itertools.count()

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = CHANGES[name](numbers, w)
        return loss, ops.sum(tape.gradient(loss, w))

    loss, grad = arrays(strategy.run(step))
    np.testing.assert_allclose(loss, grad, rtol=1e-6)


def test_variable_read_before_the_tape_is_constant(strategy: rx.Strategy) -> None:
    w = variable(strategy, 3.0)

    def step() -> Any:
        read = jax.jit(lambda: ops.convert_to_tensor(w))
        before = ops.convert_to_tensor(w), read()
        with rx.GradientTape(persistent=True) as tape:
            y, z = before[0] * w, before[1] * read()
        return tape.gradient(y, w), tape.gradient(z, w)

    assert all((x == 3.0).all() for x in arrays(strategy.run(step)))


def test_target_may_be_computed_after_the_tape(strategy: rx.Strategy) -> None:
    w = variable(strategy, 3.0)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = w * w
        return tape.gradient(y * y + w, w)

    assert all((x == 108.0).all() for x in arrays(strategy.run(step)))


def test_array_watched_after_it_was_used() -> None:
    def step(x: Any) -> Any:
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h = x * 3.0
            early = h * 2.0
            tape.watch(h)
            y = early + h
        return tape.gradient(y, h), tape.gradient(y, x), tape.gradient(h, h)

    got = arrays(mirrored(1).run(step, (np.float32(1.0),)))
    np.testing.assert_array_equal(got, [1.0, 9.0, 1.0])


@pytest.mark.parametrize("where", ["scan", "cond", "jit", "vmap"])
def test_tape_inside_a_function_of_jax(where: str, strategy: rx.Strategy) -> None:
    w = variable(strategy)

    def slope(x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = ops.sum(x * w**2)
        return tape.gradient(loss, w)

    inside: dict[str, Callable[[Any], Any]] = {
        "scan": lambda x: lax.scan(lambda c, v: (c + slope(v), None), x[0] * 0, x)[0],
        "cond": lambda x: lax.cond(
            x.sum() < 9e9, lambda x: slope(x), lambda x: x[0], x
        ),
        "jit": lambda x: jax.jit(lambda x: slope(x))(x),
        "vmap": lambda x: jax.vmap(slope)(x).sum(0),
    }
    for got in arrays(strategy.run(inside[where], (X,))):
        want = 2 * X.sum(0) * np.array([1.0, 2.0, 3.0, 4.0])
        np.testing.assert_allclose(got.reshape(-1, 4)[0], want, rtol=1e-5)


def test_operation_without_a_derivative_matters_only_on_the_way() -> None:
    strategy = mirrored(2)
    w, v = variable(strategy, 3.0), variable(strategy, 2.0)

    def step(of_loop: bool) -> Any:
        with rx.GradientTape() as tape:
            loop = lax.while_loop(lambda c: c < 9, lambda c: c * v.value, v.value)
            loss = w * w + (loop if of_loop else ops.stop_gradient(loop))
        return loss, tape.gradient(loss, w)

    assert [x.flat[0] for x in arrays(strategy.run(step, (False,)))] == [25.0, 6.0]
    assert [x.flat[0] for x in arrays(strategy.run(step, (True,)))] == [25.0, 6.0]

    def on_the_way() -> Any:
        with rx.GradientTape() as tape:
            loop = lax.while_loop(lambda c: c < 9, lambda c: c * v.value, v.value)
        return tape.gradient(loop, v)

    with pytest.raises(ValueError, match="Reverse-mode"):
        strategy.run(on_the_way)


def test_output_gradients_of_other_shapes_are_refused() -> None:
    strategy = mirrored(1)
    w = variable(strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = w * w
        return tape.gradient(y, w, output_gradients=jnp.ones(3))

    with pytest.raises(ValueError, match=r"output_gradients.*\(3,\).*\(4,\)"):
        strategy.run(step)


def primitives(jaxpr: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for eqn in open_jaxpr(jaxpr).eqns:
        counts[eqn.primitive.name] += 1
        for inner in inner_jaxprs(eqn):
            counts += primitives(inner)
    return counts


def layers() -> list[keras.layers.Layer]:
    return [
        keras.Input((8, 4)),
        keras.layers.Conv1D(6, 3, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.GRU(5, return_sequences=True),
        keras.layers.Dropout(0.5),
        keras.layers.LayerNormalization(),
        keras.layers.LSTM(4),
        keras.layers.Dense(3, "gelu"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_each_operation_is_traced_once(dtype: str) -> None:
    """The program has the operations of one with `jax.value_and_grad`, not more."""
    tape, functional = (trained(dtype, has_tape=x) for x in (True, False))
    assert tape[0] == functional[0]
    for a, b in zip(tape[1], functional[1], strict=True):
        np.testing.assert_array_equal(a, b)


def trained(dtype: str, *, has_tape: bool) -> tuple[Counter[str], list[np.ndarray]]:
    """Primitives of a program, and its results and variables after two steps."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(2)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope():
        model = keras.Sequential(layers())
        optimizer, metric = keras.optimizers.SGD(), keras.metrics.Mean()
    keras.config.set_dtype_policy("float32")
    weights = model.trainable_variables

    def loss_fn(x: Any, y: Any) -> Any:
        return ops.mean((model(x, training=True) - y) ** 2)

    def step(x: Any, y: Any) -> Any:
        if has_tape:
            with rx.GradientTape() as tape:
                loss = loss_fn(x, y)
            grads = tape.gradient(loss, weights)
        else:
            loss, grads = rx.value_and_grad(loss_fn, weights)(x, y)
        optimizer.apply(grads, weights)
        metric.update_state(loss)
        return loss

    batch = np.ones((6, 8, 4), "float32"), np.ones((6, 3), "float32")
    losses = [strategy.run(step, batch) for _ in range(2)]
    (program,) = strategy.runner.programs
    values = [v.value for v in program.inputs]
    counts = primitives(program._traced(values, batch).jaxpr)
    counts.pop("name", None)  # Identities.
    return counts, arrays((losses, [v.value for v in program.variables]))
