"""Files of callbacks on workers other than the chief go to a folder that is deleted."""

import os
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
from keras.src.callbacks import remote_monitor

from replicax.keras.session import discarded_files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the launcher, which deletes it at the end of the job."""
    monkeypatch.setenv("REPLICAX_REPORT_DIR", str(tmp_path))
    return tmp_path


def test_files_lie_in_the_launchers_folder(folder):
    saves = keras.callbacks.ModelCheckpoint("models/{epoch}.keras")
    logs = keras.callbacks.CSVLogger("log.csv")
    with discarded_files([keras.callbacks.History(), saves, logs]):
        for path, name in ((saves.filepath, "0.keras"), (logs.filename, "log.csv")):
            assert Path(path).name == name
            assert Path(path).parents[2] == folder
            Path(path).write_text("discarded")
    assert (saves.filepath, logs.filename) == ("models/{epoch}.keras", "log.csv")
    assert os.listdir(folder) == []


def test_folder_of_tensorboard_is_another_before_it_opens_files(folder):
    events = keras.callbacks.TensorBoard("events", write_graph=False)
    with discarded_files([events]):
        events.set_model(keras.Sequential([keras.Input((1,))]))
        assert Path(events._train_dir).parents[3] == folder
    assert events.log_dir == "events"


def test_only_the_chief_sends_messages(folder, monkeypatch):
    sent = []
    monkeypatch.setattr(remote_monitor, "requests", SimpleNamespace(post=sent.append))
    monitor = keras.callbacks.RemoteMonitor(send_as_json=True)
    with discarded_files([monitor]):
        monitor.on_epoch_end(0, {"loss": 1.0})
    assert sent == []
    assert "on_epoch_end" not in vars(monitor)


def test_without_such_callbacks_there_is_no_folder(folder):
    with discarded_files([keras.callbacks.History()]):
        assert os.listdir(folder) == []  # A killed worker could not delete it.
