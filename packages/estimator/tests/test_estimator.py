"""Estimators with a `model_fn`: equal on any strategy, and after a resumption."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.strategies.strategy import Strategy
from replicax_estimator import Estimator, EstimatorSpec, ModeKeys, RunConfig, minimize

BATCH = 8


def examples(number: int = 60) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(number, 3)).astype("float32")
    return x, x @ np.array([1.0, -2.0, 0.5], "float32")


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    training = mode == ModeKeys.TRAIN
    hidden = keras.layers.Dense(params.get("units", 4), activation="tanh")(features)
    if params.get("normalize"):
        hidden = keras.layers.BatchNormalization()(hidden, training=training)
    if params.get("dropout"):
        hidden = keras.layers.Dropout(params["dropout"])(hidden, training=training)
    prediction = keras.layers.Dense(1)(hidden)[:, 0]
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"y": prediction, "x": features})
    loss = keras.losses.MeanSquaredError()(labels, prediction)
    mae = keras.metrics.MeanAbsoluteError()
    # Keras' metric would average a vector first, whatever its length.
    mae.update_state(labels[:, None], prediction[:, None])
    optimizer = params.get("optimizer", lambda: keras.optimizers.Adam(0.01))()
    return EstimatorSpec(
        mode,
        predictions={"y": prediction},
        loss=loss,
        train_op=minimize(optimizer, loss),
        eval_metric_ops={"mae": mae},
    )


def batches(size: int = BATCH, repeat: int = 1, number: int = 60) -> Iterator[Any]:
    x, y = examples(number)
    for _ in range(repeat):
        for start in range(0, len(x), size):
            yield x[start : start + size], y[start : start + size]


def trained(
    strategy: Strategy | None,
    folder: Path,
    input_fn: Callable[[], Any],
    max_steps: int,
    **params: Any,
) -> Estimator:
    config = RunConfig(
        train_distribute=strategy, eval_distribute=strategy, tf_random_seed=7
    )
    estimator = Estimator(model_fn, folder, config, params)
    return estimator.train(input_fn, max_steps=max_steps)


def values(estimator: Estimator) -> dict[str, np.ndarray]:
    names = estimator.get_variable_names()
    return {name: estimator.get_variable_value(name) for name in names}


def devices(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "mirrored": lambda: rx.MirroredStrategy(devices(2)),
    "central": lambda: rx.CentralStorageStrategy(devices(2)),
    "sharded": lambda: rx.FullyShardedStrategy(devices(2)),
    "virtual": lambda: rx.MirroredStrategy(devices(1), replicas_per_device=2),
}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The values after 6 steps on one replica with batches of 16."""
    folder = tmp_path_factory.mktemp("one")
    estimator = trained(None, folder, lambda: batches(2 * BATCH, 9), 6)
    return values(estimator)


