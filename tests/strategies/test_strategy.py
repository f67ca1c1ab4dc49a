"""`run`'s arguments and results, `reduce`, `gather` and values made per replica."""

import copy
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import mirrored

import replicax as rx


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(4)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, 3, 2)).astype("float32")


# Results.


def test_results_lie_on_the_replicas_devices(strategy, values) -> None:
    out = strategy.run(lambda x: {"y": [x * 2], "n": None}, (rx.PerReplica(values),))
    assert out["n"] is None
    (y,) = out["y"]
    assert isinstance(y, rx.PerReplica)
    for i, value in enumerate(y.values):
        assert value.devices() == {jax.devices()[i]}
        np.testing.assert_array_equal(value, 2 * values[i])
    local = strategy.experimental_local_results(y)
    assert [v.devices() for v in local] == [{d} for d in jax.devices()[:4]]
    np.testing.assert_array_equal(np.stack(local), values * 2)


def test_local_results_of_other_values(strategy) -> None:
    assert strategy.experimental_local_results(3.0) == (3.0,)


def test_run_returns_before_the_devices_are_done_and_results_feed_the_next(
    strategy,
) -> None:
    x: Any = rx.PerReplica(np.zeros((4, 2), "float32"))
    for _ in range(10):
        x = strategy.run(lambda x: x + 1, (x,))
    np.testing.assert_array_equal(np.asarray(x), np.full((4, 2), 10.0))
    assert len(strategy.runner.programs) == 1


def test_numbers_and_variables_may_be_returned(strategy) -> None:
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])
    out = strategy.run(lambda: (1, 2.5, 1j, True, np.float32(3), np.arange(2), w))
    assert all(isinstance(o, jax.Array) for o in out)
    assert [np.asarray(o).tolist() for o in out] == [
        1, 2.5, 1j, True, 3.0, [0, 1], [1.0, 2.0],
    ]  # fmt: skip


