"""Trains a package's model on one device and under strategies, and compares."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import replicax as rx

CPUS = [f"cpu:{number}" for number in range(4)]

STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored": lambda: rx.MirroredStrategy(CPUS),
    "several on a device": lambda: rx.MirroredStrategy(CPUS[:2], replicas_per_device=2),
    "fully sharded": lambda: rx.FullyShardedStrategy(CPUS),
    "model parallel": lambda: rx.ModelParallelStrategy(devices=CPUS, model_parallel=2),
}


def trained(
    strategy: rx.Strategy | None, train: Callable[[], keras.Model]
) -> dict[str, np.ndarray]:
    """The variables of `train()` by path; the scope is open while it trains."""
    keras.utils.clear_session()  # So that names are equal.
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = train()
    variables: list[Any] = [*model.weights, *model.optimizer.variables]
    return {f"{i} {v.path}": np.asarray(v) for i, v in enumerate(variables)}


def require_same(
    train: Callable[[], keras.Model], strategy: str, rtol: float = 1e-5
) -> None:
    """Raise unless weights and state under a strategy are those of plain Keras."""
    expected = trained(None, train)
    for (path, got), want in zip(
        trained(STRATEGIES[strategy](), train).items(), expected.values(), strict=True
    ):
        if "seed_generator" not in path:
            atol = rtol * max(1e-2, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(got, want, rtol, atol, err_msg=path)
