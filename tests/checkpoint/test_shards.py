"""Checkpoints of sharded arrays: each shard is written once and fits any layout."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from replicax.checkpoint import CheckpointError, storage
from replicax.checkpoint.arrays import Shard, ShardedArray
from replicax.checkpoint.storage import Contents
from replicax.testing import run

MAP = {".*kernel": (None, "model")}


def cpus(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


LAYOUTS: dict[str, Callable[[], rx.Strategy]] = {
    "mirrored 1": lambda: rx.MirroredStrategy(cpus(1)),
    "mirrored 4": lambda: rx.MirroredStrategy(cpus(4)),
    "fully sharded 4": lambda: rx.FullyShardedStrategy(cpus(4)),
    "fully sharded 8": lambda: rx.FullyShardedStrategy(cpus(8)),
    "model parallel 2x2": lambda: rx.ModelParallelStrategy(MAP, 2, devices=cpus(4)),
    "shard_update 4": lambda: rx.MirroredStrategy(cpus(4), shard_update=True),
}
QUICK = [
    ("fully sharded 4", "mirrored 1"),
    ("mirrored 4", "fully sharded 8"),
    ("fully sharded 8", "model parallel 2x2"),
]


def checkpoint_of(strategy: rx.Strategy, seed: int | None = None) -> rx.Checkpoint:
    """A model and its optimizer, with random values if there is a seed."""
    with strategy.scope():
        layers = [keras.layers.Dense(64), keras.layers.Dense(40, dtype="bfloat16")]
        model = keras.Sequential([keras.Input((32,)), *layers])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    if seed is not None:
        rng = np.random.default_rng(seed)
        for variable in [*model.variables, *optimizer.variables]:
            values = rng.integers(0, 2000, variable.shape)
            variable.assign(values.astype(variable.dtype))
    return rx.Checkpoint(model=model, optimizer=optimizer, step=seed or 0)


def state(checkpoint: rx.Checkpoint) -> list[bytes]:
    """The bytes of all variables."""
    variables = [*checkpoint.model.variables, *checkpoint.optimizer.variables]
    return [np.asarray(v.value).tobytes() for v in variables]


def expected(seed: int) -> list[bytes]:
    return state(checkpoint_of(rx.OneDeviceStrategy("cpu:0"), seed))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.permutations(LAYOUTS, 2)
    ],
)
def test_a_restore_into_another_layout_is_bit_equal(
    tmp_path: Path, writer: str, reader: str
) -> None:
    path = checkpoint_of(LAYOUTS[writer](), 1).write(tmp_path / "c")
    strategy = LAYOUTS[reader]()
    restored = checkpoint_of(strategy)
    layouts = [v.value.sharding for v in restored.model.variables]
    restored.restore(path).assert_consumed()
    assert state(restored) == expected(1)
    assert [v.value.sharding for v in restored.model.variables] == layouts
    strategy.check_replicas()


def test_each_shard_is_written_once(tmp_path: Path) -> None:
    checkpoint_of(LAYOUTS["model parallel 2x2"](), 1).write(tmp_path / "c")
    table = json.loads((tmp_path / "c" / "manifest.json").read_text())["arrays"]
    shards = {name: len(entry["shards"]) for name, entry in table.items()}
    assert shards["model/dense/kernel"] == 2, "replicas have the same two shards"
    assert shards["model/dense/bias"] == 1
    size = (tmp_path / "c" / "arrays-0.bin").stat().st_size
    assert size == sum(map(len, expected(1)))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_part_of_an_array_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dims = st.integers(1, 6)
    shape = tuple(data.draw(st.lists(dims, max_size=3)))
    whole = np.arange(np.prod(shape, dtype=int), dtype="bfloat16").reshape(shape)
    cuts = [sorted({0, n, data.draw(st.integers(0, n))}) for n in shape]
    blocks = itertools.product(*(itertools.pairwise(c) for c in cuts))
    shards = [
        Shard(
            worker=0,
            start=tuple(a for a, _ in spans),
            shape=tuple(b - a for a, b in spans),
            data=whole[(*(slice(*span) for span in spans), ...)],
        )
        for spans in blocks
    ]
    array = ShardedArray(shape, whole.dtype, shards)
    path = tmp_path_factory.mktemp("parts") / "c"
    storage.write(path, Contents(arrays={"x": array}, values={}))
    saved = storage.read(path).arrays["x"]
    index = tuple(
        slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
        for n in shape
    )
    np.testing.assert_array_equal(saved.read(), whole)
    np.testing.assert_array_equal(saved.read(index), whole[index])
    np.testing.assert_array_equal(array.read(index), whole[index])


def test_a_read_touches_only_its_rows(tmp_path: Path) -> None:
    whole = np.arange(4000.0).reshape(1000, 4)
    arrays = {"x": ShardedArray.of(whole)}
    storage.write(tmp_path / "c", Contents(arrays=arrays, values={}))
    saved = storage.read(tmp_path / "c").arrays["x"]
    with (tmp_path / "c" / "arrays-0.bin").open("r+b") as file:
        file.truncate(16_000)
    half = saved.read((slice(0, 500), slice(1, 3)))
    np.testing.assert_array_equal(half, whole[:500, 1:3])
    with pytest.raises(CheckpointError, match=r"arrays-0.bin could not be read"):
        saved.read()


def test_arrays_are_not_read_from_another_checkpoint(tmp_path: Path) -> None:
    """A model that is built after the restore reads its weights only then."""
    source = rx.Checkpoint(x=np.zeros(4))
    path = source.write(tmp_path / "c")
    saved = storage.read(Path(path)).arrays["x"]
    np.testing.assert_array_equal(saved.read(), np.zeros(4))
    source.x = np.ones(4)
    source.write(path)
    with pytest.raises(CheckpointError, match=r"arrays-0.bin .* restore again"):
        saved.read()


def two_workers(folder: str) -> dict[str, bool]:
    """Write one checkpoint, and read those of all layouts."""
    strategy = rx.FullyShardedStrategy(timeouts=rx.Timeouts(startup=90))
    checkpoint_of(strategy, 2).write(f"{folder}/two workers")
    checkpoint = checkpoint_of(strategy)
    right = {}
    for name in [*LAYOUTS, "two workers"]:
        checkpoint.restore(f"{folder}/{name}").assert_consumed()
        values = expected(2)
        variables = [*checkpoint.model.variables, *checkpoint.optimizer.variables]
        right[name] = all(
            np.asarray(shard.data).tobytes()
            == np.frombuffer(value, shard.data.dtype)
            .reshape(variable.shape)[shard.index]
            .tobytes()
            for variable, value in zip(variables, values, strict=True)
            for shard in variable.value.addressable_shards
        )
    devices = [d for d in jax.devices() if d.process_index == 1]
    mesh = jax.sharding.Mesh(np.array(devices), "x")
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    on_one = jax.make_array_from_callback(
        (2,), sharding, lambda index: np.ones(2, "float32")[index], dtype="float32"
    )
    try:
        rx.Checkpoint(array=on_one).write(f"{folder}/one worker")
        right["refused"] = jax.process_index() == 1
    except rx.CheckpointError as error:
        right["refused"] = r"array is on devices of the workers [1]" in str(error)
    return right


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_workers_of_two_devices(tmp_path: Path) -> None:
    for name, make in LAYOUTS.items():
        checkpoint_of(make(), 2).write(tmp_path / name)
    results = run(
        two_workers,
        args=(str(tmp_path),),
        num_workers=2,
        logical_devices=2,
        deadline_seconds=150,
    )
    for right in results.returned.values():
        assert all(right.values()), right
    total = sum(map(len, expected(2)))
    sizes = [
        (tmp_path / "two workers" / f"arrays-{i}.bin").stat().st_size for i in (0, 1)
    ]
    assert sum(sizes) == total, "each shard is written once"
    assert min(sizes) > 0.4 * total
    for name, make in LAYOUTS.items():
        restored = checkpoint_of(make())
        restored.restore(tmp_path / "two workers").assert_consumed()
        assert state(restored) == expected(2), name
