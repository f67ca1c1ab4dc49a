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
    """A callback of the user's that only logs."""

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
        rx.callbacks.on_chief(Logger(sent)),
    ]
    writer = None
    if strategy.is_chief:
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


def tracked(folder: str, tracker: str) -> tuple[list[float], list[float]]:
    """The losses of `fit`, and those that a tracker has of it."""
    os.chdir(folder)
    alone = "TF_CONFIG" not in os.environ
    strategy = rx.MirroredStrategy() if alone else rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = X[:-1], Y[:-1]  # The last batch does not divide.
    # Unshuffled: autologging draws random numbers of its own.
    train = {"x": x, "y": y, "batch_size": 16, "epochs": 2, "shuffle": False}
    if tracker == "wandb":
        import wandb
        from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

        wandb.init(mode="offline" if strategy.is_chief else "disabled")
        saver = WandbModelCheckpoint("{epoch}.keras")
        history = model.fit(**train, verbose=0, callbacks=[WandbMetricsLogger(), saver])
        losses = [wandb.run.summary["epoch/loss"]] if strategy.is_chief else []
        wandb.finish()
        return history.history["loss"], losses
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/worker.db")
    if tracker == "autolog":
        if strategy.is_chief:
            mlflow.keras.autolog(log_models=False, log_datasets=False)
        history = model.fit(**train, verbose=0, callbacks=[])
    else:
        logger = mlflow.keras.MlflowCallback()
        history = model.fit(**train, verbose=0, callbacks=[logger])
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    metrics = [
        client.get_metric_history(run.info.run_id, "loss")
        for run in client.search_runs(["0"])
    ]
    return history.history["loss"], [x.value for run in metrics for x in run]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "autolog"])
def test_trackers_have_one_run_with_the_values_of_one_process(
    tmp_path: Path, tracker: str
) -> None:
    """With the packages themselves: W&B offline, MLflow with its local store."""
    if tracker == "wandb":
        pytest.importorskip("wandb", reason="W&B is not installed")
        pytest.importorskip("tensorflow", reason="W&B's callbacks import TensorFlow")
    else:
        pytest.importorskip("mlflow", reason="MLflow is not installed")
    logged = {}
    for num_workers in (1, 2):
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        results = replicax.testing.run(
            tracked,
            args=(str(folder), tracker),
            num_workers=num_workers,
            logical_devices=2 // num_workers,
            deadline_seconds=120,
        )
        losses, logged[num_workers] = results["worker:0"].value
        assert logged[num_workers] == losses[-len(logged[num_workers]) :] != []
        runs = list(folder.glob("wandb/offline-run-*"))
        assert len(runs) == (tracker == "wandb")
    np.testing.assert_array_equal(logged[1], logged[2])
