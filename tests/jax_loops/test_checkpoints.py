"""Checkpoints of NNX objects and pytrees, between strategies; and plain Orbax."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import replicax as rx
import replicax.testing
from replicax.engine.composites import is_key

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(8, 64)).astype("float32")
Y = _RNG.normal(size=(8, 256)).astype("float32")

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(2)]),
    "fully sharded": lambda: rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]),
}
CHANGES = [(a, b) for a in STRATEGIES for b in STRATEGIES if a != b]


class Net(nnx.Module):
    """A module with statistics, a random key, a shared weight and an array."""

    def __init__(self, seed: int, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(64, 256, rngs=rngs)])
        self.shared = self.layers[0].kernel
        self.seen = nnx.BatchStat(jnp.zeros(64))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.offset = nnx.data(jnp.full(2, seed, "float32"))
        self.parent = self  # A cycle.

    def __call__(self, x: Any) -> Any:
        offset = self.offset.sum() + self.seen.mean()
        self.seen[...] += x.mean(0)
        x = self.layers[0](x) + 0.1 * x @ self.shared
        return self.dropout(x) + offset


def train_step(model: Any, optimizer: Any, mean: Any, batch: Any) -> Any:
    def loss_of(model: Any) -> Any:
        x, y = batch
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    loss, grads = rx.get_replica_context().all_reduce("mean", (loss, grads))
    optimizer.update(model, grads)
    mean.update(values=loss)
    return loss


class Training:
    """A model with all that its training needs."""

    def __init__(self, seed: int, strategy: rx.Strategy, rate: float = 0.0) -> None:
        self.model = Net(seed, rate)
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.mean = nnx.metrics.Average()
        self.strategy = strategy
        self.checkpoint = rx.Checkpoint(
            model=self.model, optimizer=self.optimizer, mean=self.mean, step=0
        )

    def train(self, num_steps: int) -> list[float]:
        data = (np.tile(X, (num_steps, 1)), np.tile(Y, (num_steps, 1)))
        batches = self.strategy.experimental_distribute_dataset(data, batch_size=8)
        losses = []
        for batch in batches:
            arguments = (self.model, self.optimizer, self.mean, batch)
            losses.append(float(self.strategy.run(train_step, args=arguments)))
            self.checkpoint.step += 1
        return losses

    def arrays(self) -> list[Any]:
        return jax.tree.leaves(nnx.state((self.model, self.optimizer, self.mean)))


def is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def numbers(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def assert_equal(a: Any, b: Any) -> None:
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("has_run", [False, True])
def test_nnx_objects_are_restored_in_place(
    tmp_path: Path, before: str, after: str, has_run: bool
) -> None:
    first = Training(0, STRATEGIES[before]())
    first.train(2)
    path = first.checkpoint.write(tmp_path / "c")
    saved = numbers(first.arrays())
    expected = first.train(2)

    other = Training(1, STRATEGIES[after]())
    if has_run:
        other.train(1)
    variables = jax.tree.leaves(nnx.state(other.model), is_leaf=is_variable)
    layouts = [x.sharding for x in other.arrays()]
    other.checkpoint.restore(path).assert_consumed()
    assert_equal(other.arrays(), saved)
    assert [x.sharding for x in other.arrays()] == layouts
    assert any(not x.is_fully_replicated for x in layouts) == (
        has_run and after == "fully sharded"
    )
    assert other.checkpoint.model is other.model
    now = jax.tree.leaves(nnx.state(other.model), is_leaf=is_variable)
    pairs = zip(variables, now, strict=True)
    assert sum(a is b for a, b in pairs) == 5  # All but the offset.
    assert other.model.shared is other.model.layers[0].kernel
    assert other.model.offset.tolist() == [0, 0]
    assert other.checkpoint.step == 2
    np.testing.assert_allclose(other.train(2), expected, rtol=2e-4)


class Block(NamedTuple):
    """As modules of Equinox: arrays, and leaves that are no arrays."""

    kernel: Any
    activation: Callable[..., Any]
    kind: str
    rate: float


def block(seed: int) -> Block:
    kernel = jax.random.normal(jax.random.key(seed), (64, 256))
    return Block(kernel, jax.nn.relu, "dense", 0.5 - seed)


def linen_state(seed: int) -> TrainState:
    dense = linen.Dense(256)
    params = dense.init(jax.random.key(seed), X)
    return TrainState.create(apply_fn=dense.apply, params=params, tx=optax.adam(0.1))


@jax.jit
def linen_step(state: TrainState) -> TrainState:
    def loss_of(params: Any) -> Any:
        return jnp.mean((state.apply_fn(params, X) - Y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_of)(state.params))


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_trees_are_restored_in_the_layout_of_the_target(
    tmp_path: Path, before: str, after: str
) -> None:
    def made(strategy: rx.Strategy, seed: int) -> rx.Checkpoint:
        state = strategy.init(lambda: nnx.to_pure_dict(nnx.state(Net(seed))))
        return rx.Checkpoint(
            state=strategy.shard(linen_state(seed)),
            block=strategy.shard(block(seed)),
            pure=state,
        )

    first, other = made(STRATEGIES[before](), 0), made(STRATEGIES[after](), 1)
    first.state = linen_step(first.state)  # Its step is an array now.
    path = first.write(tmp_path / "c")
    targets = (other.state, other.block.kernel, other.pure)
    other.restore(path).assert_consumed()
    restored = (other.state, other.block.kernel, other.pure)
    assert_equal(restored, (first.state, first.block.kernel, first.pure))
    arrays = [x for x in jax.tree.leaves(targets) if isinstance(x, jax.Array)]
    now = [x for x in jax.tree.leaves(restored) if isinstance(x, jax.Array)]
    assert [x.sharding for x in now] == [x.sharding for x in arrays]
    divided = any(not x.is_fully_replicated for x in now)
    assert divided == (after == "fully sharded")
    assert other.state.step == 1
    assert other.state.apply_fn is targets[0].apply_fn
    assert other.block[1:] == (jax.nn.relu, "dense", 0.5)
    assert_equal(linen_step(other.state).params, linen_step(first.state).params)


def test_shapes_are_restored_as_arrays(tmp_path: Path) -> None:
    strategy = STRATEGIES["fully sharded"]()

    def init(seed: int) -> Any:
        pure = nnx.to_pure_dict(nnx.state(Net(seed, rate=0.5)))
        return {"pure": pure, "state": nnx.state(Net(seed)), "key": jax.random.key(1)}

    saved = strategy.init(init, 0)
    path = rx.Checkpoint(tree=saved).write(tmp_path / "c")
    shapes = jax.eval_shape(functools.partial(init, 1))
    other = rx.Checkpoint(tree=strategy.shard(shapes))
    with pytest.raises(rx.CheckpointError, match=r"tree/.* a jax\.ShapeDtypeStruct"):
        other.write(tmp_path / "d")
    other.restore(path).assert_consumed()
    assert_equal(other.tree, saved)
    arrays, expected = jax.tree.leaves(other.tree), jax.tree.leaves(saved)
    assert [x.sharding for x in arrays] == [x.sharding for x in expected]
    assert not all(x.is_fully_replicated for x in arrays)
    on_one = rx.Checkpoint(tree=jax.eval_shape(functools.partial(init, 1)))
    on_one.restore(path).assert_consumed()
    assert_equal(on_one.tree, saved)


def test_the_state_of_a_module_is_its_checkpoint_too(tmp_path: Path) -> None:
    path = rx.Checkpoint(model=nnx.state(Net(0))).write(tmp_path / "c")
    model, other = Net(1), Net(2)
    with pytest.raises(rx.CheckpointError, match=r"no object: .*model/offset"):
        rx.Checkpoint(model=nnx.state(model, nnx.Param)).restore(path).assert_consumed()
    assert_equal(model.shared[...], Net(0).shared[...])
    assert_equal(model.offset, Net(1).offset)
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    assert_equal(nnx.state(other), nnx.state(Net(0)))


def test_other_structures_are_refused_with_the_path(tmp_path: Path) -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    tree = {"a": np.ones(2), "b": [np.ones(3)]}
    path = rx.Checkpoint(model=model, tree=tree).write(tmp_path / "c")
    wide = nnx.Sequential(nnx.Linear(2, 4, rngs=nnx.Rngs(1)))
    long = nnx.Sequential(*(nnx.Linear(2, 3, rngs=nnx.Rngs(1)) for _ in range(2)))
    for target, message in (
        ({"model": wide}, r"model/layers/0/kernel: float32\[2, 3\] saved"),
        ({"model": long}, "not in the checkpoint: model/layers/1/bias"),
        ({"tree": {"a": np.zeros(2), "c": 1}}, "not in the checkpoint: tree/c; .*b/0"),
        ({"tree": {"a": np.zeros(2), "b": {"0": "x"}}}, "tree/b/0: .* a plain value"),
    ):
        checkpoint = rx.Checkpoint(**target)
        before = numbers(nnx.state((wide, long)))
        with pytest.raises(rx.CheckpointError, match=message):
            checkpoint.restore(path)
        assert_equal(nnx.state((wide, long)), before)
    part = rx.Checkpoint(tree={"a": np.zeros(2)})
    part.restore(path).expect_partial()
    assert part.tree["a"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="fn is a PjitFunction, which cannot be saved"):
        rx.Checkpoint(fn=linen_step)


def test_a_manager_resumes_nnx_objects_and_their_random_numbers(tmp_path: Path) -> None:
    first = Training(0, STRATEGIES["mirrored"](), rate=0.5)
    with rx.CheckpointManager(first.checkpoint, tmp_path / "run") as manager:
        first.train(2)
        manager.save()
        expected = first.train(1)  # While the save is written.
    other = Training(1, STRATEGIES["mirrored"](), rate=0.5)
    manager = rx.CheckpointManager(other.checkpoint, tmp_path / "run")
    assert manager.restore_or_initialize()
    assert other.train(1) == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_orbax_saves_what_replicax_returns(tmp_path: Path, name: str) -> None:
    strategy = STRATEGIES[name]()
    training = Training(0, strategy)
    training.train(1)
    result = strategy.run(lambda x: {"w": 2 * x}, args=(jnp.ones((64, 256)),))
    tree = {
        "result": result,
        "state": nnx.to_pure_dict(nnx.state(training.model, nnx.Param)),
        "made": strategy.init(lambda: jax.random.normal(jax.random.key(0), (64, 256))),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "c", jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        )
    assert_equal(restored, tree)
    shardings = functools.partial(jax.tree.map, lambda x: x.sharding)
    assert shardings(restored) == shardings(tree)


def on_two_workers(folder: str) -> tuple[list[float], list[float]]:
    strategy = rx.FullyShardedStrategy(timeouts=rx.Timeouts(startup=90))
    training, other = Training(0, strategy), Training(1, strategy)
    tree = rx.Checkpoint(block=strategy.shard(block(0)))
    path = tree.write(f"{folder}/tree")
    with rx.CheckpointManager(training.checkpoint, folder) as manager:
        training.train(2)
        manager.save()
        expected = training.train(1)
    other.train(1)
    assert rx.CheckpointManager(other.checkpoint, folder).restore_or_initialize()
    tree.block = strategy.shard(block(1))
    tree.restore(path).assert_consumed()
    kernel = tree.block.kernel
    assert kernel.sharding == strategy.shard(block(1)).kernel.sharding
    for shard in kernel.addressable_shards:
        assert shard.data.size == kernel.size / 4
        np.testing.assert_array_equal(shard.data, block(0).kernel[shard.index])
    return expected, other.train(1)


@pytest.mark.multiprocess
def test_two_workers_restore_their_shards_and_one_restores_theirs(
    tmp_path: Path,
) -> None:
    results = replicax.testing.run(
        on_two_workers,
        args=(str(tmp_path),),
        num_workers=2,
        logical_devices=2,
        deadline_seconds=120,
    )
    alone = Training(1, STRATEGIES["mirrored"]())
    manager = rx.CheckpointManager(alone.checkpoint, tmp_path)
    assert manager.restore_or_initialize()
    losses = alone.train(1)
    for expected, resumed in results.returned.values():
        np.testing.assert_allclose(resumed, expected, rtol=1e-6)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
