"""Building and loading: no device holds more than its shards and one weight's shard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax as rx
from loading_memory import WAYS, model_of, peaks, save

WIDTH = 64
LARGEST = 20 * WIDTH * WIDTH * 4


def cpus(num: int) -> list[str]:
    return [f"cpu:{i}" for i in range(num)]


STRATEGIES: dict[str, Callable[[int], rx.Strategy]] = {
    "fully sharded": lambda num: rx.FullyShardedStrategy(cpus(num)),
    "model parallel": lambda num: rx.ModelParallelStrategy(devices=cpus(num)),
    "grid": lambda num: rx.ModelParallelStrategy(
        devices=cpus(num), model_parallel=num // 2
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved model, whose weights are not its initial ones."""
    folder = tmp_path_factory.mktemp("saved")
    model = model_of(WIDTH)
    model.set_weights([x + 1 for x in model.get_weights()])
    save(model, folder)
    return folder


def values_of(model: Any) -> list[np.ndarray]:
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(v) for v in variables]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "num"),
    [("fully sharded", 4), ("fully sharded", 8), ("model parallel", 4), ("grid", 8)],
)
def test_each_device_makes_and_reads_its_shards(
    name: str, num: int, way: str, saved: Path
) -> None:
    with STRATEGIES[name](num).scope(), peaks() as largest:
        model = WAYS[way](WIDTH, saved)
    variables = [*model.weights, *model.optimizer.variables]
    for device in range(num):
        shards = [
            shard.data.nbytes
            for v in variables
            for shard in v.value.addressable_shards
            if shard.device.id == device
        ]
        # Beside its shards, a device holds a copy of one at a time, and seeds.
        assert sum(shards) <= largest[device] <= sum(shards) + max(shards) + 4096
        assert max(shards) <= LARGEST / 4
    on_one_device = WAYS[way](WIDTH, saved)
    for got, want in zip(values_of(model), values_of(on_one_device), strict=True):
        np.testing.assert_array_equal(got, want)
