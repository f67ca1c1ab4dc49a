"""Saves that a kill or a full disk of one worker interrupts."""

import random
import resource
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import Cluster, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

HEARTBEAT = 5
SHAPE, COUNT = (40, 40_000), 3  # 19 MB.


def values(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.random(SHAPE, "float32") for _ in range(COUNT)]


def sharded(folder: str) -> tuple[rx.Strategy, rx.Checkpoint, rx.CheckpointManager]:
    strategy = rx.FullyShardedStrategy(
        timeouts=rx.Timeouts(heartbeat=HEARTBEAT, startup=90)
    )
    with strategy.scope():
        weights = [keras.Variable(np.zeros(SHAPE, "float32")) for _ in range(COUNT)]
    checkpoint = rx.Checkpoint(step=0, weights=weights)
    return strategy, checkpoint, rx.CheckpointManager(checkpoint, folder, 2)


def assert_values(checkpoint: rx.Checkpoint) -> None:
    """Assert that each shard of this process has the bits of the checkpoint's step."""
    for variable, value in zip(
        checkpoint.weights, values(checkpoint.step), strict=True
    ):
        for shard in variable.value.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def set_values(checkpoint: rx.Checkpoint, step: int) -> None:
    checkpoint.step = step
    for variable, value in zip(checkpoint.weights, values(step), strict=True):
        variable.assign(value)


def saves_for_ever(folder: str) -> None:
    _, checkpoint, manager = sharded(folder)
    newest = manager.latest_checkpoint
    assert manager.restore_or_initialize() == newest, "no checkpoint is damaged"
    if newest is not None:
        assert_values(checkpoint)
    while True:
        set_values(checkpoint, checkpoint.step + 1)
        manager.save()
        print("begins a save", flush=True)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_25_kills_leave_a_checkpoint_of_equal_bits(
    tmp_path: Path, num_workers: int
) -> None:
    rng = random.Random(num_workers)
    folder = str(tmp_path / "run")
    last = 0
    for _ in range(25):
        with Cluster(
            saves_for_ever,
            num_workers=num_workers,
            args=(folder,),
            logical_devices=4 // num_workers,
            deadline_seconds=90,
        ) as cluster:
            victim = cluster.task(f"worker:{rng.randrange(num_workers)}")
            text = "begins a save"
            cluster.wait_until(
                lambda task=victim, text=text: (
                    cluster.outputs()[task.name].count(text) > 2
                ),
                lambda: "a few saves",
                by=victim,
            )
            time.sleep(rng.uniform(0, 0.3))
            victim.kill()
            killed = time.monotonic()
            results = cluster.wait()
        for name, result in results.items():
            if name != victim.name:
                assert victim.name in result.output
                assert time.monotonic() - killed < HEARTBEAT + 10
        restored = rx.Checkpoint(
            step=0,
            weights=[keras.Variable(np.zeros(SHAPE, "float32")) for _ in range(COUNT)],
        )
        restored.restore(rx.latest_checkpoint(folder)).assert_consumed()
        assert_values(restored)
        assert restored.step >= last + 2
        last = restored.step


def saves_with_a_full_disk(folder: str) -> list[str]:
    """Worker 1 cannot write the second save; return the errors and the checkpoints."""
    strategy, checkpoint, manager = sharded(folder)
    results = []
    for step in (1, 2, 3):
        set_values(checkpoint, step)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step == 2 and not strategy.workers.is_chief:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        manager.save()
        try:
            manager.wait()
            results.append("saved")
        except rx.CheckpointError as error:
            results.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoint.step = 0
    manager.restore_or_initialize()
    assert_values(checkpoint)
    return [*results, *(Path(path).name for path in manager.checkpoints)]


def test_the_full_disk_of_one_worker_is_named_on_all(tmp_path: Path) -> None:
    results = run(
        saves_with_a_full_disk,
        num_workers=2,
        args=(str(tmp_path / "run"),),
        logical_devices=2,
        deadline_seconds=120,
    )
    for first, error, third, *names in results.returned.values():
        assert first == third == "saved"
        assert "worker:1: File too large: its arrays have 19,200,000 bytes" in error
        assert "worker:0" not in error
        assert names == ["ckpt-1", "ckpt-3"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["ckpt-1", "ckpt-3"]


def only_the_chief_saves(folder: str) -> None:
    strategy, checkpoint, _ = sharded(folder)
    if strategy.workers.is_chief:
        checkpoint.write(f"{folder}/c")


def test_a_save_on_one_worker_names_the_other(tmp_path: Path) -> None:
    results = run(
        only_the_chief_saves,
        num_workers=2,
        args=(str(tmp_path),),
        logical_devices=2,
        deadline_seconds=60,
        check=False,
    )
    assert results["worker:0"].exit_code == 1
    output = results["worker:0"].output
    assert "worker:1" in output
    assert "replicax.checkpoint.write" in output


def ends_without_close(folder: str) -> None:
    _, checkpoint, manager = sharded(folder)
    set_values(checkpoint, 1)
    manager.save()


def test_the_exit_of_all_workers_waits_for_a_save(tmp_path: Path) -> None:
    run(ends_without_close, num_workers=2, args=(str(tmp_path),), logical_devices=2)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-1"]


def saves_other_arrays(folder: str) -> str:
    strategy, checkpoint, _ = sharded(folder)
    if not strategy.workers.is_chief:
        checkpoint.weights.reverse()
        checkpoint.weights.append(checkpoint.weights[0])
    with pytest.raises(rx.CheckpointError) as error:
        checkpoint.write(f"{folder}/c")
    return str(error.value)


def test_a_worker_with_other_arrays_is_named_on_all(tmp_path: Path) -> None:
    results = run(
        saves_other_arrays, num_workers=2, args=(str(tmp_path),), logical_devices=2
    )
    for error in results.returned.values():
        assert "worker:1 saves other arrays or shardings" in error
    assert list(tmp_path.iterdir()) == []
