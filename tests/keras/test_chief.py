"""On workers other than the chief callbacks log nothing, and files are discarded."""

import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import keras
import pytest
from keras.src.callbacks import remote_monitor

import replicax as rx
from replicax.keras.chief import only_on_chief

OTHER = SimpleNamespace(is_chief=False)
CHIEF = SimpleNamespace(is_chief=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the launcher, which deletes it at the end of the job."""
    monkeypatch.setenv("REPLICAX_REPORT_DIR", str(tmp_path))
    return tmp_path


def test_files_lie_in_the_launchers_folder(folder):
    saves = keras.callbacks.ModelCheckpoint("models/{epoch}.keras")
    logs = keras.callbacks.CSVLogger("log.csv")
    with only_on_chief([keras.callbacks.History(), saves, logs], OTHER):
        for path, name in ((saves.filepath, "0.keras"), (logs.filename, "log.csv")):
            assert Path(path).name == name
            assert Path(path).parents[2] == folder
            Path(path).write_text("discarded")
    assert (saves.filepath, logs.filename) == ("models/{epoch}.keras", "log.csv")
    assert os.listdir(folder) == []


def test_folder_of_tensorboard_is_another_before_it_opens_files(folder):
    events = keras.callbacks.TensorBoard("events", write_graph=False)
    with only_on_chief([events], OTHER):
        events.set_model(keras.Sequential([keras.Input((1,))]))
        assert Path(events._train_dir).parents[3] == folder
    assert events.log_dir == "events"


def test_only_the_chief_sends_messages(folder, monkeypatch):
    sent = []
    monkeypatch.setattr(remote_monitor, "requests", SimpleNamespace(post=sent.append))
    monitor = keras.callbacks.RemoteMonitor(send_as_json=True)
    with only_on_chief([monitor], OTHER):
        monitor.on_epoch_end(0, {"loss": 1.0})
    assert sent == []
    assert "on_epoch_end" not in vars(monitor)


def test_without_such_callbacks_there_is_no_folder(folder):
    with only_on_chief([keras.callbacks.History()], OTHER):
        assert os.listdir(folder) == []  # A killed worker could not delete it.


class Tracker(keras.callbacks.Callback):
    """A callback of the user's that records its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def set_model(self, model):
        self.calls.append("model")
        super().set_model(model)

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(epoch)

    def on_test_end(self, logs=None):
        self.calls.append("test")


@pytest.fixture
def package(monkeypatch):
    """A function that makes a stand-in for a tracker's package, with a callback."""

    def make(name, module=None, **members):
        stand_in = ModuleType(name)
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, name, stand_in)
        return type("Logger", (Tracker,), {"__module__": module or f"{name}.keras"})()

    return make


def call(callback, strategy):
    """Call a callback as `fit` with validation does; return what it saw."""
    model = keras.Sequential([keras.Input((1,))])
    with only_on_chief([None, callback], strategy):
        listed = keras.callbacks.CallbackList([callback], model=model)
        listed.on_epoch_end(3, {"loss": 1.0})
        listed.on_test_begin()
        listed.on_test_end({"loss": 1.0})
    return callback.calls


@pytest.mark.parametrize("name", ["wandb", "mlflow", "dvclive", "comet_ml"])
def test_known_trackers_are_called_on_the_chief_only(package, name):
    runs = {"run": None, "active_run": lambda: None}
    assert call(package(name, **runs), OTHER) == []
    assert call(package(name, **runs), CHIEF) == ["model", 3, "test"]


def test_on_chief_is_called_on_the_chief_only():
    assert call(rx.callbacks.on_chief(Tracker()), CHIEF) == ["model", 3, "test"]
    other = rx.callbacks.on_chief(Tracker())
    before = dict(vars(other))
    assert call(other, OTHER) == []
    assert vars(other) == before  # The next `fit` may have another strategy.
    assert call(Tracker(), OTHER) == ["model", 3, "test"]


def test_functions_of_a_lambda_callback_are_the_chiefs():
    calls = []
    callback = rx.callbacks.on_chief(
        keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: calls.append(1))
    )
    with only_on_chief(callback, OTHER):
        callback.on_epoch_end(0, {})
    assert calls == []
    callback.on_epoch_end(0, {})
    assert calls == [1]


def test_a_tracker_that_saves_the_model_runs_everywhere(folder, package):
    """Reading sharded weights needs all workers."""
    package("wandb", run=None)
    kind = type(
        "WandbModelCheckpoint",
        (keras.callbacks.ModelCheckpoint,),
        {"__module__": "wandb.integration.keras"},
    )
    saver = kind("models/a.keras")
    with only_on_chief([saver], OTHER):
        assert Path(saver.filepath).parents[2] == folder
        assert "on_epoch_end" not in vars(saver)


def test_a_subclass_in_the_users_code_runs_everywhere(package):
    """`WandbEvalCallback` predicts in its subclass, which needs all workers."""
    base = type(package("wandb", run=None))
    assert call(type("Mine", (base,), {"__module__": "train"})(), OTHER) != []


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("wandb", {"run": SimpleNamespace(disabled=False)}),
        ("mlflow", {"active_run": object}),
    ],
)
def test_a_second_run_is_named(package, caplog, name, members):
    callback = package(name, **members)
    with caplog.at_level(logging.WARNING, "replicax"):
        call(callback, CHIEF)
        assert not caplog.records
        call(callback, OTHER)
    (text,) = caplog.messages
    assert f"active run of {name}" in text
    assert "strategy.is_chief" in text


def test_a_disabled_run_is_no_second_run(package, caplog):
    call(package("wandb", run=SimpleNamespace(disabled=True)), OTHER)
    assert not caplog.records


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.callbacks.EarlyStopping(),
        lambda: keras.callbacks.ModelCheckpoint("a.keras"),
        lambda: rx.callbacks.TensorBoard("logs"),
        lambda: type("Mine", (keras.callbacks.ReduceLROnPlateau,), {})(),
    ],
)
def test_on_chief_refuses_what_all_workers_must_run(make):
    callback = make()
    with pytest.raises(ValueError, match="which all workers must run"):
        rx.callbacks.on_chief(callback)


def test_on_chief_refuses_what_is_no_callback():
    with pytest.raises(TypeError, match=r"Callback; got .*Tracker.*is_chief"):
        rx.callbacks.on_chief(Tracker)
