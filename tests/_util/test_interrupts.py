"""Interrupts leave the values of a whole step, and are not lost."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._util.interrupts import uninterrupted
from replicax.engine.scope import called_in, current_strategy
from replicax.errors import LostValuesError
from replicax.input.prefetch import prefetch


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["one", "mirrored", "shard_update", "fully_sharded", "model_parallel", "central"],
)
def test_many_interrupts_leave_a_whole_step(strategy: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.interrupts", strategy, "200", "1"],
        env=os.environ | {"KERAS_BACKEND": "jax", "LIMIT": "600"},
        capture_output=True,
        text=True,
        timeout=660,
        check=False,
    )
    errors = ended.returncode, ended.stdout[-2000:], ended.stderr[-6000:]
    assert "INTERRUPTED 200 " in ended.stdout, errors


@pytest.fixture
def strategy() -> Any:
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_values_stay_in_the_variables(strategy: Any) -> None:
    """After an exception in the first step, or in a callback."""
    model = small_model(strategy)
    before = model.get_weights()

    def batches() -> Any:
        raise OSError("no data")
        yield

    with pytest.raises(OSError, match="no data"):
        model.fit(batches(), shuffle=False, verbose=0)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=10, callbacks=[Raises()], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
    model.fit(X, Y, batch_size=10, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6


def test_a_step_that_raises_after_it_ran_keeps_the_values(strategy: Any) -> None:
    with strategy.scope():
        w = keras.Variable(1.0, trainable=False)

    def step(x: Any) -> None:
        w.assign(w * x)

    strategy.run(step, (2.0,))
    # JAX runs the step again to locate the NaN, with arguments that are donated.
    with jax.debug_nans(True), pytest.raises(RuntimeError, match="deleted"):
        strategy.run(step, (jnp.nan,))
    assert float(w.numpy()) == 2.0
    strategy.run(step, (2.0,))
    assert float(w.numpy()) == 4.0


def test_deleted_values_are_an_error(strategy: Any) -> None:
    """On several devices, XLA's CPU client would crash the process."""
    with strategy.scope():
        w = keras.Variable([1.0, 2.0], trainable=False, name="w")

    def step(x: Any = 1.0) -> None:
        w.assign(w * x)

    old = w.value
    strategy.run(step)
    strategy.run(step, (jnp.copy(w.value),))
    with pytest.raises(LostValuesError, match=r"an argument.*jnp\.copy"):
        strategy.run(step, (old,))
    value = w.value
    jax.jit(lambda x: x, donate_argnums=0)(value)
    value.delete()
    with pytest.raises(LostValuesError, match=r"'w' \(2,\).*deleted"):
        _ = w.value
    with pytest.raises(LostValuesError, match=r"'w' \(2,\).*1 of 1"):
        strategy.run(step)
    w.assign([3.0, 4.0])
    strategy.run(step)
    np.testing.assert_array_equal(w.numpy(), [3.0, 4.0])


def test_handlers_are_called_after_an_uninterrupted_call() -> None:
    heard: list[str] = []

    def handler(number: int, frame: Any) -> None:
        heard.append("handler")
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, handler)
    try:

        def call() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(100):
                heard.append("call")

        with pytest.raises(InterruptedError):
            uninterrupted(call)
        assert heard == ["call"] * 100 + ["handler"]
        assert signal.getsignal(signal.SIGUSR1) is handler
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(lambda: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_called_in_leaves_a_scope_that_was_not_exited(strategy: Any) -> None:
    def call() -> None:
        strategy.scope().__enter__()  # As if an interrupt prevented `__exit__`.
        keras.StatelessScope().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called_in(strategy, call)
    assert current_strategy() is None
    assert keras.Variable(1.0).value is not None


def test_interrupts_do_not_stop_prefetching() -> None:
    def handler(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    stream = prefetch(lambda: iter(range(10**9)), depth=2)
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                while True:
                    next(stream)
            except InterruptedError:
                pass
        first = next(stream)
        assert [next(stream) for _ in range(100)] == list(range(first + 1, first + 101))
        assert stream.producer.slots.qsize() + stream.producer.items.qsize() >= 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stream.close()


def test_an_interrupt_that_a_callback_swallows_is_raised_again(strategy: Any) -> None:
    model = small_model(strategy)
    swallows = Interrupts(2)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=2, epochs=50, callbacks=[swallows], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model.fit(X, Y, batch_size=2, verbose=0)
    # A handler of the user's own decides.
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        model.fit(X, Y, batch_size=2, callbacks=[swallows], verbose=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signals == [signal.SIGINT]


def small_model(strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


X, Y = np.ones((40, 2), "f4"), np.ones((40, 1), "f4")


class Interrupts(keras.callbacks.Callback):
    """Interrupts in a batch, or at the end of a call, and swallows the exception."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at = at

    def interrupt(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.at == batch:
            self.interrupt()

    def on_train_end(self, logs: Any = None) -> None:
        if self.at is None:
            self.interrupt()

    on_test_end = on_predict_end = on_train_end


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_interrupt_swallowed_in_the_last_step_is_raised(
    strategy: Any, call: str
) -> None:
    model = small_model(strategy)
    args = (X,) if call == "predict" else (X, Y)
    swallows = Interrupts(None)
    with pytest.raises(KeyboardInterrupt, match=f"interrupted in {call}"):
        getattr(model, call)(*args, callbacks=[swallows], verbose=0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    getattr(model, call)(*args, verbose=0)


SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import replicax as rx
rx.set_logical_devices(2)
import keras
import numpy as np
strategy = rx.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((512, 8), "float32")
class Begins(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and not self.params.get("said"):
            self.params["said"] = True
            print("STEPS", flush=True)
model.fit(x, x[:, :1], batch_size=8, epochs=10**6, verbose=0, callbacks=[Begins()])
print("END")
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]
)
def test_one_ctrl_c_ends_a_script(tmp_path: Path, seed: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(100, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "STEPS\n"
            time.sleep(random.Random(seed).uniform(0, 1.5))
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        finally:
            watchdog.cancel()
    assert process.returncode == -signal.SIGINT, errors
    assert "END" not in output
    # Python 3.13 puts a line of marks below each line of code.
    lines = [line for line in errors.splitlines() if line.strip(" ~^")]
    assert len(lines) <= 12, errors
    assert re.search(r"KeyboardInterrupt: interrupted in fit after step \d+$", errors)
