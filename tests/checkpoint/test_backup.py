"""BackupAndRestore: an interrupted run ends like one that was not interrupted."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.checkpoint import CheckpointError, background
from replicax.checkpoint.backup import BackupAndRestore
from replicax.keras.session import LateCallback

_X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
_Y = _X[:, :1]
_BATCH = 8  # Seven batches, the last one of two.
_STEPS = 7

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


class Interrupt(keras.callbacks.Callback):
    """Raises after a number of steps."""

    def __init__(self, after: int):
        super().__init__()
        self.steps_left = after

    def on_train_batch_end(self, batch, logs=None):
        self.steps_left -= 1
        if not self.steps_left:
            raise InterruptedError


def model_of(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile(options.pop("optimizer", "adam"), "mse", metrics=["mae"], **options)
    return model


def arrays(**options: Any) -> dict[str, Any]:
    return {"x": _X, "y": _Y, "batch_size": _BATCH, **options}


def outcome(
    data: Callable[[], dict[str, Any]], callbacks: list[Any], **options: Any
) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    """Train; return the weights, optimizer state, next random numbers, and history."""
    model = model_of(**options)
    fit = {"epochs": 3, "verbose": 0, "callbacks": callbacks, **data()}
    history = model.fit(**fit).history
    variables = [*model.variables, *model.optimizer.variables]
    values = [np.asarray(v.value) for v in variables]
    return [*values, np.random.random(2)], history


def assert_equal(actual: Any, expected: Any) -> None:
    for a, e in zip(actual[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, e)
    # In one run, some callbacks log the learning rate as a NumPy number.
    assert actual[1].keys() == expected[1].keys()
    for name in expected[1]:
        assert [float(x) for x in actual[1][name]] == [
            float(x) for x in expected[1][name]
        ]


@functools.cache
def uninterrupted(data: Callable[[], dict[str, Any]]) -> Any:
    """The outcome of Keras' own loop, or of ours if it orders epochs differently."""
    is_reshuffled = data in (grain_map, grain_iter)
    return outcome(data, [LateCallback()] if is_reshuffled else [])


def check(
    folder: Path,
    data: Callable[[], dict[str, Any]],
    interrupt_after: list[int],
    *,
    save_freq: Any = 1,
    others: Callable[[], list[Any]] = list,
    **options: Any,
) -> None:
    """Assert that an interrupted run ends like one that was not interrupted."""
    if options or others is not list:
        expected = outcome(data, others(), **options)
    else:
        expected = uninterrupted(data)
    for steps in interrupt_after:
        callbacks = [BackupAndRestore(folder, save_freq), *others(), Interrupt(steps)]
        with pytest.raises(InterruptedError):
            outcome(data, callbacks, **options)
    actual = outcome(data, [BackupAndRestore(folder, save_freq), *others()], **options)
    assert_equal(actual, expected)
    assert not folder.exists()


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "backup-best").mkdir()
    outcome(arrays, [BackupAndRestore(tmp_path, 4)])
    assert sorted(os.listdir(tmp_path)) == ["backup-best", "notes"]
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("after", [7, *slow(1, 6, 14, 20)])
def test_a_run_interrupted_at_any_step_ends_equal(tmp_path, after):
    check(tmp_path / "b", arrays, [after])


@pytest.mark.slow
def test_backups_that_are_some_steps_old(tmp_path):
    check(tmp_path / "b", arrays, [5, 9], save_freq=3)
    check(tmp_path / "c", arrays, [5, 12], save_freq="epoch")
    check(tmp_path / "d", arrays, [12], save_freq=100)


@pytest.mark.parametrize("after", [2, *slow(3, 4)])
def test_steps_of_several_batches(tmp_path, after):
    check(tmp_path / "b", arrays, [after], steps_per_execution=3)


@pytest.mark.parametrize("replicas", [*slow(1), 2])
@pytest.mark.parametrize("steps_per_execution", [*slow(1), 3])
@pytest.mark.slow
def test_under_a_strategy(tmp_path, replicas, steps_per_execution):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        check(tmp_path / "b", arrays, [4, 3], steps_per_execution=steps_per_execution)


