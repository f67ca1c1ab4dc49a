"""SidecarEvaluator."""

import json
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from replicax.checkpoint.sidecar import SidecarEvaluator

_X = np.ones((4, 2), "float32")


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return _X, np.zeros((4, 1), "float32")


def model_of() -> keras.Model:
    ones = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), ones])
    model.compile("adam", "mse")
    return model


def lines(folder: Path) -> list[dict]:
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_to_keep", [1, None])
def test_evaluates_until_the_training_ends(tmp_path, capsys, max_to_keep):
    trained = model_of()
    folder = tmp_path / "run"
    manager = CheckpointManager(Checkpoint(model=trained), folder, max_to_keep)

    def train() -> None:
        for bias in range(6):
            trained.layers[0].bias.assign([bias])
            manager.save()
            time.sleep(0.2)
        manager.mark_finished()

    called = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=None)
    callback.on_test_end = lambda logs=None: called.append(logs)
    evaluator = SidecarEvaluator(
        model_of(),
        Data(),
        folder,
        callbacks=[callback],
        timeouts=rx.Timeouts(checkpoint=60),
    )
    thread = threading.Thread(target=train)
    thread.start()
    evaluator.start()
    thread.join(timeout=60)
    evaluations = lines(tmp_path / "eval")
    assert evaluations[-1]["checkpoint"] == str(folder / "ckpt-6")
    assert evaluations[-1]["loss"] == (2 + 5) ** 2
    numbers = [int(line["checkpoint"].rpartition("-")[2]) for line in evaluations]
    assert numbers == sorted(set(numbers))
    for number, line in zip(numbers, evaluations, strict=True):
        assert line["loss"] == (2 + number - 1) ** 2
    assert len(called) == len(evaluations)
    assert f"{folder / 'ckpt-6'}: loss 49" in capsys.readouterr().out


def test_max_evaluations(tmp_path):
    with CheckpointManager(Checkpoint(model=model_of()), tmp_path / "run") as manager:
        manager.save()
    SidecarEvaluator(
        *(model_of(), Data(), tmp_path / "run", None, 1), log_dir=tmp_path / "log"
    ).start()
    assert [line["loss"] for line in lines(tmp_path / "log")] == [4]
    with pytest.raises(ValueError, match="max_evaluations must be at least 1"):
        SidecarEvaluator(model_of(), Data(), tmp_path, max_evaluations=0)


def test_an_unbuilt_model_is_built_and_restored(tmp_path):
    def unbuilt():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    trained = unbuilt()
    trained(_X)
    trained.layers[0].kernel.assign([[1.0], [1.0]])
    manager = CheckpointManager(Checkpoint(model=trained), tmp_path / "run")
    for bias in (3.0, 4.0):
        trained.layers[0].bias.assign([bias])
        manager.save()
        evaluator = SidecarEvaluator(unbuilt(), Data(), tmp_path / "run", None, 1)
        manager.wait()
        evaluator.start()
    assert [line["loss"] for line in lines(tmp_path / "eval")] == [5**2, 6**2]


def test_a_model_that_the_checkpoint_lacks_is_an_error(tmp_path):
    with CheckpointManager(Checkpoint(net=model_of()), tmp_path / "run") as manager:
        manager.save()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with pytest.raises(CheckpointError, match="not in the checkpoint: model/dense"):
        SidecarEvaluator(model, Data(), tmp_path / "run", None, 1).start()


def test_no_checkpoint_within_the_timeout_is_an_error(tmp_path):
    evaluator = SidecarEvaluator(
        model_of(), Data(), tmp_path, timeouts=rx.Timeouts(checkpoint=0.1)
    )
    with pytest.raises(CheckpointError, match=rf"-\* appeared in {tmp_path} within"):
        evaluator.start()


def test_a_damaged_last_checkpoint_is_an_error(tmp_path):
    manager = CheckpointManager(Checkpoint(model=model_of()), tmp_path)
    manager.save()
    manager.mark_finished()
    (tmp_path / "ckpt-1" / "manifest.json").write_text("")
    evaluator = SidecarEvaluator(model_of(), Data(), tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        evaluator.start()


def test_a_finished_run_without_checkpoints_is_not_evaluated(tmp_path):
    CheckpointManager(Checkpoint(model=model_of()), tmp_path).mark_finished()
    SidecarEvaluator(model_of(), Data(), tmp_path, log_dir=tmp_path / "log").start()
    assert not (tmp_path / "log").exists()
