"""Event files, read with TensorBoard's own reader."""

import copy
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

pytest.importorskip(
    "tensorboard", reason="tensorboard is not installed: replicax[tensorboard]"
)
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def read(folder: Path) -> dict[str, dict[int, Any]]:
    """Read the only event file of a folder: arrays by chart and step."""
    from tensorboard.util.tensor_util import make_ndarray

    (path,) = folder.iterdir()
    charts: dict[str, dict[int, Any]] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            charts.setdefault(value.tag, {})[event.step] = make_ndarray(value.tensor)
    return charts


def make(strategy: rx.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="d")])
        model.compile(keras.optimizers.SGD(0.125), "mse", metrics=["mae"])
    return model


def fit(strategy: rx.Strategy, folder: Path, **options: Any) -> keras.callbacks.History:
    board = rx.callbacks.TensorBoard(folder, **options)
    model = make(strategy)
    return model.fit(
        *(X, Y),
        batch_size=16,
        epochs=3,
        validation_data=(X, Y),
        callbacks=[board],
        verbose=0,
    )


def test_epochs_steps_and_weights_are_written(tmp_path: Path) -> None:
    history = fit(mirrored(2), tmp_path, update_freq=3, histogram_freq=2)
    train, validation = read(tmp_path / "train"), read(tmp_path / "validation")
    for name in ("loss", "mae"):
        values = history.history[name]
        assert [train[f"epoch_{name}"][i] for i in range(3)] == pytest.approx(values)
        values = history.history[f"val_{name}"]
        found = [validation[f"epoch_{name}"][i] for i in range(3)]
        assert found == pytest.approx(values)
        by_steps = validation[f"evaluation_{name}_vs_iterations"]
        assert [by_steps[i] for i in (4, 8, 12)] == pytest.approx(values)
        assert set(train[f"batch_{name}"]) == {3, 6, 9, 12}
    assert train["epoch_learning_rate"][2] == 0.125
    # The logs of an epoch's last step are the epoch's.
    assert train["batch_loss"][12] == pytest.approx(history.history["loss"][-1])
    weights = history.model.layers[0].kernel
    kernels = train[f"{weights.path}/histogram"]
    assert set(kernels) == {0, 2}
    edges_and_counts = kernels[2]
    assert edges_and_counts[:, 2].sum() == 6
    assert edges_and_counts[0, 0] == pytest.approx(np.min(weights))
    assert edges_and_counts[-1, 1] == pytest.approx(np.max(weights))


def test_fit_waits_for_no_step_without_an_update_freq(tmp_path: Path) -> None:
    fit(mirrored(2), tmp_path)
    assert not any(name.startswith("batch_") for name in read(tmp_path / "train"))
    board = rx.callbacks.TensorBoard(tmp_path)
    # `fit` waits for each step only for a callback that overrides this method.
    assert board.on_train_batch_end.__func__ is (
        keras.callbacks.Callback.on_train_batch_end
    )


def test_a_summary_writer(tmp_path: Path) -> None:
    with rx.SummaryWriter(tmp_path / "own") as writer:
        writer.scalar("loss", np.float32(0.5), step=np.int64(7))
        writer.histogram("empty", np.zeros((0, 3)), step=1)
        with pytest.raises(ValueError, match="scalar shape"):
            writer.scalar("loss", [1.0, 2.0], step=8)
        writer.flush()
        assert read(tmp_path / "own")["loss"] == {7: 0.5}
    assert "tensorflow" not in sys.modules


def test_a_missing_package_raises_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "tensorboard.summary.writer.record_writer"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'replicax\[tensorboard\]'"):
        rx.callbacks.TensorBoard()


@pytest.mark.parametrize("callback", ["TensorBoard", "Report", "BackupAndRestore"])
def test_copied_callbacks_are_independent(callback: str, tmp_path: Path) -> None:
    """KerasTuner's trials train with deep copies."""
    make_callback: Any = {
        "TensorBoard": lambda: rx.callbacks.TensorBoard(tmp_path / "t", update_freq=1),
        "Report": lambda: rx.callbacks.Report(tmp_path / "r.html", diagnosis=False),
        "BackupAndRestore": lambda: rx.BackupAndRestore(
            tmp_path / "b", delete_checkpoint=False
        ),
    }[callback]
    first = make_callback()
    for copied in (copy.deepcopy(first), copy.deepcopy(first)):
        make(mirrored(2)).fit(X, Y, callbacks=[copied], verbose=0)
    written = {path.name for path in tmp_path.iterdir()}
    assert written & {"t", "r.html", "b"}
    if callback == "TensorBoard":
        assert len(list((tmp_path / "t" / "train").iterdir())) == 2
