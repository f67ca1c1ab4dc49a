"""An evaluator beside a cluster that trains."""

import json
from pathlib import Path
from typing import Any

import keras
import pytest
from sklearn.datasets import load_digits

import replicax as rx
from replicax.testing import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def train_or_evaluate(folder: str) -> dict[str, Any]:
    """The same script in every task; what it does follows from its role."""
    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=90))
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    held_out = (images[1500:], labels[1500:])
    if strategy.task_type == "evaluator":
        rx.SidecarEvaluator(
            model,
            held_out,
            folder,
            checkpoint_name="backup",
            timeouts=rx.Timeouts(checkpoint=60),
        ).start()
        return {"num_workers": strategy.num_workers}
    backup = rx.BackupAndRestore(folder, delete_checkpoint=False)
    model.fit(
        images[:1500],
        labels[:1500],
        batch_size=64,
        epochs=3,
        callbacks=[backup],
        verbose=0,
    )
    loss = model.evaluate(*held_out, verbose=0)
    return {"loss": loss, "num_workers": strategy.num_workers}


@pytest.mark.slow
def test_the_last_checkpoint_is_evaluated(tmp_path: Path) -> None:
    results = run(
        train_or_evaluate,
        tasks={"worker": 2, "evaluator": 1},
        args=(str(tmp_path / "run"),),
        deadline_seconds=120,
    )
    values = results.returned
    assert values["evaluator:0"] == {"num_workers": 1}, "it trains with nobody"
    assert values["worker:1"]["num_workers"] == 2
    text = (tmp_path / "eval" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["checkpoint"].endswith("backup-72"), "3 epochs of 24 steps"
    # One replica and two add up losses in another order.
    assert lines[-1]["loss"] == pytest.approx(values["worker:0"]["loss"], rel=1e-5)