def test_a_returned_variable_has_its_value_in_the_step(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(1.0)

    def step() -> keras.Variable:
        w.assign_add(1.0)
        return w

    assert [float(strategy.run(step)) for _ in range(3)] == [2.0, 3.0, 4.0]
    w.assign(7.0)
    assert [float(strategy.run(lambda: w)), float(strategy.run(step))] == [7.0, 8.0]


@pytest.mark.parametrize("result", ["text", object(), {1, 2}, jnp.sum])
def test_other_results_are_returned_as_they_are(strategy, result) -> None:
    assert strategy.run(lambda: {"a": [result]})["a"][0] is result


# Reductions.


@pytest.mark.parametrize("axis", [None, 0, 1, -1, -2])
@pytest.mark.parametrize("op", ["sum", rx.ReduceOp.MEAN])
def test_reduce_equals_numpy(strategy, values, op, axis) -> None:
    per_replica = strategy.run(lambda x: x, (rx.PerReplica(values),))
    got = strategy.reduce(op, {"a": per_replica}, axis=axis)["a"]
    dims = 0 if axis is None else (0, axis % 2 + 1)
    want = values.sum(dims) if op == "sum" else values.mean(dims)
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_reduce_of_integers(strategy) -> None:
    x = rx.PerReplica(np.arange(4))
    assert int(strategy.reduce("sum", x)) == 6
    assert float(strategy.reduce("mean", x)) == 1.5


def test_reduce_of_values_that_are_not_per_replica(strategy) -> None:
    assert float(strategy.reduce("mean", 3.0)) == 3.0
    np.testing.assert_array_equal(strategy.reduce("mean", np.ones(2)), [1.0, 1.0])
    assert float(mirrored(1).reduce("sum", 3.0)) == 3.0
    with pytest.raises(ValueError, match=r"reduce: got 3\.0.*no result of run"):
        strategy.reduce("sum", 3.0)


def test_reduce_refuses_what_it_does_not_know(strategy, values) -> None:
    x = rx.PerReplica(values)
    with pytest.raises(ValueError, match=r"Strategy\.reduce: unknown reduce operation"):
        strategy.reduce("max", x)
    for axis in (2, -3):
        with pytest.raises(
            ValueError, match=rf"reduce: axis={axis} is out of range .*\(3, 2\)"
        ):
            strategy.reduce("sum", x, axis=axis)
    scalars = rx.PerReplica(np.ones(4))
    with pytest.raises(
        ValueError, match=r"axis=0 .*shape \(\)\. Return at least rank 1"
    ):
        strategy.reduce("sum", scalars, axis=0)
    with pytest.raises(
        TypeError, match=r"Strategy\.reduce: got axis='x', expected an integer"
    ):
        strategy.reduce("sum", x, axis="x")


def test_values_of_another_strategy_are_refused(strategy) -> None:
    two = mirrored(2).run(lambda x: x, (rx.PerReplica(np.ones(2)),))
    with pytest.raises(ValueError, match=r"run: a PerReplica holds 2 values"):
        strategy.run(lambda x: x, (two,))
    with pytest.raises(ValueError, match=r"reduce: a PerReplica holds 2 values"):
        strategy.reduce("sum", two)
    with pytest.raises(ValueError, match=r"gather: a PerReplica holds 2 values"):
        strategy.gather(rx.PerReplica(np.ones((2, 1))), axis=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_equals_numpy(strategy, values, axis) -> None:
    got = strategy.gather([rx.PerReplica(values)], axis=axis)[0]
    np.testing.assert_array_equal(got, np.concatenate(values, axis))


def test_gather_of_values_that_are_equal_everywhere(strategy) -> None:
    np.testing.assert_array_equal(strategy.gather(np.arange(2), axis=0), [0, 1] * 4)


def test_gather_refuses_scalars_and_unknown_dimensions(strategy, values) -> None:
    with pytest.raises(ValueError, match=r"gather: axis=0 .*Return at least rank 1"):
        strategy.gather(rx.PerReplica(np.ones(4)), axis=0)
    with pytest.raises(ValueError, match=r"gather: axis=2 is out of range"):
        strategy.gather(rx.PerReplica(values), axis=2)
    with pytest.raises(
        TypeError, match=r"Strategy\.gather: got axis=None, expected an integer"
    ):
        strategy.gather(rx.PerReplica(values), axis=None)


@settings(max_examples=15)
@given(
    num_replicas=st.integers(1, 8),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_reduce_and_gather_of_any_shape(num_replicas, shape, data) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    strategy = mirrored(num_replicas)
    x = (
        np.random.default_rng(0)
        .integers(-9, 9, (num_replicas, *shape))
        .astype("float32")
    )
    out = strategy.run(lambda x: x, (rx.PerReplica(x),))
    np.testing.assert_array_equal(
        strategy.reduce("sum", out, axis=axis), x.sum((0, axis % len(shape) + 1))
    )
    np.testing.assert_array_equal(
        strategy.gather(out, axis=axis), np.concatenate(x, axis)
    )


def test_values_from_a_function(strategy) -> None:
    def value_fn(context: Any) -> Any:
        assert context.num_replicas_in_sync == 4
        i = context.replica_id_in_sync_group
        assert isinstance(i, int)
        return {"id": i, "row": np.full(2, 10 * i, "float32")}

    made = strategy.experimental_distribute_values_from_function(value_fn)
    assert made["id"].values == (0, 1, 2, 3)
    assert [v.devices() for v in made["row"].values] == [{d} for d in jax.devices()[:4]]
    doubled = strategy.run(lambda v: v["row"] * 2 + v["id"], (made,))
    np.testing.assert_array_equal(
        np.asarray(doubled), [[21.0 * i] * 2 for i in range(4)]
    )


def test_repr_and_counts(strategy) -> None:
    assert repr(strategy) == "MirroredStrategy(cpu:0, cpu:1, cpu:2, cpu:3)"
    assert strategy.num_replicas_in_sync == 4


def test_a_strategy_of_one_process_has_no_resolver(strategy) -> None:
    assert strategy.cluster_resolver is None
    assert rx.get_strategy().cluster_resolver is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_strategy_is_not_copied(strategy, copied) -> None:
    with pytest.raises(TypeError, match=r"^MirroredStrategy.*cannot be copied.*Make a"):
        copied({"strategy": strategy}["strategy"])


def test_values_of_all_replicas_are_no_result_of_one(strategy, values) -> None:
    value = rx.PerReplica(np.ones(strategy.num_replicas_in_sync))
    with pytest.raises(TypeError, match=r"returned PerReplica.*args=\(value,\)"):
        strategy.run(lambda: {"x": value})


def test_numpy_dataset_is_distributed(strategy) -> None:
    x = np.arange(16, dtype="float32")
    examples = strategy.experimental_make_numpy_dataset((x, -x))
    dataset = strategy.experimental_distribute_dataset(examples.batch(8))
    sums = [
        float(strategy.reduce("sum", strategy.run(lambda x, y: (x - y).sum(), batch)))
        for batch in dataset
    ]
    assert sums == [2 * x[:8].sum(), 2 * x[8:].sum()]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_calls_of_every_kind(strategy) -> None:
    """Positional, keyword, default and variadic arguments."""

    def fn(a: Any, b: Any = 2.0, *rest: Any, c: Any, **options: Any) -> Any:
        return a + 10 * b + 100 * sum(rest) + 1000 * c + 10000 * options["d"]

    for args, kwargs, want in [
        ((1.0,), {"c": 1.0, "d": 1.0}, 11021.0),
        ((1.0, 1.0, 1.0, 1.0), {"c": 1.0, "d": 1.0}, 11211.0),
        ([1.0], {"b": 3.0, "c": 1.0, "d": 0.0}, 1031.0),
    ]:
        assert strategy.run(fn, args, kwargs) == want
    with pytest.raises(
        TypeError, match="missing 1 required keyword-only argument: 'c'"
    ):
        strategy.run(fn, (1.0,))


def test_args_must_be_a_sequence(strategy) -> None:
    with pytest.raises(
        TypeError, match=r"run: args must be a tuple or list; got a float"
    ):
        strategy.run(lambda x: x, 1.0)
    with pytest.raises(
        TypeError, match=r"run: args must be a tuple or list.*args=\(x,\)"
    ):
        strategy.run(lambda x: x, np.ones(3))
    with pytest.raises(
        TypeError, match=r"run: args must be a tuple or list; got a PerReplica"
    ):
        strategy.run(lambda x: x, rx.PerReplica(np.ones(4)))
    with pytest.raises(TypeError, match=r"run: fn must be callable; got 3"):
        strategy.run(3)


def test_tools_for_tf_distribute_ask_about_the_worker(strategy) -> None:
    """KerasTuner reads `_in_multi_worker_mode` and `should_checkpoint`."""
    extended = strategy.extended
    assert not extended._in_multi_worker_mode()
    assert extended.should_checkpoint
    assert extended.should_save_summary


# Older spellings of `tf.distribute`.


def test_old_method_names_call_todays() -> None:
    strategy: Any = mirrored(2)
    result = strategy.experimental_run_v2(lambda x, y: x + y, (1.0,), {"y": 2.0})
    assert float(result) == 3.0
    rows = strategy.make_experimental_numpy_dataset(np.arange(3))
    assert list(rows) == [0, 1, 2]


def test_old_names_reach_what_a_subclass_overrides() -> None:
    class Counting(type(mirrored(1))):
        num_runs = 0

        def run(self, *args: Any, **kwargs: Any) -> Any:
            self.num_runs += 1
            return super().run(*args, **kwargs)

    strategy: Any = Counting(["cpu:0"])
    strategy.experimental_run_v2(lambda: 1.0)
    assert strategy.num_runs == 1
