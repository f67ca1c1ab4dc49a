"""Reports of `replicax run --profile` on real clusters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicax.report.runs import read_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

SCRIPT = """
import sys
import replicax as rx
strategy = rx.{strategy}
import keras, numpy as np
rng = np.random.default_rng(0)
x = rng.normal(size=(640, 6)).astype("float32")
y = x.sum(axis=1, keepdims=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)], name="linear")
    model.compile("sgd", "mse")
callbacks = {callbacks}
model.fit(x, y, batch_size=16, epochs=2, callbacks=callbacks,
          verbose=2 if strategy.is_chief else 0)
"""


def run(folder, *options, **fields):
    process = start(folder, *options, **fields)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def start(folder, *options, strategy="MultiWorkerMirroredStrategy()", callbacks="[]"):
    script = folder / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy, callbacks=callbacks))
    code = "from replicax.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "run", "--workers", "2", *options, str(script)],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_two_workers_in_step(tmp_path: Path) -> None:
    out = run(tmp_path, "--profile", "--logical-devices", "2")
    page = tmp_path / "replicax-report.html"
    result = read_run(page)
    assert [w.name for w in result.workers] == ["worker:0", "worker:1"]
    for worker in result.workers:
        (fit,) = worker.fits
        assert (fit.end.state, len(fit.epochs)) == ("done", 2)
        assert fit.epochs[1].counts["examples"] == 640  # Of all workers.
        assert fit.end.shares["communication"] > 0
    lines = [line for line in out.splitlines() if "examples/s" in line]
    assert len(lines) == 1
    assert lines[0].startswith("worker:0")
    text = page.read_text()
    assert 'class="state done"' in text
    assert text.count('<th scope="row">worker:') == 2
    assert "No data from" not in text


@pytest.mark.slow
def test_two_workers_and_a_server(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    options = ("--ps", "1", "--report", str(tmp_path / "ps.html"))
    out = run(tmp_path, *options, strategy="ParameterServerStrategy()")
    result = read_run(tmp_path / "ps.html")
    assert [w.name for w in result.workers] == ["worker:0", "worker:1"]
    epochs = [[w.fits[0].epochs[i] for w in result.workers] for i in range(2)]
    for both in epochs:
        assert sum(e.counts["examples"] for e in both) == 640  # Each one its own.
        assert sum(sum(e.staleness.values()) for e in both) == 40
        assert all(e.exchange_s > 0 for e in both if e.counts["steps"])
        assert all(e.counts["executions"] == e.counts["steps"] for e in both)
    assert "examples/s" in out
    assert "Staleness of gradients" in (tmp_path / "ps.html").read_text()


@pytest.mark.slow
def test_a_synchronous_worker_without_a_report_is_an_error(tmp_path: Path) -> None:
    callbacks = f"[rx.callbacks.Report({str(tmp_path / 'r.html')!r})]"
    process = start(tmp_path, callbacks=f"{callbacks} if strategy.is_chief else []")
    assert process.returncode != 0
    out = process.stdout + process.stderr
    assert "pass rx.callbacks.Report on all workers" in out
