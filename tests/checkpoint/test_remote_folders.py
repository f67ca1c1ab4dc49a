"""Folders in a bucket are refused; they would be local folders named `gs:`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import replicax as rx
from replicax.cli import app

CHECKPOINT = rx.Checkpoint(step=1)

CALLS: list[Callable[[str], object]] = [
    CHECKPOINT.save,
    CHECKPOINT.write,
    CHECKPOINT.restore,
    rx.latest_checkpoint,
    lambda url: rx.CheckpointManager(CHECKPOINT, url),
    lambda url: rx.experimental.PreemptionCheckpointHandler(None, CHECKPOINT, url),
    rx.BackupAndRestore,
    lambda url: rx.SidecarEvaluator(model(), None, url),
    lambda url: rx.SidecarEvaluator(model(), None, "run", log_dir=url),
    rx.callbacks.Report,
    lambda url: rx.estimator.BaselineRegressor(model_dir=url),
]


def model() -> object:
    import keras

    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "gs:/bucket/a"])
@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_is_refused(
    call: Callable[[str], object],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Mount it") as caught:
        call(url)
    assert repr(url) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_report_in_a_bucket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(app, ["run", "--report", "gs://b/r.html", "train.py"])
    assert result.exit_code == 2
    assert "Mount it" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
