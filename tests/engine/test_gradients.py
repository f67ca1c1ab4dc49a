"""`GradientTape` and `value_and_grad` against `jax.grad`, on several replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops
from tests.conftest import mirrored

import replicax as rx


def variable(value: Any, strategy: rx.Strategy, **kwargs: Any) -> keras.Variable:
    with strategy.scope():
        return keras.Variable(value, **kwargs)


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(2)


def first(tree: Any) -> Any:
    def value(x: Any) -> np.ndarray:
        return np.asarray(x.values[0] if isinstance(x, rx.PerReplica) else x)

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, rx.PerReplica))


def mlp(strategy: rx.Strategy, sizes: tuple[int, ...] = (64, 32, 10)) -> keras.Model:
    with strategy.scope():
        return keras.Sequential(
            [
                keras.Input((sizes[0],)),
                *(keras.layers.Dense(n, "tanh") for n in sizes[1:-1]),
                keras.layers.Dense(sizes[-1]),
            ]
        )


def test_tape_equals_jax_grad_on_each_replicas_own_examples(strategy, digits) -> None:
    model = mlp(strategy)
    x, y = digits[0][:64], np.eye(10, dtype="float32")[digits[1][:64]]

    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = ops.mean((model(x) - y) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    batch = rx.PerReplica(x.reshape(2, 32, 64)), rx.PerReplica(y.reshape(2, 32, 10))
    loss, grads = strategy.run(step, batch)

    def functional(values: Any, x: Any, y: Any) -> Any:
        out, _ = model.stateless_call(values, [], x)
        return jnp.mean((out - y) ** 2)

    values = [np.asarray(v.value) for v in model.trainable_variables]
    for i in range(2):
        want_loss, want = jax.value_and_grad(functional)(
            values, x[32 * i :][:32], y[32 * i :][:32]
        )
        np.testing.assert_allclose(np.asarray(loss)[i], want_loss, rtol=1e-6)
        for got, expected in zip(grads, want, strict=True):
            np.testing.assert_allclose(
                np.asarray(got)[i], expected, rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize(
    "build",
    [
        lambda w, b: w,
        lambda w, b: [w, b],
        lambda w, b: (b, w),
        lambda w, b: {"b": b, "w": [w]},
        lambda w, b: {"inner": (w, {"b": b})},
    ],
    ids=["single", "list", "tuple", "dict", "nested"],
)
def test_gradients_come_in_the_structure_of_the_sources(strategy, build) -> None:
    w, b = variable([1.0, 2.0], strategy), variable(3.0, strategy)
    sources = build(w, b)

    def step() -> Any:
        with rx.GradientTape() as tape:
            loss = ops.sum(w * w) * b
        return tape.gradient(loss, sources)

    def expected(v: keras.Variable) -> Any:
        return np.array([6.0, 12.0]) if v is w else np.array(5.0)

    got = first(strategy.run(step))
    jax.tree.map(np.testing.assert_allclose, got, jax.tree.map(expected, sources))


def test_targets_may_be_arrays_and_pytrees_whose_elements_are_summed(strategy) -> None:
    w = variable([1.0, 2.0], strategy)

    def step() -> Any:
        with rx.GradientTape(persistent=True) as tape:
            out = {"a": w * w, "b": [3.0 * w]}
        weights = {"a": jnp.array([1.0, 0.0]), "b": [jnp.array([0.0, 2.0])]}
        return tape.gradient(out, w), tape.gradient(out, w, output_gradients=weights)

    plain, weighted = first(strategy.run(step))
    np.testing.assert_allclose(plain, [5.0, 7.0])
    np.testing.assert_allclose(weighted, [2.0, 6.0])


def test_two_tapes_of_a_gan_each_differentiate_their_own_loss(strategy) -> None:
    generator, critic = mlp(strategy, (4, 8, 3)), mlp(strategy, (3, 8, 1))
    noise = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    real = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")

    def step(noise: Any, real: Any) -> Any:
        with rx.GradientTape() as g_tape, rx.GradientTape() as d_tape:
            fake = generator(noise)
            g_loss = ops.mean(ops.softplus(-critic(fake)))
            d_loss = ops.mean(ops.softplus(critic(fake)) + ops.softplus(-critic(real)))
        return (
            g_tape.gradient(g_loss, generator.trainable_variables),
            d_tape.gradient(d_loss, critic.trainable_variables),
        )

    def g_loss(g: Any, d: Any) -> Any:
        fake, _ = generator.stateless_call(g, [], noise)
        return jnp.mean(jax.nn.softplus(-critic.stateless_call(d, [], fake)[0]))

    def d_loss(d: Any, g: Any) -> Any:
        fake, _ = generator.stateless_call(g, [], noise)
        on_fake, on_real = (critic.stateless_call(d, [], x)[0] for x in (fake, real))
        return jnp.mean(jax.nn.softplus(on_fake) + jax.nn.softplus(-on_real))

    g = [np.asarray(v.value) for v in generator.trainable_variables]
    d = [np.asarray(v.value) for v in critic.trainable_variables]
    want = jax.grad(g_loss)(g, d), jax.grad(d_loss)(d, g)
    got = first(strategy.run(step, (noise, real)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want
    )


def test_only_a_persistent_tape_has_a_second_gradient(strategy) -> None:
    w = variable(3.0, strategy)

    def step(persistent: bool) -> Any:
        with rx.GradientTape(persistent=persistent) as tape:
            square, cube = w * w, w**3
        return tape.gradient(square, w), tape.gradient(cube, w)

    assert first(strategy.run(step, (True,))) == (6.0, 27.0)
    with pytest.raises(RuntimeError, match=r"second time.*persistent=True"):
        strategy.run(step, (False,))


def test_watched_argument_and_intermediate_value(strategy) -> None:
    def step(x: Any) -> Any:
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h = jnp.sin(x)
            tape.watch(h)
            y = h * h * x
        return tape.gradient(y, x), tape.gradient(y, h), tape.gradient(y, [h, x])

    x = np.float32([0.3, 0.7])
    dx, dh, both = first(strategy.run(step, (x,)))
    h = np.sin(x)
    np.testing.assert_allclose(dx, h * h + 2 * h * np.cos(x) * x, rtol=1e-5)
    np.testing.assert_allclose(dh, 2 * h * x, rtol=1e-5)
    np.testing.assert_allclose(both[0], 2 * h * x, rtol=1e-5)


@pytest.mark.parametrize("make", [jnp.float32, jnp.array, jnp.atleast_1d])
def test_watched_constant(strategy, make) -> None:
    def step() -> Any:
        x, same_value = make(3.0), make(3.0)
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jnp.square(x) + 2 * x * same_value
        return tape.gradient(y, x)

    assert first(strategy.run(step)) == 12.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (np.float32, r"jnp\.asarray"),
        (float, r"jnp\.asarray"),
        (np.atleast_1d, r"jnp\.asarray"),
        (jnp.int32, "int32"),
    ],
)
def test_watching_what_has_no_gradient_is_refused(strategy, make, message) -> None:
    def step() -> None:
        with rx.GradientTape() as tape:
            tape.watch(make(3.0))

    with pytest.raises(TypeError, match=rf"GradientTape\.watch: .*{message}"):
        strategy.run(step)


def test_source_that_is_not_watched_is_refused(strategy) -> None:
    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            y = x * x
        return tape.gradient(y, x)

    with pytest.raises(
        ValueError, match=r"neither a variable nor watched.*tape\.watch"
    ):
        strategy.run(step, (np.float32(1.0),))


def test_gradient_penalty_with_a_nested_tape(strategy) -> None:
    critic = mlp(strategy, (3, 8, 1))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    def step(x: Any) -> Any:
        with rx.GradientTape() as outer:
            with rx.GradientTape() as inner:
                inner.watch(x)
                scores = critic(x)
            slopes = inner.gradient(scores, x)
            penalty = ops.mean((ops.sqrt(ops.sum(slopes**2, -1)) - 1) ** 2)
            loss = ops.mean(scores) + 10 * penalty
        return loss, outer.gradient(loss, critic.trainable_variables)

    def functional(values: Any) -> Any:
        def scores(x: Any) -> Any:
            return critic.stateless_call(values, [], x)[0]

        slopes = jax.grad(lambda x: scores(x).sum())(x)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1)) - 1) ** 2)
        return jnp.mean(scores(x)) + 10 * penalty

    values = [np.asarray(v.value) for v in critic.trainable_variables]
    want = jax.value_and_grad(functional)(values)
    got = first(strategy.run(step, (x,)))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_derivatives_up_to_the_third(strategy) -> None:
    w = variable(2.0, strategy)

    def step() -> Any:
        with rx.GradientTape() as third:
            with rx.GradientTape() as second:
                with rx.GradientTape() as tape:
                    y = w**5
                dy = tape.gradient(y, w)
            ddy = second.gradient(dy, w)
        return dy, ddy, third.gradient(ddy, w)

    assert first(strategy.run(step)) == (80.0, 160.0, 240.0)


def test_second_derivative_for_a_watched_array(strategy) -> None:
    w = variable(2.0, strategy)

    def step(x: Any) -> Any:
        with rx.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with rx.GradientTape() as inner:
                inner.watch(x)
                y = w * x**3
            slope = inner.gradient(y, x)
        return slope, outer.gradient(slope, x), outer.gradient(slope, [w, x])

    slope, curvature, both = first(strategy.run(step, (np.float32([1.0, 2.0]),)))
    np.testing.assert_allclose(slope, [6.0, 24.0])
    np.testing.assert_allclose(curvature, [12.0, 24.0])
    np.testing.assert_allclose(both[0], 15.0)
    np.testing.assert_allclose(both[1], [12.0, 24.0])


def test_gradient_that_only_enters_another_loss_after_the_tapes_is_constant(
    strategy,
) -> None:
    """A gradient taken before a second tape opens is a number to that tape."""
    w = variable(3.0, strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = w**3
        slope = tape.gradient(y, w)
        with rx.GradientTape() as tape:
            z = slope * w
        return slope, tape.gradient(z, w)

    assert first(strategy.run(step)) == (27.0, 27.0)


def test_unconnected_sources_give_none_or_zeros(strategy) -> None:
    w, other = variable(3.0, strategy), variable([1.0, 1.0], strategy)
    whole = variable(3, strategy, dtype="int32", trainable=False)

    def step() -> Any:
        with rx.GradientTape(persistent=True) as tape:
            # An integer on the way has no gradient.
            y = w * w * ops.cast(whole, "float32") + ops.cast(
                ops.argmax(other), "float32"
            )
        nothing = tape.gradient(y, [w, other])
        assert nothing[1] is None
        zeros = tape.gradient(y, [w, other], unconnected_gradients="zero")
        return nothing[0], zeros

    alone, zeros = first(strategy.run(step))
    assert alone == 18.0
    assert zeros[0] == 18.0
    np.testing.assert_array_equal(zeros[1], [0.0, 0.0])


def test_unknown_unconnected_gradients_are_refused(strategy) -> None:
    w = variable(3.0, strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = w * w
        return tape.gradient(y, w, unconnected_gradients="zeros")

    with pytest.raises(
        ValueError, match=r"unconnected_gradients='zeros'.*'none'.*'zero'"
    ):
        strategy.run(step)


def test_stop_gradient_cuts(strategy) -> None:
    w = variable(3.0, strategy)

    def step() -> Any:
        with rx.GradientTape(persistent=True) as tape:
            partly = w * ops.stop_gradient(w)
            wholly = ops.stop_gradient(w * w)
        return tape.gradient(partly, w), tape.gradient(
            wholly, w, unconnected_gradients="zero"
        )

    assert first(strategy.run(step)) == (3.0, 0.0)


def test_values_from_before_the_tape_are_constants(strategy) -> None:
    w = variable(3.0, strategy)

    def step(x: Any) -> Any:
        before = w * x
        with rx.GradientTape() as tape:
            y = before * w
        return tape.gradient(y, w)

    assert first(strategy.run(step, (2.0,))) == 6.0


def test_variable_read_between_two_tapes_is_not_recorded_by_either(strategy) -> None:
    w = variable(3.0, strategy)

    def step() -> Any:
        with rx.GradientTape() as one:
            a = w * w
        between = w * 5.0
        with rx.GradientTape() as two:
            b = between * w + a
        return one.gradient(a, w), two.gradient(b, w)

    assert first(strategy.run(step)) == (6.0, 15.0)


def test_assignments_inside_the_tape_happen_once(strategy) -> None:
    w, counter = variable(3.0, strategy), variable(0.0, strategy, trainable=False)

    def step() -> Any:
        with rx.GradientTape() as tape:
            counter.assign_add(1.0)
            loss = w * w * counter
        (grad,) = tape.gradient(loss, [w])
        counter.assign_add(10.0)
        w.assign_sub(0.5 * grad)
        return grad

    assert first(strategy.run(step)) == 6.0
    assert float(counter.value) == 11.0
    assert float(w.value) == 0.0


def test_source_assigned_inside_the_tape_keeps_its_new_value(strategy) -> None:
    w = variable(3.0, strategy)

    def step() -> Any:
        with rx.GradientTape() as tape:
            y = w * w
            w.assign(10.0)
        return tape.gradient(y, w)

    assert first(strategy.run(step)) == 6.0
    assert float(w.value) == 10.0
