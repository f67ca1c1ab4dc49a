"""Training with the user's own `jax.jit`: as on one device, with sharded arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from tests.jax_loops.fsdp import (
    WEIGHT_BYTES,
    compiled,
    data,
    loss_of,
    make_params,
    optimizer,
    step,
)

import replicax as rx
import replicax.testing
from replicax.planning import compiler

WIDTH, NUM_ROWS, BATCH_SIZE = 64, 46, 24
small_params = functools.partial(make_params, width=WIDTH, depth=2)


def cpus(num: int) -> list[str]:
    return [f"cpu:{i}" for i in range(num)]


STRATEGIES: dict[str, Callable[[int], rx.Strategy]] = {
    "mirrored": lambda num: rx.MirroredStrategy(cpus(num)),
    "virtual replicas": lambda num: rx.MirroredStrategy(
        cpus(num), replicas_per_device=2
    ),
    "fully sharded": lambda num: rx.FullyShardedStrategy(cpus(num)),
    "model parallel": lambda num: rx.ModelParallelStrategy(
        {"kernel": (None, "model")}, min(num, 2), devices=cpus(num)
    ),
}


def trained(strategy: rx.Strategy) -> dict[str, Any]:
    """Losses and parameters of two epochs; 4 or 8 do not divide the last batch."""
    params = strategy.init(small_params, jax.random.key(0))
    state = (params, strategy.init(optimizer.init, params))
    layout = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(layout, None))
    dataset = strategy.experimental_distribute_dataset(
        data(NUM_ROWS, WIDTH), batch_size=BATCH_SIZE
    )
    losses = []
    for _ in range(2):
        for batch in dataset:
            state, loss = jitted(state, strategy.global_batch(batch))
            losses.append(loss)
    return {"losses": losses, "params": state[0], "adam": state[1]}


@functools.cache
def on_one_device() -> dict[str, Any]:
    """The same in plain JAX."""
    x, y = data(NUM_ROWS, WIDTH)
    params = small_params(jax.random.key(0))
    state, losses = (params, optimizer.init(params)), []
    for _ in range(2):
        for rows in (slice(BATCH_SIZE), slice(BATCH_SIZE, None)):
            state, loss = jax.jit(step)(state, (x[rows], y[rows]))
            losses.append(loss)
    return {"losses": losses, "params": state[0], "adam": state[1]}


def assert_equal(one: Any, other: Any) -> None:
    """Up to rounding: devices add up rows, and the products' terms, in other orders.

    Adam divides by the gradients' size, so that rounding is relative to the step.
    """
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-7), one, other
    )


@pytest.mark.slow(but=[f"{name}-{num}" for name in STRATEGIES for num in (2, 4)])
@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_one_device(name: str, num: int) -> None:
    assert_equal(trained(STRATEGIES[name](num)), on_one_device())


def test_a_padded_batch_with_its_mask() -> None:
    strategy = rx.FullyShardedStrategy(cpus(8))
    x, y = data(NUM_ROWS, WIDTH)
    params = strategy.init(small_params, jax.random.key(0))

    @jax.jit
    def masked_loss(params: Any, batch: Any) -> Any:
        (x, y), mask = strategy.global_batch(batch)
        losses = jax.vmap(loss_of, (None, 0, 0))(params, x, y)
        return (losses * mask).sum() / mask.sum()

    dataset = strategy.experimental_distribute_dataset(
        (x, y), batch_size=NUM_ROWS, remainder="pad"
    )
    (loss,) = (masked_loss(params, batch) for batch in dataset)
    wanted = loss_of(small_params(jax.random.key(0)), x, y)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def bytes_on_a_device(tree: Any) -> int:
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(x.nbytes for x in shards)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_each_device_has_its_share_of_parameters_and_adam(num: int) -> None:
    strategy = STRATEGIES["fully sharded"](num)
    params = strategy.init(make_params, jax.random.key(0))
    state = (params, strategy.init(optimizer.init, params))
    # Biases and the count are whole on each device.
    small = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim < 2)
    assert bytes_on_a_device(state) == 3 * WEIGHT_BYTES // num + small
    assert small < 0.01 * WEIGHT_BYTES
    whole = 3 * WEIGHT_BYTES + small
    assert bytes_on_a_device(rx.MirroredStrategy(cpus(2)).shard(state)) == whole


@pytest.mark.skipif(compiler.find_libtpu() is None, reason="libtpu is not here")
def test_the_program_is_that_of_shardings_by_hand() -> None:
    """`tests/cuda` has the same for GPUs."""
    program = compiled("v5e:2x4", by_hand=False)
    assert program == compiled("v5e:2x4", by_hand=True)
    state_bytes = 3 * WEIGHT_BYTES // 8
    assert state_bytes < program.updated_in_place < 1.2 * state_bytes


def error_of(error: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    return ""


def as_numpy(strategy: rx.Strategy, tree: Any) -> Any:
    """Whole arrays, gathered by a plain jit, as JAX's users do."""
    whole = jax.sharding.NamedSharding(strategy.mesh, jax.sharding.PartitionSpec())
    gathered = jax.jit(lambda x: x, out_shardings=whole)(tree)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), gathered)


