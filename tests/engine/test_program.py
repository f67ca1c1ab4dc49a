"""Variables in replica programs: creation, reading, writing, donation, randomness."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.conftest import mirrored, values_of

import replicax as rx
from replicax.engine.arguments import flatten_call
from replicax.engine.program import Program
from replicax.engine.signature import Options, Outputs
from replicax.engine.variables import fold_replica_into_seed, restore_seed


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(2)


# Creation.


def test_layers_and_metrics_are_built_on_the_first_call(strategy) -> None:
    with strategy.scope():
        layer, metric = layers.Dense(3), keras.metrics.MeanSquaredError()
        optimizer = keras.optimizers.Adam()
    num_traces = []

    def step(x: Any) -> Any:
        num_traces.append(1)
        y = layer(x)
        metric.update_state(ops.zeros_like(y), y)
        optimizer.apply([ops.ones(v.shape) for v in layer.variables], layer.variables)
        return y

    x = np.ones((2, 4), "float32")
    strategy.run(step, (x,))
    assert [v.shape for v in layer.variables] == [(4, 3), (3,)]
    assert len({id(v) for v in optimizer.variables}) == 2 + 2 * 2
    traces = len(num_traces)
    strategy.run(step, (x,))
    assert len(num_traces) == traces
    assert int(optimizer.iterations.value) == 2
    assert all(v.value.sharding.is_fully_replicated for v in layer.variables)
    assert {d.id for d in layer.kernel.value.devices()} == {0, 1}


def test_layer_made_anew_in_every_call_is_refused(strategy) -> None:
    with pytest.raises(
        rx.ContextError, match=r"variable 'dense.*/kernel' .*create layers.*outside"
    ):
        strategy.run(lambda x: layers.Dense(3)(x), (np.ones((2, 4), "float32"),))


def test_python_state_that_picks_variables_is_refused(strategy) -> None:
    with strategy.scope():
        a, b = keras.Variable(1.0, name="a"), keras.Variable(1.0, name="b")
    calls = []

    def step() -> Any:
        calls.append(1)
        return (a if len(calls) == 1 else b) * 1.0

    with pytest.raises(rx.ContextError, match=r"variable 'b' .*Python state"):
        strategy.run(step)


def test_variables_of_the_default_strategy_may_come_from_anywhere() -> None:
    w = keras.Variable([1.0, 2.0])

    def step() -> Any:
        w.assign_add([1.0, 1.0])
        return rx.get_replica_context().all_reduce("sum", w.value)

    default = rx.get_strategy()
    for _ in range(2):
        out = default.run(step)
    assert values_of(out)[0].tolist() == [3.0, 4.0]
    w.assign([0.0, 0.0])
    assert values_of(default.run(step))[0].tolist() == [1.0, 1.0]
    assert (w * 2).tolist() == [2.0, 2.0]


# Writing.


def test_only_written_variables_are_outputs(strategy) -> None:
    with strategy.scope():
        read, written = keras.Variable([1.0]), keras.Variable([2.0])
    before = read.value

    def step() -> None:
        written.assign(written + read)

    strategy.run(step)
    (program,) = strategy.runner.programs
    assert program.written == [written]
    assert program.variables == [written, read]
    assert read.value is before


def test_steps_see_their_own_writes_in_order(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(1.0)

    def step() -> Any:
        first = w + 0.0
        w.assign(w * 2)
        w.assign_add(1.0)
        second = w + 0.0
        w.assign_sub(5.0)
        return first, second

    first, second = strategy.run(step)
    assert (values_of(first)[0], values_of(second)[0], float(w.value)) == (
        1.0,
        3.0,
        -2.0,
    )


def test_error_in_a_later_step_keeps_the_variables(strategy) -> None:
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])

    def step(x: Any) -> None:
        w.assign_add(x)

    strategy.run(step, (np.float32([1, 1]),))
    with pytest.raises(TypeError, match="incompatible shapes"):
        strategy.run(step, (np.ones(3, "float32"),))
    with pytest.raises(KeyError, match="no"):
        strategy.run(lambda: (w.assign([9.0, 9.0]), {}["no"]))
    np.testing.assert_array_equal(np.asarray(w.value), [2.0, 3.0])
    strategy.run(step, (np.float32([1, 1]),))
    np.testing.assert_array_equal(np.asarray(w.value), [3.0, 4.0])


# Donation.


def test_values_read_before_a_step_stay_valid(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(np.ones(1000, "float32"))

    def step() -> Any:
        w.assign(w * 2)
        return w.value

    copies, results = [], []
    for _ in range(4):
        copies.append(np.asarray(w.value))
        results.append(strategy.run(step))
    assert [c[0] for c in copies] == [1.0, 2.0, 4.0, 8.0]
    assert [r[0] for r in results] == [2.0, 4.0, 8.0, 16.0]


def test_written_variables_are_donated(strategy) -> None:
    with strategy.scope():
        w, read = keras.Variable(np.ones(8)), keras.Variable(np.ones(8))
    old, kept = w.value, read.value
    strategy.run(lambda: w.assign(w + read))
    assert old.is_deleted()
    assert not kept.is_deleted()


def test_two_variables_that_share_an_array(strategy) -> None:
    with strategy.scope():
        a, b = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0])
        c = keras.Variable([0.0, 0.0])
    for variable in (b, c):
        variable._value = a.value
    assert a.value is b.value

    def step() -> Any:
        a.assign(a + 1.0)
        b.assign(b * 10.0)
        return c.value

    out = strategy.run(step)
    np.testing.assert_array_equal(np.asarray(out), [1.0, 2.0])
    np.testing.assert_array_equal(np.asarray(a.value), [2.0, 3.0])
    np.testing.assert_array_equal(np.asarray(b.value), [10.0, 20.0])
    np.testing.assert_array_equal(np.asarray(c.value), [1.0, 2.0])


def test_part_of_a_variable_as_argument(strategy) -> None:
    """The argument is one device's copy, and so shares the variable's memory."""
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])

    def step(x: Any) -> Any:
        w.assign(w + x)
        return x * 1.0

    for i in range(4):
        out = strategy.run(step, (w.value.addressable_shards[i % 2].data,))
        np.testing.assert_array_equal(np.asarray(out), [2.0**i, 2.0 * 2**i])
    np.testing.assert_array_equal(np.asarray(w.value), [16.0, 32.0])


def test_variable_as_the_entries_of_all_replicas() -> None:
    for num_replicas in (1, 2):
        strategy = mirrored(num_replicas)
        with strategy.scope():
            w = keras.Variable(np.ones((num_replicas, 3), "float32"))

        def step(x: Any, w: keras.Variable = w) -> Any:
            w.assign(w * 2)
            return x

        for i in range(3):
            out = strategy.run(step, (rx.PerReplica(w.value),))
            assert (np.asarray(out) == 2.0**i).all()


def test_variable_that_is_argument_and_state_at_once(strategy) -> None:
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])

    def step(x: Any) -> Any:
        w.assign(w + x)
        return x * 1.0

    out = strategy.run(step, (w.value,))
    np.testing.assert_array_equal(np.asarray(out), [1.0, 2.0])
    np.testing.assert_array_equal(np.asarray(w.value), [2.0, 4.0])
    out = strategy.run(step, (w.value,))
    np.testing.assert_array_equal(np.asarray(w.value), [4.0, 8.0])


# Randomness.


def masks(
    num_replicas: int, num_steps: int = 2, seed: int = 7
) -> tuple[np.ndarray, Any]:
    """`[steps, R, 64]` dropout masks, and the seed's state afterwards."""
    strategy = mirrored(num_replicas)
    with strategy.scope():
        dropout = layers.Dropout(0.5, seed=seed)

    def step(x: Any) -> Any:
        return dropout(x, training=True) + dropout(x, training=True)

    x = np.ones(64, "float32")
    out = [np.stack(values_of(strategy.run(step, (x,)))) for _ in range(num_steps)]
    return np.stack(out), np.asarray(dropout.seed_generator.state.value)


