"""What a replica sees of the others: the replica context and its collectives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import mirrored, values_of

import replicax as rx


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(4)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, 3, 2)).astype("float32")


def test_replica_ids_and_counts(strategy) -> None:
    def fn() -> Any:
        context = rx.get_replica_context()
        assert context.strategy is strategy is rx.get_strategy()
        assert context.num_replicas_in_sync == 4
        return context.replica_id_in_sync_group

    ids = strategy.run(fn)
    assert ids.values == (0, 1, 2, 3)
    assert ids.array.dtype == "int32"


@pytest.mark.parametrize("op", ["SUM", "mean", rx.ReduceOp.SUM, rx.ReduceOp.MEAN])
def test_all_reduce_equals_numpy(strategy, values, op) -> None:
    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(op, {"a": x, "b": [x[0, 0], 2.0]})

    out = strategy.run(fn, (rx.PerReplica(values),))
    combine = np.sum if str(op).upper() == "SUM" else np.mean
    for i in range(4):
        np.testing.assert_allclose(
            values_of(out["a"])[i], combine(values, axis=0), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            values_of(out["b"][0])[i], combine(values[:, 0, 0]), rtol=1e-5
        )
        assert values_of(out["b"][1])[i] == combine([2.0] * 4)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_equals_numpy(strategy, values, axis) -> None:
    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_gather([x], axis)

    (out,) = strategy.run(fn, (rx.PerReplica(values),))
    for i in range(4):
        np.testing.assert_array_equal(values_of(out)[i], np.concatenate(values, axis))


@pytest.mark.parametrize(("axis", "rank"), [(1, 1), (-2, 1), (0, 0), (0.5, 1)])
def test_all_gather_along_an_unknown_dimension_is_refused(
    strategy, values, axis, rank
) -> None:
    x = values[:, :, 0] if rank else values[:, 0, 0]
    with pytest.raises(ValueError, match=rf"all_gather: axis={axis}.*rank {rank}"):
        strategy.run(
            lambda x: rx.get_replica_context().all_gather(x, axis), (rx.PerReplica(x),)
        )


def test_reduction_of_integers_and_booleans(strategy) -> None:
    def fn(i: Any) -> Any:
        context = rx.get_replica_context()
        return context.all_reduce("sum", i), context.all_reduce("mean", i)

    total, mean = strategy.run(fn, (rx.PerReplica(np.arange(4, dtype="int32")),))
    assert total == 6
    assert total.dtype == "int32"
    assert mean == 1.5
    total, mean = strategy.run(
        fn, (rx.PerReplica(np.array([True, True, False, True])),)
    )
    assert total == 3
    assert mean == 0.75


@settings(max_examples=15)
@given(
    num_replicas=st.integers(1, 8),
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    op=st.sampled_from(["SUM", "MEAN"]),
)
def test_all_reduce_of_any_shape(num_replicas, shape, op) -> None:
    x = np.random.default_rng(1).normal(size=(num_replicas, *shape)).astype("float32")

    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(op, x)

    out = mirrored(num_replicas).run(fn, (rx.PerReplica(x),))
    want = x.sum(0) if op == "SUM" else x.mean(0)
    assert out.shape == x.shape[1:]
    assert len(out.addressable_shards) == num_replicas
    for shard in out.addressable_shards:
        np.testing.assert_allclose(shard.data, want, rtol=1e-5, atol=1e-5)


def test_gradient_through_all_reduce_is_that_of_this_replicas_part(strategy) -> None:
    """Each replica asks what its own input does to the sum of all losses."""

    def fn(x: Any) -> Any:
        def loss(x: Any) -> Any:
            return rx.get_replica_context().all_reduce("sum", x * x)

        return jax.grad(loss)(x)

    x = np.float32([1.0, 2.0, 3.0, 4.0])
    # Every replica's loss holds every replica's x: 4 losses with slope 2x each.
    np.testing.assert_allclose(
        np.asarray(strategy.run(fn, (rx.PerReplica(x),))), 4 * 2 * x
    )


def test_merge_call_sees_all_replicas_once(strategy, values) -> None:
    seen = []

    def merge(strategy: Any, x: Any, scale: Any, *, names: Any) -> Any:
        assert not rx.get_replica_context()
        assert rx.in_cross_replica_context()
        assert isinstance(x, rx.PerReplica)
        seen.append(x.array.shape)
        total = strategy.reduce("sum", {"x": x, "n": names["n"]})
        return (
            total,
            rx.PerReplica(x.array * 10),
            strategy.gather(x, axis=0),
            None,
            scale,
        )

    def fn(x: Any) -> Any:
        context = rx.get_replica_context()
        out = context.merge_call(merge, (x, 2.0), {"names": {"n": x[0, 0]}})
        assert rx.get_replica_context() is context
        return out

    total, tenfold, gathered, nothing, scale = strategy.run(
        fn, (rx.PerReplica(values),)
    )
    assert nothing is None
    assert set(seen) == {(4, 3, 2)}
    np.testing.assert_array_equal(np.asarray(tenfold), values * 10)
    np.testing.assert_array_equal(np.asarray(scale), [2.0] * 4)
    for i in range(4):
        np.testing.assert_allclose(values_of(total["x"])[i], values.sum(0), rtol=1e-5)
        np.testing.assert_allclose(
            values_of(total["n"])[i], values[:, 0, 0].sum(), rtol=1e-5
        )
        np.testing.assert_array_equal(values_of(gathered)[i], np.concatenate(values))


@pytest.mark.parametrize("op", ["max", None, 1])
def test_unknown_operation_is_refused(strategy, op) -> None:
    with pytest.raises(
        ValueError, match=rf"all_reduce: unknown reduce operation {op!r}"
    ):
        strategy.run(lambda: rx.get_replica_context().all_reduce(op, 1.0))


def test_run_is_not_called_in_a_merge_call(strategy, values) -> None:
    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        return context.merge_call(lambda strategy, x: strategy.run(lambda: x), (x,))

    with pytest.raises(rx.ContextError, match=r"Strategy\.run.*merge_call.* call fn"):
        strategy.run(step, (rx.PerReplica(values),))


def test_use_outside_a_replica_function_is_refused(strategy) -> None:
    for name in ("all_reduce", "all_gather", "merge_call", "replica_id_in_sync_group"):
        message = rf"get_replica_context\(\)\.{name}: used outside.*strategy\.run"
        with pytest.raises(rx.ContextError, match=message):
            getattr(rx.get_replica_context(), name)
        with strategy.scope(), pytest.raises(rx.ContextError, match=message):
            getattr(rx.get_replica_context(), name)


def test_use_of_a_kept_context_is_refused(strategy) -> None:
    kept = []

    def fn() -> Any:
        kept.append(rx.get_replica_context())
        return 0.0

    strategy.run(fn)
    stale = kept[0]
    uses = {
        "all_reduce": lambda: stale.all_reduce("sum", 1.0),
        "all_gather": lambda: stale.all_gather(np.ones(1), 0),
        "merge_call": lambda: stale.merge_call(lambda strategy: None),
        "replica_id_in_sync_group": lambda: stale.replica_id_in_sync_group,
    }
    for name, use in uses.items():
        message = rf"ReplicaContext\.{name}: called outside the replica function"
        with pytest.raises(rx.ContextError, match=message):
            use()
        with strategy.scope(), pytest.raises(rx.ContextError, match=message):
            use()
        with pytest.raises(rx.ContextError, match=message):
            strategy.run(use)


def test_no_context_is_false_and_shows_its_protocols() -> None:
    nothing = rx.get_replica_context()
    assert not nothing
    assert not hasattr(nothing, "__len__")
    assert repr(nothing)


def test_collectives_inside_scan_and_cond(strategy) -> None:
    def fn(x: Any) -> Any:
        context = rx.get_replica_context()

        def body(carry: Any, _: Any) -> Any:
            return context.all_reduce("mean", carry + x), None

        carry, _ = jax.lax.scan(body, jnp.zeros(()), length=3)
        return carry

    x = np.float32([1.0, 2.0, 3.0, 6.0])
    assert values_of(strategy.run(fn, (rx.PerReplica(x),))) == (9.0,) * 4