class Batches(keras.utils.PyDataset):
    """Shuffles itself between epochs, with NumPy's own generator."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.order = np.arange(_STEPS)

    def __len__(self):
        return _STEPS

    def __getitem__(self, index):
        rows = slice(self.order[index] * _BATCH, (self.order[index] + 1) * _BATCH)
        return _X[rows], _Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def rows_of(index: int) -> tuple[np.ndarray, np.ndarray]:
    return _X[index % 50][None], _Y[index % 50][None]


def generator():
    while True:
        rows = np.random.permutation(50)[:_BATCH]
        yield _X[rows], _Y[rows]


def grain_map(**options: Any) -> dict[str, Any]:
    data = grain.MapDataset.range(50).seed(1).shuffle().map(lambda i: (_X[i], _Y[i]))
    return {"x": data.batch(_BATCH), "shuffle": False, **options}


def grain_endless() -> dict[str, Any]:
    data = grain.MapDataset.range(50).seed(1).shuffle().repeat()
    data = data.map(lambda i: (_X[i], _Y[i])).batch(_BATCH)
    return {"x": data, "shuffle": False, "steps_per_epoch": 5}


def grain_iter() -> dict[str, Any]:
    data = grain_map()["x"].to_iter_dataset()
    return {"x": data, "shuffle": False}


@pytest.mark.parametrize(
    "data",
    [
        lambda: arrays(shuffle=False),
        lambda: arrays(shuffle="batch"),
        lambda: arrays(steps_per_epoch=4, batch_size=4),
        lambda: arrays(validation_split=0.2),
        lambda: {"x": Batches(), "shuffle": False},
        lambda: {"x": Batches(), "shuffle": True},
        lambda: {"x": generator(), "shuffle": False, "steps_per_epoch": 5},
        grain_map,
        grain_endless,
        grain_iter,
    ],
    ids=[
        *("in-order", "shuffled-batches", "steps-per-epoch", "validation"),
        *("py-dataset", "py-dataset-shuffled", "generator"),
        *("grain-map", "grain-endless", "grain-iter"),
    ],
)
@pytest.mark.slow
def test_every_kind_of_data(tmp_path, data):
    # Within an epoch, at its last step, and within a later epoch.
    check(tmp_path / "b", data, [2, 5, 4])


@pytest.mark.parametrize("save_freq", [*slow("epoch"), 1])
@pytest.mark.slow
def test_other_callbacks_continue(tmp_path, save_freq):
    def others() -> list[Any]:
        return [
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", patience=1, min_delta=9.0
            ),
            keras.callbacks.EarlyStopping(
                monitor="loss", patience=3, min_delta=9.0, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.weights.h5"),
                monitor="val_loss",
                save_best_only=True,
                save_weights_only=True,
            ),
        ]

    def data() -> dict[str, Any]:
        return arrays(epochs=8, validation_data=(_X[:9], _Y[:9]))

    expected = outcome(data, others())
    assert len(expected[1]["loss"]) == 4  # It stops early.
    assert len(set(expected[1]["learning_rate"])) > 1
    check(tmp_path / "b", data, [16, 9], save_freq=save_freq, others=others)


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(tmp_path):
    backup = tmp_path / "b"
    callbacks = [BackupAndRestore(backup, 4, delete_checkpoint=False)]
    expected = outcome(arrays, callbacks)
    assert (backup / "FINISHED").exists()
    callbacks = [BackupAndRestore(backup, delete_checkpoint=False)]
    again = outcome(arrays, callbacks)
    assert_equal((again[0][:-1], again[1]), (expected[0][:-1], expected[1]))
    longer = lambda: arrays(epochs=4)  # noqa: E731
    assert len(outcome(longer, [BackupAndRestore(backup)])[1]["loss"]) == 4
    # Afterwards, `fit` trains a model normally.
    model = model_of()
    for _ in range(2):
        history = model.fit(
            _X, _Y, epochs=2, verbose=0, callbacks=[BackupAndRestore(backup)]
        )
        assert len(history.history["loss"]) == 2


@pytest.mark.slow
def test_fit_continues_before_a_damaged_backup(tmp_path):
    expected = uninterrupted(arrays)
    with pytest.raises(InterruptedError):
        outcome(arrays, [BackupAndRestore(tmp_path / "b", 2), Interrupt(12)])
    background.finish()
    newest = tmp_path / "b" / "backup-12"
    (newest / "manifest.json").write_bytes(b"")
    actual = outcome(arrays, [BackupAndRestore(tmp_path / "b", 2)])
    assert_equal(actual, expected)


def test_a_backup_of_another_model_or_data_is_an_error(tmp_path):
    with pytest.raises(InterruptedError):
        outcome(arrays, [BackupAndRestore(tmp_path / "b", 1), Interrupt(4)])
    with pytest.raises(ValueError, match="is at step 4 of epoch 0, and no execution"):
        outcome(arrays, [BackupAndRestore(tmp_path / "b")], steps_per_execution=3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with pytest.raises(CheckpointError, match=r"model/dense/kernel: .* saved, .* here"):
        model.fit(_X, _Y, verbose=0, callbacks=[BackupAndRestore(tmp_path / "b")])
    short = lambda: {"x": _X[:16], "y": _Y[:16], "batch_size": 8}  # noqa: E731
    with pytest.raises(ValueError, match=r"the data ends after 2 batches.* after 4"):
        outcome(short, [BackupAndRestore(tmp_path / "b")])
    with pytest.raises(ValueError, match=r"save_freq must be .*got 'step'"):
        BackupAndRestore(tmp_path / "b", "step")


def test_a_failed_last_save_is_an_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"last save failed.*file/b/backup-21"):
        outcome(
            arrays, [BackupAndRestore(tmp_path / "file" / "b", delete_checkpoint=False)]
        )
    assert "backup-7: could not be written" in caplog.text
