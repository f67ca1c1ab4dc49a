"""`rx.distributed`: each transformation trains as plain Optax on one device."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.conftest import mirrored
from tests.jax_loops.transformations import (
    ALL,
    FEW,
    GRADS,
    KERNEL,
    PARAMS,
    STRATEGIES,
    assert_equal,
    by_hand,
)

import replicax as rx
from replicax.engine.arguments import flatten_call
from replicax.jax_loops import optax as optax_module
from replicax.jax_loops.divided_state import DividedState


def trained(strategy: rx.Strategy, names: Any) -> dict[str, tuple[Any, Any]]:
    """Parameters and states after updates with each replica's gradients."""
    txs = {name: rx.distributed(ALL[name]()) for name in names}
    with strategy.scope():
        values = {name: (PARAMS, tx.init(PARAMS)) for name, tx in txs.items()}

    def step(values: Any, grads: Any) -> Any:
        new = {}
        for name, (params, state) in values.items():
            mean = jax.tree.map(lambda g: g.mean(0), grads)
            updates, state = txs[name].update(mean, state, params)
            new[name] = optax.apply_updates(params, updates), state
        return new

    for grads in GRADS:
        # The replicas divide the four gradients equally.
        parts = jax.tree.map(
            lambda g: rx.PerReplica(
                g.reshape(strategy.num_replicas_in_sync, -1, *g.shape[1:])
            ),
            grads,
        )
        values = strategy.run(step, (values, parts))
    return values


def whole(state: Any) -> Any:
    """The state of a transformation, with its blocks joined."""
    if not isinstance(state, DividedState):
        return state
    leaves, structure = jax.tree.flatten(state.inner, is_leaf=rx_values)
    return structure.unflatten(
        x if dim is None else np.concatenate(x.values, axis=dim)
        for x, dim in zip(leaves, state.dims, strict=True)
    )


def rx_values(x: Any) -> bool:
    return isinstance(x, rx.PerReplica)


def is_sharded(strategy: str) -> bool:
    return strategy.startswith(("fully", "sharded"))


@pytest.mark.slow(but=["virtual, 2x2", "mirrored, 4", "sharded update, 4"])
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param(name, ALL if name.endswith(", 4") else FEW, id=name)
        for name in STRATEGIES
    ],
)
def test_as_optax_on_one_device(strategy: str, names: Any) -> None:
    values = trained(STRATEGIES[strategy](), names)
    for name, (params, state) in values.items():
        expected_params, expected_state = by_hand(name)
        assert all(isinstance(x, jax.Array) for x in params.values()), name
        assert_equal(params, expected_params)
        # Small states are not divided.
        is_large = any(np.size(x) >= 1024 for x in jax.tree.leaves(expected_state))
        is_divided = is_large and is_sharded(strategy)
        assert isinstance(state, DividedState) == is_divided
        assert_equal(whole(state), expected_state)


def test_each_replica_holds_a_block_of_the_state() -> None:
    strategy = STRATEGIES["sharded update, 4"]()
    ((_, state),) = trained(strategy, ["adam"]).values()
    moments = [x for x in jax.tree.leaves(state) if x.size == math.prod(KERNEL)]
    assert len(moments) == 2
    for moment in moments:
        assert {s.data.shape for s in moment.addressable_shards} == {(1, 12, 32)}


def test_the_update_gathers_the_state_only() -> None:
    tx = rx.distributed(optax.adam(0.01))
    strategy = STRATEGIES["sharded update, 4"]()
    with strategy.scope():
        state = tx.init(PARAMS)
    grads = jax.tree.map(rx.PerReplica, GRADS[0])
    strategy.run(tx.update, (grads, state, PARAMS))
    program = list(strategy.runner.programs)[-1]  # The first one made the state.
    call = flatten_call((grads, state, PARAMS), {}, strategy.runner._place)
    text = program.lower([], call.arrays).compile().as_text()
    collectives = re.findall(r" (all-reduce|reduce-scatter|all-gather)\(", text)
    # One bucket of gradients, and Adam's two moments of the kernel.
    assert sorted(collectives) == ["all-gather", "all-gather", "all-reduce"]


