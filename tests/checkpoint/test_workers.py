"""Checkpoints of several workers: an interrupted run ends with the same weights."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import replicax as rx
from replicax.cluster.failure import ExitCode
from replicax.testing import Results, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 620, 64, 3  # 10 batches; the last one is ragged.


class At(keras.callbacks.Callback):
    """Sends this process a signal after a number of batches."""

    def __init__(self, batch: int, number: int) -> None:
        super().__init__()
        self._left = batch
        self._number = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.1)  # Long enough for the workers to agree before training ends.
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)


def fit(
    folder: str,
    *,
    strategy: rx.Strategy | None = None,
    victim: int | None = None,
    number: int = signal.SIGTERM,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """Train on digits with backups; `victim` gets a signal in the middle."""
    if strategy is None:
        strategy = rx.MultiWorkerMirroredStrategy(
            timeouts=rx.Timeouts(heartbeat=6, startup=90)
        )
    images, labels = load_digits(return_X_y=True)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # A process that gets SIGTERM saves; a killed one needs backups.
    save_freq = False if victim is not None and number == signal.SIGTERM else 4
    callbacks: list[Any] = [
        rx.BackupAndRestore(folder, save_freq, delete_checkpoint=False)
    ]
    first = os.environ.get("REPLICAX_ATTEMPT", "0") == "0"
    if victim is not None and first:
        is_victim = victim == strategy.workers.index
        callbacks.append(At(13 if is_victim else 0, number))
    history = model.fit(
        (images / 16).astype("float32")[:NUM_EXAMPLES],
        labels[:NUM_EXAMPLES],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
        callbacks=callbacks,
    )
    return {"weights": model.get_weights(), "loss": history.history["loss"]}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    # Another number of replicas adds in another order: float32 rounding, about 1e-7 a
    # step, over 30 steps of Adam.
    np.testing.assert_allclose(
        actual["loss"], expected["loss"][-len(actual["loss"]) :], rtol=1e-4
    )
    for a, e in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, e, atol=2e-4)


def interrupted(folder: Path, num_workers: int, victim: int) -> tuple[Results, str]:
    """Run until one worker gets SIGTERM; return also the step of the last save."""
    results = run(
        fit,
        num_workers=num_workers,
        args=(str(folder),),
        kwargs={"victim": victim},
        deadline_seconds=150,
        check=False,
    )
    assert set(results.exit_codes.values()) == {ExitCode.RETRY}
    steps = {
        re.findall(r"training is saved after step (\d+)", results[name].output)[0]
        for name in results
    }
    assert len(steps) == 1, "all workers stop after the same step"
    (step,) = steps
    assert 13 <= int(step) < 30
    return results, step


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_another_number_of_workers_continues(
    tmp_path: Path, before: int, after: int
) -> None:
    interrupted(tmp_path / "some", before, victim=before - 1)
    results = run(
        fit, num_workers=after, args=(str(tmp_path / "some"),), deadline_seconds=150
    )
    whole = fit(str(tmp_path / "one"), strategy=rx.OneDeviceStrategy("cpu:0"))
    for value in results.returned.values():
        assert_same(value, whole)


SCRIPT = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("the_test", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
victim = None if sys.argv[3] == "none" else int(sys.argv[3])
result = module.fit(sys.argv[2], victim=victim, number=9, dropout=0.2)
digest = hashlib.sha256(b"".join(w.tobytes() for w in result["weights"])).hexdigest()
print("digest", digest, result["loss"])
"""


def launched(tmp_path: Path, victim: str) -> tuple[list[str], str]:
    """Run the launcher; return the digests of all workers' weights, and its output."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = "from replicax.cli import main; main()"
    options = ["--workers", "2", "--max-restarts", "2", "--backoff-seconds", "0.1"]
    arguments = [str(script), __file__, str(tmp_path / f"backup-{victim}"), victim]
    done = subprocess.run(
        [sys.executable, "-c", command, "run", *options, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"digest (.*)", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("victim", ["0", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sigkill_and_restart_end_with_the_same_bits(
    tmp_path: Path, victim: str
) -> None:
    digests, output = launched(tmp_path, victim)
    undisturbed, _ = launched(tmp_path, "none")
    assert f"worker:{victim} was killed by SIGKILL" in output
    assert "continues in epoch" in output
    assert len(undisturbed) == 2
    assert set(digests) == set(undisturbed), "weights and losses, bit by bit"


def loop(folder: str, num_steps: int, damage: bool = False) -> dict[str, Any]:
    """A custom loop with a manager; returns the examples of each step."""
    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=90))
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="none")

    def step(batch: Any) -> Any:
        part = rx.get_replica_context().all_reduce("sum", batch.sum())
        total.assign_add(part)
        return batch

    data = strategy.experimental_distribute_dataset(
        np.arange(40, dtype="float32"), batch_size=4
    )
    iterator = iter(data)
    checkpoint = rx.Checkpoint(total=total, iterator=iterator, step=0)
    if damage and strategy.workers.is_chief:
        newest = rx.latest_checkpoint(folder)
        assert newest is not None
        for path in Path(newest).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    strategy.workers.exchange("damage is done", None)
    seen = []
    # As in TensorFlow's guide, workers other than the chief name their own folders.
    own = folder if strategy.workers.is_chief else f"{folder}/workertemp_1"
    with rx.CheckpointManager(checkpoint, own, max_to_keep=3) as manager:
        assert manager.directory == folder
        restored = manager.restore_or_initialize()
        begin = checkpoint.step
        for _ in range(num_steps):
            batch = next(iterator, None)
            if batch is None:
                break
            out = strategy.gather(strategy.run(step, (batch,)), axis=0)
            seen.append(np.asarray(out).tolist())
            checkpoint.step += 1
            manager.save()
    return {
        "seen": seen,
        "total": float(total),
        "begin": begin,
        "restored": restored,
    }


@pytest.mark.slow
def test_a_custom_loop_with_a_manager_continues(tmp_path: Path) -> None:
    folder = str(tmp_path / "loop")
    first = run(loop, num_workers=2, args=(folder, 4), deadline_seconds=90).returned
    second = run(
        loop,
        num_workers=2,
        args=(folder, 100),
        kwargs={"damage": True},
        deadline_seconds=90,
    )
    for name, value in second.returned.items():
        # The newest was damaged: one step is repeated.
        assert value["begin"] == 3
        assert value["restored"].endswith("ckpt-3")
        steps = first[name]["seen"][:3] + value["seen"]
        assert np.concatenate(steps).tolist() == list(range(40))
        assert value["total"] == sum(range(40))
    assert "ckpt-4" in second["worker:0"].output, "the damaged one is named"
