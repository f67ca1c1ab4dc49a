"""Files of one strategy are read under another, and training continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
from tests.strategies.parity import (
    BATCH_SIZE,
    NUM_FEATURES,
    NUM_UNITS,
    assert_same,
    blocks_of,
    compiled,
    data,
    fitted,
    network,
    state,
)

import replicax as rx

TWO = ["cpu:0", "cpu:1"]
MAP = {"(.*/)?dense(_[0-9]+)?/kernel": (None, "model")}

WHOLE = [(NUM_FEATURES, NUM_UNITS)] * 2
ROWS = [(NUM_FEATURES // 2, NUM_UNITS)] * 2
COLUMNS = [(NUM_FEATURES, NUM_UNITS // 2)] * 2

STRATEGIES: dict[str, tuple[Callable[[], rx.Strategy], Any, Any]] = {
    "mirrored": (lambda: rx.MirroredStrategy(TWO), WHOLE, WHOLE),
    "shard_update": (lambda: rx.MirroredStrategy(TWO, shard_update=True), WHOLE, ROWS),
    "fully sharded": (lambda: rx.FullyShardedStrategy(TWO), ROWS, ROWS),
    "model parallel": (
        lambda: rx.ModelParallelStrategy(MAP, 2, devices=TWO),
        COLUMNS,
        COLUMNS,
    ),
    "central": (
        lambda: rx.CentralStorageStrategy(TWO, "cpu:5"),
        WHOLE[:1],
        WHOLE[:1],
    ),
}
"""The strategy, and the blocks of the first kernel and of its optimizer state."""

PAIRS = [
    ("mirrored", "shard_update"),
    ("shard_update", "fully sharded"),
    ("fully sharded", "model parallel"),
    ("model parallel", "central"),
    ("central", "mirrored"),
]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_files_fit_every_strategy(writer: str, reader: str, tmp_path: Path) -> None:
    model, _ = fitted(STRATEGIES[writer][0](), lambda: compiled(network()))
    path = rx.Checkpoint(model=model).write(tmp_path / "checkpoint")
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "own.weights.h5")
    saved = state(model)
    more: Any = {"batch_size": BATCH_SIZE, "verbose": 0, "shuffle": False}
    model.fit(*data(seed=1), **more)
    expected = state(model)

    make, weight_blocks, state_blocks = STRATEGIES[reader]
    strategy = make()
    with strategy.scope():
        restored = compiled(network())
        loaded = keras.models.load_model(tmp_path / "model.keras")
        weights = network()
    rx.Checkpoint(model=restored).restore(path).assert_consumed()
    weights.load_weights(tmp_path / "own.weights.h5")
    strategy.check_replicas()
    for model in (restored, loaded):
        assert_same(state(model), saved, rtol=0, atol=0)
        model.fit(*data(seed=1), **more)
        # Adam turns other orders of sums into larger differences.
        assert_same(state(model), expected, rtol=1e-4, atol=1e-5)
        assert blocks_of(model.layers[0].kernel) == weight_blocks
        assert blocks_of(model.optimizer.variables[2]) == state_blocks
    assert blocks_of(weights.layers[0].kernel) == weight_blocks