def network_loss(params: Any, batch: Any) -> Any:
    x, y = batch
    logits = jax.nn.relu(x @ params["kernel"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def network() -> Any:
    rng = np.random.default_rng(1)
    shapes = {"kernel": (64, 32), "out": (32, 10)}
    return {k: rng.normal(0, 0.1, s).astype("float32") for k, s in shapes.items()}


@pytest.mark.parametrize("name", ["mirrored, 4", "virtual, 2x2", "sharded update, 4"])
def test_batches_that_do_not_divide(name: str, digits: Any) -> None:
    data = tuple(a[:101] for a in digits)  # The last of four batches has 5 examples.
    strategy, plain = STRATEGIES[name](), optax.adam(0.01)
    tx = rx.distributed(plain)
    with strategy.scope():
        params, state = network(), tx.init(network())

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(network_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in strategy.experimental_distribute_dataset(data, batch_size=32):
        params, state = strategy.run(step, (params, state, batch))
    expected, plain_state = network(), plain.init(network())
    for i in range(0, 101, 32):
        batch = tuple(a[i : i + 32] for a in data)
        grads = jax.grad(network_loss)(expected, batch)
        updates, plain_state = plain.update(grads, plain_state, expected)
        expected = optax.apply_updates(expected, updates)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    # Replicas without examples hold their blocks, too.
    assert_equal_within(whole(state), plain_state, 1e-4)


def assert_equal_within(actual: Any, expected: Any, tolerance: float) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x, y, rtol=tolerance, atol=tolerance / 10
        ),
        actual,
        expected,
    )


def updates_of(strategy: rx.Strategy, tx: Any, grads: Any) -> Any:
    """The first updates that `tx` makes of each replica's gradients."""
    with strategy.scope():
        state = tx.init(jax.tree.map(lambda g: g[0], grads))
    updates, _ = strategy.run(tx.update, (jax.tree.map(rx.PerReplica, grads), state))
    return updates


def test_sum_or_mean() -> None:
    grads = {"w": np.array([[1.0, 2.0], [3.0, 4.0]], "float32")}
    for op, expected in [("sum", [4.0, 6.0]), (rx.ReduceOp.MEAN, [2.0, 3.0])]:
        tx = rx.distributed(optax.identity(), op)
        updates = updates_of(mirrored(2), tx, grads)
        np.testing.assert_array_equal(updates["w"], expected)
    with pytest.raises(ValueError, match="unknown reduce operation 'max'"):
        rx.distributed(optax.identity(), "max")


def test_communication_options_and_operations() -> None:
    options = rx.CommunicationOptions(
        compression="bfloat16",
        bytes_per_pack=8,
        gradient_hook=lambda grads: [None if g is None else 2 * g for g in grads],
    )
    sizes: list[int] = []

    class Counting(rx.CrossDeviceOps):
        def sum(self, value: Any, axis: Any) -> Any:
            sizes.append(value.size)
            assert value.dtype == jnp.bfloat16
            return jax.lax.psum(value, axis.name)

    strategy = rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], Counting(), communication_options=options
    )
    grads = {"a": np.full((2, 4), 1.001, "float32"), "b": np.ones((2, 5), "float32")}
    updates = updates_of(strategy, rx.distributed(optax.identity()), grads)
    # 2.002 as a bfloat16 is 2.
    np.testing.assert_array_equal(updates["a"], np.full(4, 2.0))
    assert updates["a"].dtype == jnp.float32
    assert set(sizes) == {4, 5}


def test_none_and_integer_leaves() -> None:
    params = {"w": jnp.ones(3), "none": None, "n": jnp.arange(2)}
    masked = optax.masked(optax.sgd(0.5), {"w": True, "none": False, "n": False})

    def update(tx: Any, scale: Any) -> Any:
        grads = jax.grad(lambda p: scale * p["w"].sum(), allow_int=True)(params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates["w"], updates["none"]

    tx = rx.distributed(masked)
    scales = rx.PerReplica(np.array([1.0, 3.0], "float32"))
    w, none = mirrored(2).run(lambda scale: update(tx, scale), (scales,))
    np.testing.assert_array_equal(w, update(masked, 2.0)[0])
    assert none is None


def test_outside_replica_functions_it_is_tx() -> None:
    tx = rx.distributed(optax.adam(0.1))
    grads = jax.tree.map(lambda g: g[0], GRADS[0])
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(grads, tx.init(PARAMS), PARAMS)
        expected, _ = optax.adam(0.1).update(grads, optax.adam(0.1).init(PARAMS))
        assert_equal(updates, expected)


def test_extra_arguments_are_those_of_tx() -> None:
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1))
    tx = rx.distributed(plateau)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert type(rx.distributed(optax.scale(2.0))) is type(optax.scale(2.0))

    def step(state: Any, grad: Any) -> Any:
        loss = rx.get_replica_context().all_reduce("mean", grad)
        _, state = tx.update(grad, state, value=loss)
        return state

    state = tx.init(jnp.float32(0))
    for _ in range(3):
        grad = rx.PerReplica(np.array([1.0, 3.0], "float32"))
        state = mirrored(2).run(step, (state, grad))
    assert float(state[1].best_value) == 2.0
    assert float(state[1].scale) < 1


