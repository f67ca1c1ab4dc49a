"""Several replicas on one device compute what they compute on devices of their own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

ARRANGEMENTS = [(8, 1), (4, 2), (2, 4), (1, 8)]
NUM = 8


def strategy_of(devices: int, each: int, **options: Any) -> rx.MirroredStrategy:
    return rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(devices)], replicas_per_device=each, **options
    )


@pytest.mark.parametrize(("devices", "each"), ARRANGEMENTS)
def test_numbers_and_masks_do_not_depend_on_the_arrangement(
    devices: int, each: int
) -> None:
    strategy = strategy_of(devices, each)
    assert strategy.num_replicas_in_sync == NUM
    with strategy.scope():
        dropout = layers.Dropout(0.5, seed=3)
        state = dropout.seed_generator.state

    def step() -> Any:
        context = rx.get_replica_context()
        assert context.num_replicas_in_sync == NUM
        mask = dropout(jnp.ones((4, 5)), training=True)
        again = dropout(jnp.ones((4, 5)), training=True)
        return context.replica_id_in_sync_group, mask, again

    numbers, *masks = strategy.run(step)
    np.testing.assert_array_equal(numbers.array, np.arange(NUM))
    for values, expected in zip(masks, masks_on_eight_devices(), strict=True):
        np.testing.assert_array_equal(values.array, expected)
        assert len(np.unique(np.asarray(values.array), axis=0)) == NUM
    strategy.run(step)
    strategy.check_replicas()
    np.testing.assert_array_equal(state, [3, 4])  # Four uses, the same for all.


@functools.cache
def masks_on_eight_devices() -> list[np.ndarray]:
    strategy = strategy_of(8, 1)
    with strategy.scope():
        dropout = layers.Dropout(0.5, seed=3)

    def step() -> Any:
        return [dropout(jnp.ones((4, 5)), training=True) for _ in range(2)]

    return [np.asarray(x.array) for x in strategy.run(step)]


@pytest.mark.parametrize(("devices", "each"), ARRANGEMENTS)
def test_replica_context(devices: int, each: int) -> None:
    strategy = strategy_of(devices, each)
    values = np.arange(NUM * 6, dtype="float32").reshape(NUM, 3, 2)

    def merged(strategy: Any, per_replica: Any) -> Any:
        total = strategy.reduce("sum", per_replica, axis=None)
        return total, rx.PerReplica(per_replica.array + total)

    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        number = context.replica_id_in_sync_group
        assert x.shape == (3, 2)
        return {
            "sum": context.all_reduce("sum", x),
            "mean": context.all_reduce("mean", {"x": x, "number": number}),
            "ints": context.all_reduce("sum", number),
            "bools": context.all_reduce("sum", number > 2),
            "rows": context.all_gather(x, 0),
            "columns": context.all_gather([x], -1),
            "merged": context.merge_call(merged, (x,)),
            "mirrored": jnp.float32(3),
        }

    got = strategy.run(step, (rx.PerReplica(values),))
    found = jax.tree.map(
        np.asarray, got, is_leaf=lambda x: isinstance(x, rx.PerReplica)
    )
    total = values.sum(0)

    expected = {
        "sum": total,
        "mean": {"x": total / NUM, "number": np.float32(3.5)},
        "ints": np.int32(28),
        "bools": np.int32(5),
        "rows": values.reshape(-1, 2),
        "columns": [np.concatenate(list(values), -1)],
        "merged": (total, values + total),
        "mirrored": np.float32(3),
    }
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["ints"].dtype == np.int32


@pytest.mark.parametrize(("devices", "each"), ARRANGEMENTS)
def test_datasets_from_a_function(devices: int, each: int) -> None:
    strategy = strategy_of(devices, each)

    def make(context: Any) -> Any:
        assert context.num_replicas_in_sync == NUM
        assert context.get_per_replica_batch_size(24) == 3
        return [np.full(3, i) for i in range(2 * NUM + 1)]

    steps = list(strategy.distribute_datasets_from_function(make))
    found = [[x.tolist() for x in step.values] for step in steps]
    assert found[:2] == [[[i] * 3 for i in range(n, n + 8)] for n in (0, 8)]
    assert found[2] == [[16]] * 3, "The rows of the last batch are split."
    for step, rows in zip(steps, found, strict=True):
        total = strategy.reduce("sum", strategy.run(jnp.sum, (step,)), axis=None)
        assert int(total) == np.sum(rows)


def test_different_values_on_one_device_are_refused() -> None:
    strategy = strategy_of(1, 2)
    with strategy.scope():
        variable = keras.Variable(0.0, name="mine")
        first = keras.Variable(0.0, aggregation="only_first_replica")
        mean = keras.Variable(0.0, aggregation="mean")
        total = keras.Variable(1.0, aggregation="sum")

    def number() -> Any:
        return 1.0 + rx.get_replica_context().replica_id_in_sync_group

    with pytest.raises(rx.DivergenceError, match="assigned to 'mine'"):
        strategy.run(lambda: variable.assign(number()))

    def allowed() -> None:
        variable.assign(rx.get_replica_context().all_reduce("sum", number()))
        first.assign(number())
        mean.assign(number())
        total.assign(total + number())

    strategy.run(allowed)
    assert [float(v.value) for v in (variable, first, mean, total)] == [3, 1, 1.5, 4]


def test_inner_transformations() -> None:
    """Scans, conditions, loops and `vmap` work under the one over replicas."""

    def step(x: Any) -> Any:
        number = rx.get_replica_context().replica_id_in_sync_group
        scanned, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(2), x)
        chosen = jax.lax.cond(number % 2 == 0, jnp.sin, jnp.cos, scanned)
        looped = jax.lax.while_loop(
            lambda c: c[0] < number, lambda c: (c[0] + 1, c[1] * 2), (0, chosen)
        )[1]
        total = rx.get_replica_context().all_reduce("sum", looped)
        return total, jax.vmap(lambda row: jnp.sum(row * number))(x)

    x = rx.PerReplica(np.arange(NUM * 6, dtype="float32").reshape(NUM, 3, 2))
    expected = jax.tree.map(np.asarray, strategy_of(8, 1).run(step, (x,)))
    for devices, each in [(2, 4), (1, 8)]:
        actual = jax.tree.map(np.asarray, strategy_of(devices, each).run(step, (x,)))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected
        )


def test_one_replica_each_is_the_default() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.num_replicas_in_sync == 2
    assert strategy.group.axis_names == ("replica",)
    assert "each" not in repr(strategy)
    assert "4 replicas each" in repr(strategy_of(2, 4))


def test_check_replicas_names_all_replicas_of_a_device() -> None:
    strategy = strategy_of(2, 2)
    with strategy.scope():
        variable = keras.Variable(np.zeros(3), name="mine")
    shards = [s.data for s in variable.value.addressable_shards]
    variable._value = jax.make_array_from_single_device_arrays(
        (3,), variable.value.sharding, [shards[0], shards[1] + 1]
    )
    with pytest.raises(rx.DivergenceError, match=r"'mine' on replicas \[2, 3\]"):
        strategy.check_replicas([variable])


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (lambda x, names: jax.lax.psum(x, names[0]), [2, 4, 2, 4]),
        (lambda x, names: jax.lax.psum(x, names[1]), [1, 1, 5, 5]),
        (lambda x, names: jax.lax.all_gather(x, names[0])[0], [0, 1, 0, 1]),
        (lambda x, names: 1.0 * jax.lax.axis_index(names[1]), [0, 1, 0, 1]),
        (lambda x, names: jax.lax.psum(x, names), [6, 6, 6, 6]),
    ],
)
def test_a_collective_over_one_of_the_axes(collective, expected):
    """A sum over the devices alone differs between the replicas of a device."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], replicas_per_device=2)
    with strategy.scope():
        variable = keras.Variable(0.0)

    def value():
        context = rx.get_replica_context()
        number = 1.0 * context.replica_id_in_sync_group
        return collective(number, context.axis_names)

    out = strategy.run(value)
    assert isinstance(out, jax.Array) == (len(set(expected)) == 1)
    np.testing.assert_array_equal(np.broadcast_to(out, 4), expected)
    if isinstance(out, jax.Array):
        strategy.run(lambda: variable.assign(value()))
    else:
        with pytest.raises(rx.DivergenceError, match="differs between replicas"):
            strategy.run(lambda: variable.assign(value()))
