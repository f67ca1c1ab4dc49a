"""`Report` in `fit`, with and without a strategy."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from tests.conftest import mirrored
from tests.report.loops import fits_of

import replicax as rx
from replicax.keras import providers
from replicax.report.callback import report_every_fit, with_report

RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
STRATEGIES = {
    "no strategy": lambda: None,
    "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: mirrored(2),
    "several each": lambda: rx.MirroredStrategy(["cpu:0"], replicas_per_device=2),
    "sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "report.html"


def make(strategy=None, cls=keras.Model, **options):
    scope: Any = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        inputs = keras.Input((6,))
        model = cls(inputs, keras.layers.Dense(1)(inputs), name="linear")
        model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def train(model, page, *, diagnosis=None, callbacks=(), **options):
    options = {"batch_size": 16, "epochs": 2, "verbose": 0} | options
    report = rx.callbacks.Report(page, diagnosis=diagnosis)
    return model.fit(X, Y, callbacks=[report, *callbacks], **options)


def events_of(page):
    file = page.with_name(page.name + ".d") / "worker-0.jsonl"

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = file.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_report_of_two_epochs(name, page, capsys) -> None:
    model = make(STRATEGIES[name]())
    history = train(model, page, validation_data=(X[:32], Y[:32]), diagnosis=True)
    (fit,) = fits_of(page)
    assert fit.end.state == "done"
    assert [e.number for e in fit.epochs] == [0, 1]
    for i, epoch in enumerate(fit.epochs):
        logs = {k: v[i] for k, v in history.history.items()}
        assert epoch.logs == pytest.approx(logs)
        assert (epoch.counts["steps"], epoch.counts["examples"]) == (10, 160)
        assert 0 <= epoch.counts["stalled_s"] <= epoch.wall_s
        assert epoch.memory.bytes is not None
    assert fit.epochs[0].counts["first_executions"] == 1
    assert fit.epochs[1].counts["first_executions"] == 0
    assert sum(v or 0 for v in fit.end.shares.values()) == pytest.approx(1)
    if name == "sharded":  # Gathers of weights are not measured.
        assert fit.end.shares["communication"] is None
    assert fit.end.diagnosis in capsys.readouterr().out
    assert fit.begin.facts["model"] == "linear"
    assert fit.begin.facts["learning_rate"] == pytest.approx(0.01)
    assert "val_mae" not in page.read_text()  # It is a curve of mae.
    assert "mae: training from" in page.read_text()


def test_weights_are_those_without_a_report(page) -> None:
    weights = []
    for reported in (False, True):
        keras.utils.set_random_seed(7)
        model = make(mirrored(2))
        if reported:
            train(model, page, diagnosis=True)
        else:
            model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_verbose_fit_prints_the_diagnosis(verbose, page, capsys) -> None:
    train(make(), page, verbose=verbose)
    out = capsys.readouterr().out
    assert (f"{page}: " in out) == bool(verbose)
    assert bool(fits_of(page)[0].end.diagnosis) == bool(verbose)


def test_fits_one_after_another(page) -> None:
    model = make(mirrored(2))
    train(model, page, epochs=2)
    train(model, page, epochs=3)
    train(model, page, epochs=5, initial_epoch=3)
    fits = fits_of(page)
    assert [len(f.epochs) for f in fits] == [2, 3, 2]
    assert [f.begin.number for f in fits] == [1, 2, 3]
    text = page.read_text()
    assert text.count("fit 2 begins") > 0
    assert "fit 3 begins" not in text  # It continues with epoch 4 of fit 2.
    assert "in epoch 7" in text
    assert "Of training 3, the last one" in text


def test_another_process_replaces_the_page(page, monkeypatch) -> None:
    model = make()
    train(model, page)
    monkeypatch.setattr("replicax.report.session._num_fits", {})
    train(model, page)
    assert len(fits_of(page)) == 1


@pytest.mark.parametrize("how", ["attempt", "initial_epoch"])
def test_a_process_that_resumes_keeps_the_page(how, page, monkeypatch) -> None:
    model = make()
    train(model, page)
    monkeypatch.setattr("replicax.report.session._num_fits", {})
    if how == "attempt":
        monkeypatch.setenv("REPLICAX_ATTEMPT", "1")
    train(model, page, epochs=4, initial_epoch=2 if how == "initial_epoch" else 0)
    assert len(fits_of(page)) == 2


class Boom(keras.callbacks.Callback):
    def __init__(self, error, at=1):
        super().__init__()
        self.error, self.at = error, at

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.at:
            raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("the <b>data</b>"), KeyboardInterrupt(), SystemExit(138)]
)
def test_the_report_of_an_interrupted_fit(error, page) -> None:
    model = make(mirrored(2))
    with pytest.raises(type(error)):
        train(model, page, epochs=4, callbacks=[Boom(error)])
    (fit,) = fits_of(page)
    assert (fit.end.state, len(fit.epochs)) == ("interrupted", 1)
    assert fit.end.error == f"{type(error).__name__}: {error} (epoch 2, step 10)"
    assert f"was interrupted: {type(error).__name__}" in page.read_text()
    assert "<b>data" not in page.read_text()
    train(model, page)  # It can be trained again.
    assert [f.end.state for f in fits_of(page)] == ["interrupted", "done"]


class Later(keras.callbacks.Callback):
    """Adds to the logs after the report's `on_epoch_end`."""

    def on_epoch_end(self, epoch, logs=None):
        logs["bad"] = math.nan if epoch == 0 else math.inf
        logs["vector"] = np.ones(3)
        if epoch:
            logs["late"] = np.float32(0.5)