def test_masks_differ_between_replicas_and_steps() -> None:
    drawn, _ = masks(4, 3)
    flat = drawn.reshape(-1, 64)
    assert len({row.tobytes() for row in flat}) == 12
    assert 0.8 < drawn.mean() / 2 < 1.2


def test_masks_replay_and_replica_0_equals_one_device() -> None:
    drawn, state = masks(4)
    again, _ = masks(4)
    np.testing.assert_array_equal(drawn, again)
    one, one_state = masks(1)
    np.testing.assert_array_equal(drawn[:, 0], one[:, 0])
    np.testing.assert_array_equal(state, one_state)
    other, _ = masks(4, seed=8)
    assert np.any(other != drawn)


def test_seed_counts_one_per_draw_and_keeps_its_seed() -> None:
    _, state = masks(4, num_steps=3, seed=7)
    plain = layers.Dropout(0.5, seed=7)
    for _ in range(6):
        plain(np.ones(64, "float32"), training=True)
    np.testing.assert_array_equal(state, np.asarray(plain.seed_generator.state.value))


def test_no_seed_is_changed_in_place() -> None:
    # XLA for GPUs (JAX 0.10.2) does not compile such a step of one replica.
    def step(state: jax.Array, replica_id: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = fold_replica_into_seed(state, replica_id)
        return own, restore_seed(own + jnp.array([0, 1], state.dtype), state)

    text = jax.jit(step).lower(jnp.array([7, 3], "uint32"), jnp.int32(1)).as_text()
    assert "scatter" not in text
    assert "dynamic_update_slice" not in text


# The options that `fit` uses.


def program(
    strategy: rx.Strategy, fn: Any, x: Any, variables: Any = None, **options: Any
) -> Any:
    def place(array: Any, kind: Any) -> Any:
        return array

    call = flatten_call((rx.PerReplica(x),), {}, place)
    known = Options(**options, variables=variables)
    made = Program(fn, strategy.group, call.make_arguments(), call.arrays, known)
    result = made([v.value for v in made.variables], call.arrays)
    return result.results, result.gradients


def test_several_steps_in_one_dispatch(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(0.0, trainable=False, aggregation="sum")

    def step(x: Any) -> Any:
        w.assign_add(x)
        return x

    x = np.float32([[1, 2], [3, 4], [5, 6]])  # [steps, replicas]
    out, _ = program(strategy, step, x, [w], num_steps=3)
    assert float(w.value) == 21.0
    np.testing.assert_array_equal(out, [5.0, 6.0])


def test_only_active_replicas_count(strategy) -> None:
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum")
        mean = keras.Variable(0.0, trainable=False, aggregation="mean")

    def step(x: Any) -> Any:
        total.assign_add(x)
        mean.assign(x)
        context = rx.get_replica_context()
        return context.apply_gradients(lambda grads, _: grads, [x, None], [])

    x = np.float32([3, 50])
    out, _ = program(strategy, step, x, num_active=1, gradient_op=rx.ReduceOp.MEAN)
    assert [float(v.value) for v in (total, mean)] == [3.0, 3.0]
    np.testing.assert_array_equal(out[0], [3.0, 3.0])
    assert out[1] is None


def test_results_may_be_finished_with_the_new_values(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(0.0, trainable=False, aggregation="sum")

    def step(x: Any) -> Any:
        w.assign_add(x)
        return {"seen": w.value}

    x = np.float32([1, 2])
    out, _ = program(
        strategy,
        step,
        x,
        outputs=Outputs.MIRRORED,
        finish=lambda out: w * 1.0,
    )
    assert float(out) == 3.0


def test_jit_inside_a_step_reads_variables(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(3.0)
    assert values_of(strategy.run(lambda: jax.jit(lambda x: w * x)(2.0))) == (6.0, 6.0)
    assert jnp.isfinite(w.value)


def _in_branch(v: keras.Variable) -> None:
    jax.lax.cond(jnp.array(True), lambda: v.assign(1.0), lambda: v.value)


def _whatever_the_branch(v: keras.Variable) -> None:
    new = jnp.array(1.0)  # Created outside the branch: JAX would not raise.
    jax.lax.cond(jnp.array(False), lambda: v.assign(new), lambda: v.value)


def _in_loop(v: keras.Variable) -> None:
    jax.lax.scan(lambda c, x: (c, v.assign_add(x)), 0.0, jnp.arange(3.0))


def _in_gradient(v: keras.Variable) -> None:
    jax.grad(lambda x: v.assign(x * x))(3.0)


@pytest.mark.parametrize(
    "step", [_in_branch, _whatever_the_branch, _in_loop, _in_gradient]
)
def test_variables_are_not_assigned_inside_inner_functions(strategy, step) -> None:
    with strategy.scope():
        v = keras.Variable(0.0, trainable=False, name="count")
    with pytest.raises(rx.ContextError, match=r"variable 'count' is assigned inside.*"):
        strategy.run(lambda: step(v))
    assert float(v.value) == 0.0


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_summands_of_a_sum_are_exact(num_replicas: int, dtype: str) -> None:
    strategy = mirrored(num_replicas)
    start = np.array([0, 1, 59999.25, 16777215, 1e-8, 1 / 3]).astype(dtype)
    with strategy.scope():
        total = keras.Variable(start, dtype=dtype, aggregation="sum")
    for _ in range(10):
        strategy.run(lambda: total.assign(total * 1))
    # Summands and sums are exact: no rounding may change the value.
    np.testing.assert_array_equal(total.numpy(), start)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_metrics_may_be_reset_and_decay_inside_a_step(num_replicas: int) -> None:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        mean = keras.metrics.Mean()
        decayed = keras.Variable(10.0, aggregation="sum")

    def step(x: jax.Array) -> Any:
        mean.update_state(x)
        inside = mean.result()
        mean.reset_state()
        mean.update_state(2 * x)
        decayed.assign(decayed * 0.5)
        return inside

    inside = strategy.run(step, (3.0,))
    np.testing.assert_array_equal(inside, [3.0] * num_replicas)
    assert float(mean.result()) == 6.0
    assert float(mean.count) == num_replicas
    assert float(decayed) == 5.0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_sum_that_is_not_finite_is_kept(strategy, value: float) -> None:
    with strategy.scope():
        total = keras.Variable(value, aggregation="sum")
    strategy.run(lambda: total.assign_add(1.0))
    np.testing.assert_array_equal(total.numpy(), value)