def test_the_train_state_of_linen(digits: Any) -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    batch = tuple(a[:32] for a in digits)

    def trained(strategy: Any, tx: Any) -> Any:
        with strategy.scope():
            state = train_state.TrainState.create(
                apply_fn=network_loss, params=network(), tx=tx
            )

        def step(state: Any, batch: Any) -> Any:
            grads = jax.grad(state.apply_fn)(state.params, batch)
            return state.apply_gradients(grads=grads)

        dataset = strategy.experimental_distribute_dataset(batch, batch_size=32)
        for _ in range(2):
            for part in dataset:
                state = strategy.run(step, (state, part))
        assert int(state.step) == 2
        return state.params

    expected = trained(rx.OneDeviceStrategy("cpu:0"), optax.adamw(0.01))
    for name in ("mirrored, 2", "sharded update, 4"):
        params = trained(STRATEGIES[name](), rx.distributed(optax.adamw(0.01)))
        assert_equal_within(params, expected, 1e-4)


@pytest.mark.parametrize("name", ["mirrored, 2", "sharded update, 4"])
def test_the_optimizer_of_nnx(name: str, digits: Any, caplog: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    batch = tuple(a[:32] for a in digits)

    def trained(strategy: Any, tx: Any) -> Any:
        with strategy.scope():
            model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(model: Any, optimizer: Any, batch: Any) -> None:
            x, y = batch
            optimizer.update(
                model,
                nnx.grad(
                    lambda model: optax.softmax_cross_entropy_with_integer_labels(
                        model(x), y
                    ).mean()
                )(model),
            )

        dataset = strategy.experimental_distribute_dataset(batch, batch_size=32)
        for _ in range(2):
            for part in dataset:
                strategy.run(step, (model, optimizer, part))
        return nnx.to_pure_dict(nnx.state(model))

    optax_module._warn_of_whole_state.cache_clear()
    expected = trained(rx.OneDeviceStrategy("cpu:0"), optax.adamw(0.01))
    params = trained(STRATEGIES[name](), rx.distributed(optax.adamw(0.01)))
    assert_equal_within(params, expected, 1e-4)
    assert ("holds the whole optimizer state" in caplog.text) == is_sharded(name)


def test_a_checkpoint_of_a_divided_state(tmp_path: Any) -> None:
    def trained(strategy: Any, num_steps: int) -> Any:
        with strategy.scope():
            state = tx.init(PARAMS)
        for grads in GRADS[:num_steps]:
            parts = jax.tree.map(rx.PerReplica, grads)
            _, state = strategy.run(tx.update, (parts, state))
        return state

    tx = rx.distributed(optax.adam(0.01))
    state = trained(STRATEGIES["sharded update, 4"](), 2)
    path = rx.Checkpoint(state=state).save(str(tmp_path / "state"))
    restored = rx.Checkpoint(state=trained(STRATEGIES["sharded update, 4"](), 0))
    restored.restore(path).assert_consumed()
    assert_equal(whole(restored.state), whole(state))
    two = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_update=True)
    with pytest.raises(rx.CheckpointError, match="shape"):
        rx.Checkpoint(state=trained(two, 0)).restore(path)


def test_a_whole_state_is_updated_whole_with_a_warning(caplog: Any) -> None:
    optax_module._warn_of_whole_state.cache_clear()
    strategy = STRATEGIES["sharded update, 4"]()
    tx = rx.distributed(optax.adam(0.01))
    state = tx.init(PARAMS)  # Outside of the scope.
    grads = jax.tree.map(rx.PerReplica, GRADS[0])
    for _ in range(2):
        updates, state = strategy.run(tx.update, (grads, state))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((updates, state)))
    (record,) = caplog.records
    assert "every replica holds the whole optimizer state" in record.getMessage()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation"):
        rx.distributed(optax.adam)
    strategy = STRATEGIES["sharded update, 4"]()
    tx = rx.distributed(optax.adam(0.01))
    with strategy.scope():
        state = tx.init(PARAMS)
    with pytest.raises(rx.ContextError, match="divided over the replicas, outside"):
        tx.update(PARAMS, state)
    twice = rx.distributed(rx.distributed(optax.identity(), "sum"), "sum")
    with pytest.warns(UserWarning, match="summed over the 2 replicas once more"):
        updates_of(mirrored(2), twice, {"w": np.ones((2, 3), "float32")})
