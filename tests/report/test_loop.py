"""`Report.recording`: custom loops on the page."""

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.conftest import mirrored
from tests.report.loops import X, fits_of, make_step, on_worker, train

import replicax as rx
import replicax.testing
from replicax.report.runs import read_run


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


@pytest.mark.parametrize("way", ["run", "watch", "nothing"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_and_examples_are_those_of_the_loop(num_replicas, way, page) -> None:
    losses = train(mirrored(num_replicas), page, way)
    (fit,) = fits_of(page)
    assert fit.end.state == "done"
    assert [e.number for e in fit.epochs] == [0, 1]
    for epoch, loss in zip(fit.epochs, losses, strict=True):
        counts = epoch.counts
        assert (counts["steps"], counts["executions"]) == (3, 3)
        assert counts["examples"] == 21
        assert epoch.logs == {"loss": pytest.approx(loss)}
        assert epoch.memory.bytes is not None
    # The last batch has another shape.
    assert [e.counts["first_executions"] for e in fit.epochs] == [2, 0]
    assert fit.begin.facts["replicas"] == num_replicas
    assert fit.begin.facts["strategy"] == "MirroredStrategy"
    text = page.read_text()
    assert "loss: training from" in text
    assert 'class="state done"' in text


def test_a_call_of_several_steps(page) -> None:
    train(mirrored(2), page, "watch", num_steps=4)
    assert [e.counts["steps"] for e in fits_of(page)[0].epochs] == [12, 12]
    assert [e.counts["examples"] for e in fits_of(page)[0].epochs] == [21, 21]


def test_only_the_time_of_the_training_counts(page) -> None:
    strategy = mirrored(2)
    step = make_step(strategy, "run")
    weights: Any = jnp.zeros((4,))
    dataset = strategy.experimental_distribute_dataset(X[:16], batch_size=8)
    report = rx.callbacks.Report(page)
    with report.recording(strategy):
        for _ in range(2):
            time.sleep(0.6)
            for batch in dataset:
                weights, _ = step(weights, batch)
            time.sleep(0.6)
            report.end_epoch()
    assert fits_of(page)[0].epochs[1].wall_s < 0.6


def test_slow_input_is_measured(page) -> None:
    def slow() -> Any:
        for _ in range(10):
            time.sleep(0.02)
            yield X[:8]

    strategy = mirrored(2)
    step = make_step(strategy, "run")
    weights: Any = jnp.zeros((4,))
    dataset = strategy.experimental_distribute_dataset(slow, prefetch=0)
    report = rx.callbacks.Report(page)
    with report.recording(strategy):
        for _ in range(2):
            for batch in dataset:
                weights, _ = step(weights, batch)
            report.end_epoch()
    assert fits_of(page)[0].epochs[1].input_share > 0.5


def test_an_epoch_without_an_end_and_the_next_recording(page) -> None:
    strategy = mirrored(2)
    report = rx.callbacks.Report(page)
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)
    for _ in range(2):
        with report.recording(strategy):
            for batch in dataset:
                strategy.run(jnp.sum, args=(batch,))
    assert [[e.counts["steps"] for e in f.epochs] for f in fits_of(page)] == [[3], [3]]
    assert strategy.input_shard.recorder is None


def test_a_resumed_loop_goes_on(page, monkeypatch) -> None:
    train(mirrored(2), page, "run")
    monkeypatch.setattr("replicax.report.session._num_fits", {})  # Another process.
    train(mirrored(2), page, "run", initial_epoch=2)
    assert [[e.number for e in f.epochs] for f in fits_of(page)] == [[0, 1], [2, 3]]


def test_an_exception_interrupts_the_report(page) -> None:
    strategy = mirrored(2)
    report = rx.callbacks.Report(page)
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)

    def interrupted() -> None:
        with report.recording(strategy):
            for batch in dataset:
                strategy.run(jnp.sum, args=(batch,))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (fit,) = fits_of(page)
    assert fit.end.state == "interrupted"
    assert fit.end.error == "KeyboardInterrupt:  (epoch 1, step 3)"
    assert "worker:0 was interrupted: KeyboardInterrupt" in page.read_text()
    with report.recording(strategy):
        pass


def test_what_is_refused(page) -> None:
    strategy = mirrored(2)
    report = rx.callbacks.Report(page)
    other = rx.callbacks.Report(page.with_name("other.html"))
    with pytest.raises(rx.ContextError, match="end_epoch: called outside of recording"):
        report.end_epoch({"loss": 1.0})
    with pytest.raises(ValueError, match="initial_epoch"):
        report.recording(strategy, initial_epoch=-1).__enter__()
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)
    with report.recording(strategy):
        with pytest.raises(RuntimeError, match=r"epoch 1 had no step. Pass batches"):
            report.end_epoch()
        for again, on in ((report, mirrored(1)), (other, strategy)):
            with pytest.raises(rx.ContextError, match=r"html' .* another recording"):
                again.recording(on).__enter__()
        losses: Any = None
        for batch in dataset:
            losses = strategy.run(jnp.sum, args=(batch,))
        with pytest.raises(TypeError, match=r"logs\['loss'\] .* PerReplica.*reduce"):
            report.end_epoch({"loss": losses})
        report.end_epoch({"loss": strategy.reduce("sum", losses)})
    assert not other.path.exists()


def test_a_plan_writes_no_page(page, monkeypatch) -> None:
    strategy = mirrored(2)
    monkeypatch.setattr(strategy.runner, "is_dry", True)
    train(strategy, page, "run")
    assert not page.exists()


def test_a_recording_inside_fit_and_fit_inside_a_recording(page) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report = rx.callbacks.Report(page)
    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: report.recording(strategy).__enter__()
    )
    with pytest.raises(rx.ContextError, match="cannot record inside fit"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[record])
    with (
        report.recording(strategy),
        pytest.raises(ValueError, match="the loop around it, already has a Report"),
    ):
        model.fit(X, X[:, :1], verbose=0, callbacks=[rx.callbacks.Report(page)])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_workers(page) -> None:
    results = replicax.testing.run(on_worker, num_workers=2, args=(str(page),))
    run = read_run(page)
    assert [w.name for w in run.workers] == ["worker:0", "worker:1"]
    for worker in run.workers:
        (fit,) = worker.fits
        assert fit.end.state == "done"
        counts = [(e.counts["steps"], e.counts["examples"]) for e in fit.epochs]
        assert counts == [(3, 21)] * 2  # Of all workers.
        losses = [e.logs["loss"] for e in fit.epochs]
        np.testing.assert_allclose(losses, results.returned[worker.name], rtol=1e-6)
    assert "No data from" not in page.read_text()
