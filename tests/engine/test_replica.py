"""The replica context and its collectives."""

import re
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


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int16", "int32", "bfloat16", "complex64"]
)
def test_reductions_have_the_dtypes_of_jax(strategy, dtype, op) -> None:
    """Small integers do not overflow, inside a replica as outside."""
    x = jnp.asarray([100, 127, 3, 90]).astype(dtype)
    want = (jnp.sum if op == "sum" else jnp.mean)(x)

    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(op, x), x

    inside, own = strategy.run(fn, (rx.PerReplica(x),))
    outside = strategy.reduce(op, own, axis=None)
    for actual in (inside, outside):
        assert actual.dtype == want.dtype
        np.testing.assert_allclose(
            np.asarray(actual, complex), complex(want), rtol=0.01
        )


@pytest.mark.parametrize(
    ("value", "what"),
    [(lambda: jax.random.key(0), r"key<fry>\[\]"), (lambda: "adam", "str 'adam'")],
    ids=["key", "string"],
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_has_no_sum_is_named(strategy, op, value, what) -> None:
    match = rf"reduce: got {what} at \['state'\]\['rng'\], .*no sum.*gather"
    tree = {"state": {"rng": value(), "w": 1.0}}
    with pytest.raises(TypeError, match=match):
        strategy.run(lambda: rx.get_replica_context().all_reduce(op, tree))
    with pytest.raises(TypeError, match=match):
        strategy.reduce(op, strategy.run(lambda: tree))


GRADIENTS = {"kernel": np.float32([[0.3001] * 8] * 8), "bias": np.float32([0.1] * 8)}


def lowered_sum(strategy: rx.Strategy, options: Any) -> tuple[dict[str, Any], Any]:
    """The sum of each replica's `GRADIENTS` times its number, and the lowered step."""
    steps: list[Any] = []
    original = strategy.runner.call

    def call(program: Any, arrays: Any) -> Any:
        steps.append(program.lower([], arrays))
        return original(program, arrays)

    def fn(tree: Any) -> Any:
        context = rx.get_replica_context()
        number = 1.0 + context.replica_id_in_sync_group
        own = jax.tree.map(lambda x: x * number, tree)
        return context.all_reduce("sum", own, options)

    strategy.runner.call = call
    return strategy.run(fn, (GRADIENTS,)), steps[0]


def test_buckets_of_the_strategy_are_those_of_all_reduce(values) -> None:
    own = rx.CommunicationOptions(
        bytes_per_pack=64, compression="bfloat16", gradient_hook=lambda grads: 1 / 0
    )
    devices = [f"cpu:{i}" for i in range(4)]
    plain, step = lowered_sum(rx.MirroredStrategy(devices), None)
    packed, packed_step = lowered_sum(
        rx.MirroredStrategy(devices, communication_options=own), None
    )
    # XLA may merge the sums of the first program; those of the second wait.
    assert "optimization_barrier" not in step.as_text()
    assert "optimization_barrier" in packed_step.as_text()
    for name, x in GRADIENTS.items():
        np.testing.assert_allclose(plain[name], 10 * x, rtol=1e-6)
        np.testing.assert_array_equal(packed[name], plain[name])


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize(
    ("compression", "dtype", "sent"),
    [("bfloat16", "bf16", "f32"), ("float16", "f16", "f16")],
)
def test_options_of_a_call(virtual, compression, dtype, sent) -> None:
    """On CPUs XLA sends float32 for bfloat16: if not, float16 is needless."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], replicas_per_device=virtual)
    seen: list[Any] = []

    def hook(grads: Any) -> Any:
        seen.extend(x.dtype for x in grads)
        return [2 * x for x in grads]

    options = rx.CommunicationOptions(compression=compression, gradient_hook=hook)
    sums, step = lowered_sum(strategy, options)
    assert f"x{dtype}>" in step.as_text()
    all_reduces = re.findall(r"= (\w+\[\d+\])\S* all-reduce", step.compile().as_text())
    assert f"{sent}[72]" in all_reduces  # All elements, in one message.
    assert set(seen) == {jnp.dtype("float32")}
    total = sum(range(1, 2 * virtual + 1))
    for name, x in GRADIENTS.items():
        assert sums[name].dtype == "float32"
        np.testing.assert_allclose(sums[name], 2 * total * x, rtol=0.02)
    kernel = GRADIENTS["kernel"]
    assert not np.allclose(sums["kernel"], 2 * total * kernel, rtol=1e-4)  # Rounded.


def test_gradients_through_buckets(strategy, values) -> None:
    options = rx.CommunicationOptions(bytes_per_pack=16)

    def fn(x: Any) -> Any:
        def loss(x: Any, options: Any) -> Any:
            total = rx.get_replica_context().all_reduce("sum", [x, x * x], options)
            return (total[0] * total[1]).sum()

        return jax.grad(loss)(x, None), jax.grad(loss)(x, options)

    plain, packed = strategy.run(fn, (rx.PerReplica(values),))
    np.testing.assert_allclose(np.asarray(packed), np.asarray(plain), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"compression": "bfloat16"}, TypeError, "must be an rx.CommunicationOptions"),
        (
            rx.CommunicationOptions(timeout_seconds=3),
            ValueError,
            "timeout_seconds=3, .*Give it to the strategy",
        ),
        (
            rx.CommunicationOptions(implementation=rx.CollectiveCommunication.RING),
            ValueError,
            "implementation=.*RING.*Give it to the strategy",
        ),
    ],
)
def test_options_that_a_call_does_not_have(strategy, options, error, match) -> None:
    with pytest.raises(error, match=f"ReplicaContext.all_reduce: options .*{match}"):
        strategy.run(lambda: rx.get_replica_context().all_reduce("sum", 1, options))


def test_buckets_of_sharded_values_are_refused() -> None:
    strategy = rx.ModelParallelStrategy(devices=[f"cpu:{i}" for i in range(4)])
    options = rx.CommunicationOptions(bytes_per_pack=2**20)
    with pytest.raises(ValueError, match=r"bytes_per_pack=1048576, .*cpu:0\+cpu:1"):
        strategy.run(lambda: rx.get_replica_context().all_reduce("sum", 1, options))


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


def test_gradient_through_all_reduce_is_that_of_the_sum_of_all_losses(strategy) -> None:
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


def test_the_missing_context_is_false() -> None:
    nothing = rx.get_replica_context()
    assert not nothing
    assert not hasattr(nothing, "__len__")
    assert repr(nothing)
