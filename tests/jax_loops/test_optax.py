"""`rx.distributed`: each transformation trains as Optax by itself on one device."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.conftest import mirrored

import replicax as rx
from replicax.engine.signature import flatten_call
from replicax.jax_loops.divided_updates import DividedState

NUM_STEPS = 5
# Divided over 4 replicas: "kernel"; too small: the others.
KERNEL = (48, 32)
SHAPES = {"kernel": KERNEL, "bias": (32,), "scale": ()}
_RNG = np.random.default_rng(0)
PARAMS = {k: _RNG.normal(size=s).astype("float32") for k, s in SHAPES.items()}
GRADS = [
    {k: _RNG.normal(size=(4, *s)).astype("float32") for k, s in SHAPES.items()}
    for _ in range(NUM_STEPS)
]


def only_kernels(tree: Any) -> Any:
    return {key: key == "kernel" for key in tree}


ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "adadelta": lambda: optax.adadelta(0.5),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.01),
    "adamw, masked": lambda: optax.adamw(0.01, weight_decay=0.1, mask=only_kernels),
    "amsgrad, bfloat16": lambda: optax.adam(0.01, mu_dtype="bfloat16"),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "lion": lambda: optax.lion(0.01),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(0.01), False: optax.sgd(0.1, momentum=0.9)}, only_kernels
    ),
    "frozen": lambda: optax.multi_transform(
        {True: optax.adam(0.01), False: optax.set_to_zero()}, only_kernels
    ),
    "radam": lambda: optax.radam(0.01),
    "rmsprop, schedule": lambda: optax.rmsprop(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6), momentum=0.5
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.01, warmup_steps=2),
    "sgd, nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "yogi": lambda: optax.yogi(0.01),
}
MIXING: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(0.01)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.1),
    "lbfgs": lambda: optax.lbfgs(0.1, memory_size=2, linesearch=None),
    "muon": lambda: optax.contrib.muon(0.01),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "novograd": lambda: optax.novograd(0.01),
    "size": lambda: optax.stateless_with_tree_map(lambda g, _: -g / g.size),
}
ALL = ELEMENTWISE | MIXING
FEW = ("adam", "adafactor", "clip_by_global_norm", "MultiSteps")

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored, 2": lambda: mirrored(2),
    "mirrored, 4": lambda: mirrored(4),
    "virtual, 2x2": lambda: rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas_per_device=2
    ),
    "central, 2": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
    "fully sharded, 4": lambda: rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "sharded update, 4": lambda: rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], shard_update=True
    ),
    "sharded update, 2x2": lambda: rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas_per_device=2, shard_update=True
    ),
}


@functools.cache
def by_hand(name: str) -> tuple[Any, Any]:
    """What Optax makes of the means of the gradients, on one device."""
    tx = ALL[name]()
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in GRADS:
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        params, state = step(params, state, mean)
    return params, state


def trained(strategy: rx.Strategy, names: Any) -> dict[str, tuple[Any, Any]]:
    """What the transformations make of each replica's gradients, in one program."""
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
        # Each replica gets as many of the four gradients.
        parts = jax.tree.map(
            lambda g: rx.PerReplica(
                g.reshape(strategy.num_replicas_in_sync, -1, *g.shape[1:])
            ),
            grads,
        )
        values = strategy.run(step, (values, parts))
    return values


def numbers(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x, "float64")


def assert_equal(actual: Any, expected: Any) -> None:
    # Means are summed in another order, and Adam divides small numbers by small ones.
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(numbers(x), numbers(y), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param(name, ALL if name.endswith(", 4") else FEW, id=name)
        for name in STRATEGIES
    ],
)
def test_as_optax_on_one_device(strategy: str, names: Any, caplog: Any) -> None:
    values = trained(STRATEGIES[strategy](), names)
    for name, (params, state) in values.items():
        expected_params, expected_state = by_hand(name)
        assert all(isinstance(x, jax.Array) for x in params.values()), name
        assert_equal(params, expected_params)
        assert isinstance(state, DividedState) == is_sharded(strategy)
        assert_equal(whole(state), expected_state)
    # Transformations that mix elements get whole arrays, and say so.
    num_mixing = len(MIXING.keys() & set(names)) if is_sharded(strategy) else 0
    texts = [record.getMessage() for record in caplog.records]
    assert len([t for t in texts if "needs whole arrays" in t]) == num_mixing


def test_each_replica_holds_a_block_of_the_state() -> None:
    strategy = STRATEGIES["sharded update, 4"]()
    ((_, state),) = trained(strategy, ["adam"]).values()
    moments = [x for x in jax.tree.leaves(state) if x.size == math.prod(KERNEL)]
    assert len(moments) == 2
    for moment in moments:
        assert {s.data.shape for s in moment.addressable_shards} == {(1, 12, 32)}


def test_the_update_scatters_and_gathers() -> None:
    tx = rx.distributed(optax.adam(0.01))
    strategy = STRATEGIES["sharded update, 4"]()
    with strategy.scope():
        state = tx.init(PARAMS)
    grads = jax.tree.map(rx.PerReplica, GRADS[0])
    strategy.run(tx.update, (grads, state, PARAMS))
    program = list(strategy.runner.programs)[-1]  # The first one made the state.
    call = flatten_call((grads, state, PARAMS), {}, strategy.runner._place)
    text = program.lower([], call.arrays).compile().as_text()
    found = re.findall(
        r"= \(?([a-z0-9]+\[[0-9,]*\]).* (all-reduce|reduce-scatter|all-gather)\(", text
    )
    assert sorted(kind for _, kind in found) == [
        "all-gather",
        "all-reduce",
        "reduce-scatter",
    ]
    assert ("f32[12,32]", "reduce-scatter") in found