def on_foreign_meshes(strategy: rx.Strategy) -> Any:
    """Global arrays of the user's own mesh, whose devices have another order."""
    value = np.arange(64 * 128, dtype="float32").reshape(64, 128)
    devices = np.array(jax.devices())
    placed = []
    for order in (devices, devices[::-1]):
        mesh = jax.sharding.Mesh(order, ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        theirs = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        placed.append(strategy.shard(theirs))
    return as_numpy(strategy, placed)


def joined_inside_jit(strategy: rx.Strategy) -> Any:
    """A batch that the devices do not divide, converted in a jitted function."""
    data = strategy.experimental_distribute_dataset(np.arange(22), batch_size=22)
    return [
        as_numpy(strategy, jax.jit(lambda x: 2 * strategy.global_batch(x))(batch))
        for batch in data
    ]


def on_workers() -> dict[str, Any]:
    results = {}
    strategies = {
        "mirrored": rx.MultiWorkerMirroredStrategy(),
        "fully sharded": rx.FullyShardedStrategy(),
    }
    for name, strategy in strategies.items():
        results[name] = as_numpy(strategy, trained(strategy))
        local = np.full((64, 64), 3, "float32")
        results[f"{name}, shard"] = as_numpy(strategy, strategy.shard(local))
        results[f"{name}, foreign"] = on_foreign_meshes(strategy)
    results["inside"] = joined_inside_jit(strategy)
    index, key = strategy.workers.index, jax.random.key(0)
    results["values"] = error_of(
        rx.ClusterMismatchError,
        lambda: strategy.shard({"w": np.full((64, 64), index), "b": np.zeros(3)}),
    )
    results["key"] = error_of(
        rx.ClusterMismatchError,
        lambda: strategy.init(jax.random.normal, jax.random.key(index), (64, 64)),
    )
    results["program"] = error_of(
        rx.ClusterMismatchError,
        lambda: strategy.init(lambda key: jax.random.normal(key, (9 + index,)), key),
    )
    return results


def test_two_workers() -> None:
    tasks = replicax.testing.run(
        on_workers, num_workers=2, logical_devices=2, deadline_seconds=120
    ).returned
    for results in tasks.values():
        for name in ("mirrored", "fully sharded"):
            assert_equal(results[name], on_one_device())
            assert (results[f"{name}, shard"] == 3).all()
            for value in results[f"{name}, foreign"]:
                np.testing.assert_array_equal(value.ravel(), np.arange(64 * 128))
        np.testing.assert_array_equal(results["inside"], [2 * np.arange(22)])
        assert "the arguments of Strategy.shard" in results["values"]
        assert " is 'w int32[64, 64] " in results["values"]
        assert "the arguments of Strategy.init" in results["key"]
        assert "differ in the program of init(" in results["program"]
