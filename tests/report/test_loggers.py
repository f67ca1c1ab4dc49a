"""Loggers on two workers: `fit` and a loop of one's own log once."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.callbacks import remote_monitor

import replicax as rx
import replicax.testing

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.multiprocess

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Logger(keras.callbacks.Callback):
    """A callback that only logs, as those of W&B and MLflow."""

    def __init__(self, logged: list[Any]) -> None:
        super().__init__()
        self._logged = logged

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._logged.append(("epoch", float(logs["loss"])))


def logged(folder: str) -> list[Any]:
    """What a worker sends to the outside; event files go to `folder`."""
    sent: list[Any] = []
    remote_monitor.requests = SimpleNamespace(
        post=lambda *_, **__: sent.append("remote")
    )
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callbacks: list[Any] = [
        rx.callbacks.TensorBoard(os.path.join(folder, "fit")),
        keras.callbacks.RemoteMonitor(send_as_json=True),
    ]
    writer = None
    if strategy.is_chief:
        callbacks.append(Logger(sent))
        writer = rx.SummaryWriter(os.path.join(folder, "loop"))
    model.fit(X, Y, batch_size=16, epochs=2, callbacks=callbacks, verbose=0)

    def step(batch: Any) -> Any:
        x, y = batch
        return rx.compute_average_loss(keras.losses.mean_squared_error(y, model(x)))

    for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=32):
        loss = float(strategy.reduce("sum", strategy.run(step, (batch,))))
        if writer is not None:
            writer.scalar("loss", loss, step=0)
            writer.close()
            sent.append(("loop", loss))
    return sent


def test_two_workers_log_once(tmp_path: Path) -> None:
    results = replicax.testing.run(
        logged,
        args=(str(tmp_path),),
        num_workers=2,
        logical_devices=1,
        deadline_seconds=120,
    )
    chief, other = (results[f"worker:{i}"].value for i in range(2))
    assert [x if isinstance(x, str) else x[0] for x in chief] == [
        "remote",
        "epoch",
        "remote",
        "epoch",
        "loop",
    ]
    assert other == []
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    folders = sorted(str(p.parent.relative_to(tmp_path)) for p in files)
    assert folders == ["fit/train", "loop"]
