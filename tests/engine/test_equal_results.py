"""Results of `run`: arrays if they are equal on all replicas, else `PerReplica`s."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "one": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: mirrored(4),
    "virtual": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"], replicas_per_device=2),
    "virtual on one": lambda: rx.MirroredStrategy(["cpu:0"], replicas_per_device=4),
    "shard_update": lambda: rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], shard_update=True
    ),
    "fully sharded": lambda: rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "model parallel": lambda: rx.ModelParallelStrategy(
        rx.layout_maps.DENSE, model_parallel=2, devices=[f"cpu:{i}" for i in range(8)]
    ),
    "central storage": lambda: rx.CentralStorageStrategy(
        [f"cpu:{i}" for i in range(4)], "cpu:0"
    ),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return request.param()


def per_replica(strategy: rx.Strategy, rows: int = 2) -> rx.PerReplica:
    num = strategy.num_replicas_in_sync
    return rx.PerReplica(np.arange(num * rows, dtype="float32").reshape(num, rows))


def assert_equal_everywhere(x: Any, expected: Any) -> None:
    assert isinstance(x, jax.Array)
    for shard in x.addressable_shards:
        np.testing.assert_allclose(shard.data, expected, rtol=1e-6)


def test_what_is_equal_is_an_array(strategy) -> None:
    with strategy.scope():
        v = keras.Variable(np.float32([1.0, 2.0]))
    num = strategy.num_replicas_in_sync

    def step(w: Any, x: Any) -> dict[str, Any]:
        context = rx.get_replica_context()
        return {
            "argument": w * 2,
            "variable": v.value + 1,
            "constant": 3,
            "mean": context.all_reduce("mean", x),
            "gathered": context.all_gather(x, axis=0),
            "branch": jax.lax.cond(w.sum() > 0, lambda: w, lambda: -w),
            "scan": jax.lax.scan(lambda c, _: (c + w, None), w, length=3)[0],
            "own": x + w,
            "id": context.replica_id_in_sync_group,
            "own branch": jax.lax.cond(x.sum() > 3, lambda: w, lambda: -w),
        }

    x = per_replica(strategy)
    rows = np.asarray(x.array)
    out = strategy.run(step, (np.float32([1, 1]), x))
    assert_equal_everywhere(out["argument"], [2, 2])
    assert_equal_everywhere(out["variable"], [2, 3])
    assert_equal_everywhere(out["constant"], 3)
    assert_equal_everywhere(out["mean"], rows.mean(0))
    assert_equal_everywhere(out["gathered"], rows.reshape(-1))
    assert_equal_everywhere(out["branch"], [1, 1])
    assert_equal_everywhere(out["scan"], [4, 4])
    for name in ("own", "id", "own branch"):
        assert isinstance(out[name], rx.PerReplica if num > 1 else jax.Array)
        assert len(strategy.experimental_local_results(out[name])) == num


def test_collectives_of_jax_use_the_names_of_the_replicas_axes(strategy) -> None:
    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        names = context.axis_names
        gradient = jax.grad(lambda x: (x * jax.lax.pmean(x, names)).sum())(x)
        norm = flax.linen.BatchNorm(use_running_average=False, axis_name=names)
        state = norm.init(jax.random.key(0), x[:, None])
        normed, state = norm.apply(state, x[:, None], mutable=["batch_stats"])
        return jax.lax.psum(x, names), gradient, normed[:, 0], state["batch_stats"]

    x = per_replica(strategy, 4)
    rows = np.asarray(x.array)
    total, gradient, normed, stats = strategy.run(step, (x,))
    assert_equal_everywhere(total, rows.sum(0))
    mean, std = rows.mean(), np.sqrt(rows.var() + 1e-5)
    assert_equal_everywhere(stats["mean"], [0.01 * mean])
    assert_equal_everywhere(gradient, 2 * rows.mean(0))
    local = np.stack(strategy.experimental_local_results(normed))
    np.testing.assert_allclose(local, (rows - mean) / std, rtol=1e-5, atol=1e-5)


def test_axis_names_are_refused_where_replicas_hold_copies() -> None:
    strategy = mirrored(4)
    data = strategy.experimental_distribute_dataset(np.ones(6, "float32"), batch_size=6)
    with pytest.raises(ValueError, match=r"axis_names: 3 of 4 replicas.*all_reduce"):
        strategy.run(lambda x: rx.get_replica_context().axis_names and x, tuple(data))


def test_sums_and_gathers_count_each_replica_with_examples(strategy) -> None:
    def step(batch: Any) -> tuple[Any, Any, Any]:
        total = rx.get_replica_context().all_reduce("sum", batch.sum())
        return batch.shape[0], jnp.ones(2), total

    data = np.arange(10, dtype="float32")
    seen = batches = 0
    for batch in strategy.experimental_distribute_dataset(data, batch_size=4):
        size, ones, total = strategy.run(step, (batch,))
        seen += int(strategy.reduce("sum", size))
        local = strategy.experimental_local_results(total)
        assert len(local) == int(strategy.reduce("sum", ones)[0])
        assert strategy.gather(ones, axis=0).shape == (2 * len(local),)
        np.testing.assert_allclose(strategy.reduce("mean", total), total)
        batches += float(total)
    assert (seen, batches) == (10, data.sum())


def test_a_sum_of_an_array_that_no_run_returned_is_refused() -> None:
    strategy = mirrored(2)
    for value in (3.0, np.ones(2), jnp.ones(2)):
        with pytest.raises(ValueError, match="is no result of run"):
            strategy.reduce("sum", value)


def test_a_returned_state_needs_neither_a_copy_nor_another_program(strategy) -> None:
    def step(state: Any, x: Any) -> Any:
        grads = rx.get_replica_context().all_reduce("mean", x - state["w"])
        return {"w": state["w"] + 0.5 * grads, "step": state["step"] + 1}

    state, x = {"w": np.zeros(2, "float32"), "step": np.int32(0)}, per_replica(strategy)
    for _ in range(3):
        state = strategy.run(step, (state, x))
    assert len(strategy.runner.programs) == 1
    assert_equal_everywhere(state["step"], 3)
    assert_equal_everywhere(state["w"], np.asarray(x.array).mean(0) * 0.875)
    place = strategy.runner._place
    assert place(state["w"], rx.engine.arguments.Kind.MIRRORED) is state["w"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    weight: Any
    activation: Callable[..., Any] = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.weight, rx.PerReplica):
            raise TypeError("the weight must be an array")


def test_classes_that_check_their_fields_and_leaves_that_are_no_arrays() -> None:
    strategy, marker = mirrored(2), object()

    def step(layer: Checked, extra: Any) -> Any:
        return Checked(layer.weight * 2, layer.activation), extra

    layer = Checked(np.ones(3, "float32"), jax.nn.relu)
    extra = (np.tanh, "name", marker, None, {"d": np.dtype("float32")})
    for _ in range(2):
        layer, extra = strategy.run(step, (layer, extra))
    assert extra == (np.tanh, "name", marker, None, {"d": np.dtype("float32")})
    assert_equal_everywhere(layer.weight, np.full(3, 4.0))
