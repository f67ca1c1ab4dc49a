"""Checkpoints contain the servers' optimizer state, so restored training continues.

There is one worker, so that all runs of a model are comparable. Variables are split, so
that the optimizer state of one variable lies on several servers.
"""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

EPOCHS = 4
X, Y = load_digits(return_X_y=True)
X, Y = (X[:200] / 16).astype("float32"), Y[:200]
# Sums over workers and servers are made in another order than on one device.
TOLERANCE = {"rtol": 0, "atol": 1e-5}


class InterruptedError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


def make_model(strategy, optimizer="adam"):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.get(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def fit(model, *callbacks, **options):
    keras.utils.set_random_seed(5)  # Order of the examples.
    history = model.fit(
        X,
        Y,
        batch_size=32,
        callbacks=list(callbacks),
        verbose=0,
        **{"epochs": EPOCHS, **options},
    )
    return model.get_weights(), history.history


def backed_up(strategy, folder):
    """An interrupted run, and the run that continues it."""
    backup = Path(folder) / "backup"
    model = make_model(strategy)
    with pytest.raises(InterruptedError):
        fit(model, rx.BackupAndRestore(backup), Interrupt())
    strategy.session.barrier("interrupted")
    model = make_model(strategy)
    weights, history = fit(model, rx.BackupAndRestore(backup))
    return weights, history, int(model.optimizer.iterations), backup.exists()


def fit_last_epochs(model):
    # Unshuffled: a new model would draw another order.
    return fit(model, initial_epoch=2, shuffle=False)[0]


def restored(strategy, folder):
    """Runs from a checkpoint: of a model with groups on servers, and of a new model."""
    path = Path(folder) / "checkpoint"
    model = make_model(strategy)
    fit(model, epochs=2)
    if strategy.is_chief:
        rx.Checkpoint(model=model).write(path)
    after = fit_last_epochs(model)
    runs = []
    for again in (model, make_model(strategy)):
        strategy.session.barrier("before it is restored")
        if strategy.is_chief:
            rx.Checkpoint(model=again).restore(path).assert_consumed()
        runs.append((fit_last_epochs(again), int(again.optimizer.iterations)))
    return after, runs


def refused(strategy, folder):
    """The error for a checkpoint of another optimizer."""
    model = make_model(strategy, {"class_name": "SGD", "config": {"momentum": 0.9}})
    status = rx.Checkpoint(model=model).restore(Path(folder) / "checkpoint")
    status.assert_consumed()
    with pytest.raises(rx.errors.CheckpointError) as caught:
        model.train_on_batch(X[:32], Y[:32])
    return str(caught.value)


def train(*, whole):
    partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = rx.ParameterServerStrategy(
        variable_partitioner=partitioner, timeouts=rx.Timeouts(step=60)
    )
    folder = os.environ["FOLDER"]
    if whole:
        return {
            "whole": fit(make_model(strategy)),
            "backed up": backed_up(strategy, folder),
        }
    results = {"restored": restored(strategy, folder)}
    strategy.session.barrier("the end")
    if strategy.is_chief:
        results["refused"] = refused(strategy, folder)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


def run(folder, *, whole):
    """What the worker returned."""
    results = replicax.testing.run(
        train,
        kwargs={"whole": whole},
        tasks={"worker": 1, "ps": 2},
        logical_devices=1,
        env={"FOLDER": str(folder)},
        deadline_seconds=150,
    )
    return results["worker:0"].value


@pytest.fixture(scope="module")
def worker(folder):
    return run(folder, whole=False)


def assert_close(weights, expected):
    for actual, one in zip(weights, expected, strict=True):
        np.testing.assert_allclose(actual, one, **TOLERANCE)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_slots(folder):
    worker = run(folder, whole=True)
    expected, history = worker["whole"]
    weights, goes_on, iterations, is_there = worker["backed up"]
    assert_close(weights, expected)
    assert iterations == EPOCHS * 7
    assert not is_there
    for name, values in history.items():
        np.testing.assert_allclose(goes_on[name], values, rtol=1e-4)


@pytest.mark.slow
def test_a_restored_model_trains_on_as_it_did(worker):
    after, runs = worker["restored"]
    for weights, iterations in runs:
        assert_close(weights, after)
        assert iterations == EPOCHS * 7


def test_one_device_goes_on_from_the_servers_checkpoint(worker, folder):
    model = make_model(rx.OneDeviceStrategy("cpu:0"))
    rx.Checkpoint(model=model).restore(folder / "checkpoint").assert_consumed()
    assert_close(fit_last_epochs(model), worker["restored"][0])


def test_slots_of_another_optimizer_are_refused(worker):
    assert "velocity" in worker["refused"]