@pytest.mark.slow(but=["mirrored", "sharded"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_replicas_with_half_batches_train_like_one(
    name: str, tmp_path: Path, on_one: dict[str, np.ndarray]
) -> None:
    # 60 examples: a pass has batches of 16, 16, 16 and 12, or as many halves.
    estimator = trained(STRATEGIES[name](), tmp_path, halves, 6)
    for key, value in values(estimator).items():
        # The order of sums differs, and Adam may divide by small numbers.
        np.testing.assert_allclose(value, on_one[key], rtol=2e-5, atol=1e-6)


def halves() -> Iterator[Any]:
    """Each batch as two batches of half its size."""
    for x, y in batches(2 * BATCH, 9):
        half = len(x) // 2
        yield x[:half], y[:half]
        yield x[half:], y[half:]


@pytest.mark.slow(but=["3"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_evaluation_reads_all_batches(num_replicas: int, tmp_path: Path) -> None:
    alone = trained(None, tmp_path, lambda: batches(repeat=2), 5)
    # 7 batches of 8 and one of 4; as in TF the loss is the mean over batches.
    expected = alone.evaluate(lambda: batches())
    x, y = examples()
    (predicted,) = alone.predict(lambda: x, yield_single_examples=False)
    errors = predicted["y"] - y
    assert expected["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert expected["loss"] == pytest.approx(
        np.mean([np.mean(errors[i : i + BATCH] ** 2) for i in range(0, 60, BATCH)]),
        rel=1e-5,
    )
    config = RunConfig(eval_distribute=rx.MirroredStrategy(devices(num_replicas)))
    estimator = Estimator(model_fn, tmp_path, config)
    results = estimator.evaluate(lambda: batches())
    assert results == pytest.approx(expected, rel=1e-5)
    some = estimator.evaluate(lambda: batches(), steps=1, name="first")
    first = errors[: num_replicas * BATCH]
    assert some["mae"] == pytest.approx(np.abs(first).mean(), rel=1e-5)
    lines = (tmp_path / "eval_first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["mae"] for line in lines] == [some["mae"]]


def test_the_last_step_may_have_fewer_batches_than_replicas(tmp_path: Path) -> None:
    # Batches of 8, 8, 8 on two replicas: a step of two batches, and one of one batch.
    def three() -> Iterator[Any]:
        yield from batches(number=24)

    two = trained(rx.MirroredStrategy(devices(2)), tmp_path / "two", three, 9)
    assert int(two.get_variable_value("global_step")) == 2
    x, y = examples(24)

    def same() -> Iterator[Any]:
        yield x[:16], y[:16]
        yield x[16:], y[16:]

    one = values(trained(None, tmp_path / "one", same, 9))
    for name, value in values(two).items():
        np.testing.assert_allclose(value, one[name], rtol=2e-5, atol=1e-6)


def test_predictions_come_example_by_example_or_by_batch(tmp_path: Path) -> None:
    estimator = trained(None, tmp_path, lambda: batches(), 3)
    x, _ = examples()
    ones = list(estimator.predict(lambda: batches()))
    assert len(ones) == 60
    np.testing.assert_array_equal([one["x"] for one in ones], x)
    whole = list(
        estimator.predict(
            lambda: batches(), predict_keys=["y"], yield_single_examples=False
        )
    )
    assert [set(batch) for batch in whole] == [{"y"}] * 8
    np.testing.assert_array_equal(
        np.concatenate([batch["y"] for batch in whole]), [one["y"] for one in ones]
    )


def saving_often(folder: Path | str) -> Estimator:
    config = RunConfig(
        train_distribute=rx.MirroredStrategy(devices(2)),
        save_checkpoints_steps=5,
        tf_random_seed=7,
    )
    return Estimator(model_fn, folder, config, {"normalize": True, "dropout": 0.5})


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import replicax as rx
    rx.set_logical_devices(2)
    from test_estimator import *

    class Kill(rx.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.global_step == 17:
                os.kill(os.getpid(), signal.SIGKILL)

    estimator = saving_often({folder!r})
    estimator.train(lambda: batches(repeat=9), max_steps=25, hooks=[Kill()])
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_and_resumed_training_ends_with_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "killed"
    text = textwrap.dedent(KILLED).format(
        tests=os.fspath(Path(__file__).parent), folder=os.fspath(folder)
    )
    killed = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=90
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = saving_often(folder)
    # The save of step 15 in the background may have been incomplete.
    assert int(resumed.get_variable_value("global_step")) in (10, 15)
    with caplog.at_level(logging.WARNING, "replicax"):
        resumed.train(lambda: batches(repeat=9), max_steps=25)
    assert "was interrupted after 1" in caplog.text
    whole = saving_often(tmp_path / "whole")
    whole = values(whole.train(lambda: batches(repeat=9), max_steps=25))
    assert int(whole["global_step"]) == 25
    for name, value in values(resumed).items():
        np.testing.assert_array_equal(value, whole[name])


def test_a_finished_training_restarts_its_input(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    estimator = trained(None, tmp_path, lambda: batches(), 3)
    with caplog.at_level(logging.INFO, "replicax"):
        estimator.train(lambda: batches(), max_steps=3)
        assert "Training is skipped: " in caplog.text
        estimator.train(lambda: batches(), steps=100)
    assert "interrupted" not in caplog.text
    # The second call trains on all 8 batches.
    assert int(estimator.get_variable_value("global_step")) == 11


def test_checkpoints_do_not_restore_learning_rates(tmp_path: Path) -> None:
    def adam(rate: Any) -> Callable[[], Any]:
        return lambda: keras.optimizers.Adam(rate)

    trained(None, tmp_path, lambda: batches(), 2, optimizer=adam(0.01))
    before = values(Estimator(model_fn, tmp_path))
    estimator = trained(None, tmp_path, lambda: batches(), 3, optimizer=adam(0.0))
    after = values(estimator)
    np.testing.assert_array_equal(after["dense/kernel"], before["dense/kernel"])
    name = "adam/dense_kernel_momentum"
    assert np.abs(after[name] - before[name]).max() > 0
    # The new learning rate may be a schedule.
    schedule = keras.optimizers.schedules.ExponentialDecay(0.0, 10, 0.9)
    trained(None, tmp_path, lambda: batches(), 4, optimizer=adam(schedule))
    assert int(estimator.get_variable_value("adam/iteration")) == 4


def test_the_global_step_counts_inside_the_model(tmp_path: Path) -> None:
    def counting(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        step = rx.estimator.get_global_step()
        prediction = keras.layers.Dense(1)(features)[:, 0]
        loss = keras.ops.mean(prediction) * 0 + keras.ops.cast(step, "float32")
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

    seen = []

    class See(rx.estimator.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return rx.estimator.SessionRunArgs(["loss", "global_step"])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append([int(x) for x in run_values.results])

    estimator = Estimator(counting, tmp_path)
    estimator.train(lambda: batches(), hooks=[See()], steps=2)
    estimator.train(lambda: batches(), hooks=[See()], steps=2)
    assert seen == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert estimator.evaluate(lambda: batches())["loss"] == 4


def test_old_checkpoints_are_deleted_and_kept_ones_evaluated(tmp_path: Path) -> None:
    config = RunConfig(
        model_dir=tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=2
    )
    estimator = Estimator(model_fn, config=config, params={})
    assert estimator.latest_checkpoint() is None
    estimator.train(lambda: batches(), steps=7)
    names = sorted(p.name for p in tmp_path.glob("model.ckpt-*"))
    assert names == ["model.ckpt-6", "model.ckpt-7"]
    assert estimator.latest_checkpoint() == os.fspath(tmp_path / "model.ckpt-7")
    earlier = os.fspath(tmp_path / "model.ckpt-6")
    results = estimator.evaluate(lambda: batches(), checkpoint_path=earlier)
    assert results["global_step"] == 6


def test_warm_start_copies_the_weights_of_another_training(tmp_path: Path) -> None:
    trained(None, tmp_path / "old", lambda: batches(), 5)
    old = values(Estimator(model_fn, tmp_path / "old"))
    new = Estimator(
        model_fn,
        tmp_path / "new",
        params={"optimizer": lambda: keras.optimizers.SGD(0.0)},
        warm_start_from=tmp_path / "old",
    )
    new.train(lambda: batches(), steps=1)
    np.testing.assert_array_equal(
        new.get_variable_value("dense/kernel"), old["dense/kernel"]
    )
    assert int(new.get_variable_value("global_step")) == 1
    other = Estimator(model_fn, params={"units": 5}, warm_start_from=tmp_path / "old")
    with pytest.raises(ValueError, match=r"\(3, 5\), Received: .*=\(3, 4\).*dense/k"):
        other.train(lambda: batches(), steps=1)


@pytest.mark.slow
def test_a_failed_training_discards_its_model(tmp_path: Path) -> None:
    x, y = examples()
    estimator = Estimator(model_fn, tmp_path, RunConfig(tf_random_seed=7), {})
    with pytest.raises(rx.estimator.NanLossDuringTrainingError):
        estimator.train(lambda: (x * np.float32("nan"), y), steps=1)
    estimator.train(lambda: (x, y), steps=2)
    before = values(estimator)
    assert np.isfinite(before["dense/kernel"]).all()
    # If the folder is deleted, training starts again.
    shutil.rmtree(tmp_path)
    estimator.train(lambda: (x, y), steps=2)
    for name, value in values(estimator).items():
        np.testing.assert_array_equal(value, before[name])


def test_training_works_after_a_failure_in_model_fn(tmp_path: Path) -> None:
    failures = [RuntimeError("not yet")]

    def failing(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        hidden = keras.layers.Dense(1)(features)
        if failures:
            raise failures.pop()
        loss = keras.ops.mean(hidden[:, 0] - labels) ** 2
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

    estimator = Estimator(failing, tmp_path)
    with pytest.raises(RuntimeError, match="not yet"):
        estimator.train(lambda: batches(), steps=1)
    estimator.train(lambda: batches(), steps=1)
    assert int(estimator.get_variable_value("global_step")) == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_loss_scaling_does_not_change_the_weights(
    num_replicas: int, tmp_path: Path
) -> None:
    results = []
    for i, make in enumerate(
        (
            lambda: keras.optimizers.SGD(0.1),
            lambda: keras.optimizers.SGD(0.1, loss_scale_factor=16.0),
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        )
    ):
        strategy = rx.MirroredStrategy(devices(num_replicas))
        folder = tmp_path / str(i)
        estimator = trained(strategy, folder, lambda: batches(), 3, optimizer=make)
        results.append(estimator.get_variable_value("dense/kernel"))
    # Powers of two scale without rounding, but XLA may fuse operations differently.
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5, atol=1e-7)


def test_moving_averages_become_the_weights_at_the_end(tmp_path: Path) -> None:
    def ema() -> Any:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    estimator = trained(None, tmp_path, lambda: batches(), 3, optimizer=ema)
    results = values(estimator)
    (average,) = (v for k, v in results.items() if "dense_kernel_average" in k)
    np.testing.assert_array_equal(results["dense/kernel"], average)


def test_the_loss_may_include_losses_of_layers(tmp_path: Path) -> None:
    x, _ = examples()

    def adding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layer = keras.layers.Dense(
            2, kernel_initializer="ones", activity_regularizer="l2"
        )
        loss = 0.0 * keras.ops.mean(layer(features)) + sum(layer.losses)
        loss = keras.ops.reshape(loss, [1])  # Also a scalar.
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.0))

    estimator = Estimator(adding, tmp_path)
    estimator.train(lambda: (x, x), steps=1)
    expected = 0.01 * 2 * np.mean(np.sum(x, axis=1) ** 2)
    results = estimator.evaluate(lambda: (x, x))["loss"]
    assert results == pytest.approx(expected, rel=1e-5)


def test_two_generators_predict_with_different_checkpoints(tmp_path: Path) -> None:
    calls = []

    class Hook(rx.estimator.SessionRunHook):
        def begin(self) -> None:
            calls.append("begin")

        def end(self, session: Any) -> None:
            calls.append("end")

    def hooked(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = model_fn(features, labels, mode, params)
        return dataclasses.replace(spec, prediction_hooks=[Hook()])

    config = RunConfig(save_checkpoints_steps=2)
    estimator = Estimator(hooked, tmp_path, config, {})
    estimator.train(lambda: batches(), steps=5)
    paths = [os.fspath(tmp_path / f"model.ckpt-{step}") for step in (2, 5)]

    def predict(path: str) -> Iterator[Any]:
        return estimator.predict(lambda: batches(), checkpoint_path=path)

    alone = [[one["y"] for one in predict(path)] for path in paths]
    assert calls == ["begin", "end"] * 2
    first, second = (predict(path) for path in paths)
    both = [(one["y"], two["y"]) for one, two in zip(first, second, strict=True)]
    np.testing.assert_array_equal(np.transpose(both), alone)


def test_models_without_labels(tmp_path: Path) -> None:
    x, _ = examples()

    def autoencoder(features: Any, mode: str) -> EstimatorSpec:
        decoded = keras.layers.Dense(3)(keras.layers.Dense(2)(features))
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=decoded)
        loss = keras.ops.mean((decoded - features) ** 2)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.Adam(0.1))

    estimator = Estimator(autoencoder, tmp_path).train(lambda: x, steps=60)
    assert estimator.evaluate(lambda: x)["loss"] < 0.5 * np.mean(x**2)


def test_a_resumed_training_on_other_replicas_skips_the_same_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(rx.estimator.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.session.global_step == 3:
                raise KeyboardInterrupt

    def make(strategy: Strategy | None) -> Estimator:
        config = RunConfig(train_distribute=strategy, save_checkpoints_steps=2)
        return Estimator(model_fn, tmp_path, config, {})

    with pytest.raises(KeyboardInterrupt):
        make(rx.MirroredStrategy(devices(2))).train(
            lambda: batches(repeat=3), hooks=[Stop()], max_steps=9
        )
    make(None).train(lambda: batches(repeat=3), max_steps=4)
    # Two steps of two batches.
    assert "interrupted after 4 steps" in caplog.text


def test_lists_of_numbers_are_arrays(tmp_path: Path) -> None:
    rows = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]

    def pairs(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        (left, right) = features
        loss = keras.ops.mean(keras.layers.Dense(1)(left - right)[:, 0] - labels)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD())

    Estimator(pairs, tmp_path).train(lambda: ((rows, rows), [1.0, 2.0]), steps=1)
