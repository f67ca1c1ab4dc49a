"""Threads that use a model while another one trains it."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax.engine import threads
from replicax.errors import ContextError

ROOT = Path(__file__).parents[2]
ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def beside_fit(
    num_devices: int, num_calls: int, strategy: str, timeout_s: float
) -> None:
    """A process of its own, as it may crash."""
    command = ["-m", "tests.keras.beside_fit", f"{num_devices}", f"{num_calls}"]
    done = subprocess.run(
        [sys.executable, *command, strategy],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "finished" in done.stdout


def test_readers_beside_a_fit_get_the_values_of_one_step() -> None:
    beside_fit(2, 3, "MirroredStrategy", timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_ten_thousand_calls_beside_a_fit(num_devices: int) -> None:
    beside_fit(num_devices, 500, "MirroredStrategy", timeout_s=1800)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FullyShardedStrategy", "CentralStorageStrategy"])
def test_calls_beside_a_fit_of_other_strategies(kind: str) -> None:
    beside_fit(2, 20, kind, timeout_s=600)


def model_of(strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


class InThread(keras.callbacks.Callback):
    """Makes one call in another thread amid `fit`, and waits for it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call
        self.errors: list[BaseException] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        thread = threading.Thread(target=self.run, name="second")
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def run(self) -> None:
        try:
            self.call()
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)


@pytest.mark.parametrize("name", ["fit", "train_on_batch"])
def test_a_second_thread_that_trains_is_refused(name: str) -> None:
    model = model_of(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    callback = InThread(lambda: getattr(model, name)(ROWS, ROWS[:, :1]))
    model.fit(ROWS, ROWS[:, :1], verbose=0, callbacks=[callback])
    assert len(callback.errors) == 2
    assert isinstance(callback.errors[0], ContextError)
    with pytest.raises(ContextError, match=rf"{name}.*'second'.*fit in thread 'Main"):
        raise callback.errors[0]


def test_evaluate_in_a_callback_s_thread_leaves_the_metrics_of_fit() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    model, alone = model_of(strategy), model_of(strategy)
    alone.set_weights(model.get_weights())
    expected = alone.fit(ROWS, ROWS[:, :1], verbose=0, shuffle=False).history
    callback = InThread(lambda: model.evaluate(2 * ROWS, ROWS[:, :1], verbose=0))
    fit: Any = model.fit
    history = fit(ROWS, ROWS[:, :1], verbose=0, shuffle=False, callbacks=[callback])
    assert not callback.errors
    np.testing.assert_allclose(history.history["loss"], expected["loss"], rtol=1e-6)


def test_models_in_two_threads_train_as_one_after_the_other() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    models = [model_of(strategy) for _ in range(4)]
    for model in models:
        model.set_weights(models[0].get_weights())
    for model in models[:2]:
        model.fit(ROWS, ROWS[:, :1], epochs=20, verbose=0, shuffle=False)

    def train(model: Any) -> None:
        model.fit(ROWS, ROWS[:, :1], epochs=20, verbose=0, shuffle=False)

    both = [threading.Thread(target=train, args=(model,)) for model in models[2:]]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    for model in models[1:]:
        for a, b in zip(model.get_weights(), models[0].get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_value_of_another_thread_outlives_the_next_step() -> None:
    model = model_of(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    (kernel, _), values = model.trainable_variables, []
    fit: Any = model.fit
    fit(
        ROWS,
        ROWS[:, :1],
        verbose=0,
        callbacks=[InThread(lambda: values.append(kernel.value))],
    )
    assert len({np.asarray(x).tobytes() for x in values}) == 2


def test_a_thread_that_ends_is_forgotten() -> None:
    model = model_of(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    model.get_weights()
    assert threads.is_alone()
    thread = threading.Thread(target=model.get_weights)
    thread.start()
    thread.join(60)
    assert threads.is_alone()
    assert model.variables[0].value is model.variables[0].value
