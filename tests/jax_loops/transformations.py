"""Transformations of Optax, their results on one device, and strategies."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.conftest import mirrored

import replicax as rx

NUM_STEPS = 5
# 4 replicas divide the state of "kernel"; that of the others is too small.
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


ALL: dict[str, Callable[[], Any]] = {
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
    """Parameters and state after updates with the mean gradients, on one device."""
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


def numbers(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x, "float64")


def assert_equal(actual: Any, expected: Any) -> None:
    # Means are summed in another order, and Adam divides small numbers by small ones.
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(numbers(x), numbers(y), rtol=1e-5, atol=1e-6)