def test_metrics_of_other_callbacks(page) -> None:
    train(make(), page, epochs=3, callbacks=[Later()])
    logs = [event["logs"] for event in events_of(page) if event["event"] == "epoch"]
    assert [epoch["bad"] for epoch in logs] == ["nan", "inf", "inf"]
    assert ["late" in epoch for epoch in logs] == [False, True, True]
    assert not any("vector" in epoch for epoch in logs)
    assert "late: training from 0.5 in epoch 2" in page.read_text()


@pytest.mark.parametrize("name", ["no strategy", "mirrored"])
def test_several_steps_in_one_execution(name, page) -> None:
    model = make(STRATEGIES[name](), steps_per_execution=4)
    train(model, page, batch_size=10, diagnosis=True)
    for epoch in fits_of(page)[0].epochs:
        assert (epoch.counts["steps"], epoch.counts["executions"]) == (16, 4)
        assert epoch.counts["examples"] == 160


def test_slow_input_is_diagnosed(page, capsys) -> None:
    import time

    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 15

        def __getitem__(self, index):
            time.sleep(0.02)
            return X[:16], Y[:16]

    report = rx.callbacks.Report(page, diagnosis=True)
    make(mirrored(2)).fit(Slow(), epochs=2, verbose=0, callbacks=[report])
    (fit,) = fits_of(page)
    assert fit.epochs[1].input_share > 0.5
    assert "input-bound" in capsys.readouterr().out


def test_a_second_report_is_an_error(page) -> None:
    model = make()
    second = rx.callbacks.Report(page.with_name("other.html"))
    with pytest.raises(ValueError, match=r"got a second one for .*other\.html"):
        train(model, page, callbacks=[second])


def test_a_folder_as_path_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match="path must be a file's name"):
        rx.callbacks.Report(tmp_path)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file/report\.html\.d"):
        train(make(), tmp_path / "file" / "report.html")


@pytest.mark.parametrize("kind", ["none", "one", "list", "CallbackList"])
def test_every_fit_is_reported(kind, page, monkeypatch) -> None:
    monkeypatch.setattr(providers, "add_callbacks", None)
    report_every_fit(str(page))
    model = make(mirrored(2))
    own = keras.callbacks.LambdaCallback()
    given = {
        "none": None,
        "one": own,
        "list": [own],
        "CallbackList": keras.callbacks.CallbackList(
            [own], add_history=True, model=model, epochs=2
        ),
    }[kind]
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=given)
    (fit,) = fits_of(page)
    assert (fit.end.state, bool(fit.end.diagnosis)) == ("done", True)


def test_a_report_of_the_script_is_kept(page) -> None:
    own = rx.callbacks.Report(page)
    assert with_report([[own]], "other.html") == [own]
    callbacks = keras.callbacks.CallbackList([own], model=make())
    assert with_report(callbacks, "other.html") is callbacks
    assert callbacks.callbacks == [own]


def test_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train(make(), "~/report.html", epochs=1)
    assert (tmp_path / "report.html").exists()


def test_the_working_directory_may_change(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = rx.callbacks.Report("report.html")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    make().fit(X, Y, verbose=0, callbacks=[report])
    assert (tmp_path / "report.html").exists()


def test_no_memory_statistics_after_a_device_failure(page, monkeypatch) -> None:
    def fail(devices):
        raise jax.errors.JaxRuntimeError("the device is lost")

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            monkeypatch.setattr("replicax.report.session.memory_of", fail)
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        train(make(), page, callbacks=[Break()])
    text = page.read_text()
    assert "interrupted: ValueError: the first error (epoch 1, step 1)" in text


def test_out_of_memory_in_the_measurement(page, monkeypatch, caplog) -> None:
    def fail(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("replicax.report.session.sum_seconds", fail)
    train(make(mirrored(2)), page, diagnosis=True)
    (fit,) = fits_of(page)
    assert fit.end.state == "done"
    assert fit.end.shares["communication"] is None
    assert "communication not measured" in fit.end.diagnosis
    assert "RESOURCE_EXHAUSTED" in caplog.text


def test_many_short_fits_write_the_page_rarely(page, monkeypatch) -> None:
    written = []
    monkeypatch.setattr(
        "replicax.report.session.write_whole", lambda *whole: written.append(whole)
    )
    model = make()
    for _ in range(4):
        train(model, page, epochs=1)
    assert len(written) == 5  # At the first beginning, and at each end.
