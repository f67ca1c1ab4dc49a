"""Training that is interrupted at random moments goes on from a whole step."""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.errors import LostValuesError
from replicax.input.prefetch import prefetch
from replicax.interrupts import uninterrupted
from replicax.scope import called_in, current_strategy


def interrupted(strategy: str, count: int, seed: int, limit: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupts", strategy, str(count), str(seed)],
        env=os.environ | {"KERAS_BACKEND": "jax", "LIMIT": str(limit)},
        capture_output=True,
        text=True,
        timeout=limit + 60,
        check=False,
    )
    assert f"INTERRUPTED {count} " in done.stdout, (
        done.returncode,
        done.stdout[-2000:],
        done.stderr[-6000:],
    )


def test_interrupts_leave_a_whole_step() -> None:
    """Each kind of interrupt, in each call; 8 were enough to crash the process."""
    interrupted("mirrored", 56, 0, limit=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["one", "mirrored", "shard_update", "fully_sharded", "model_parallel", "central"],
)
def test_many_interrupts_leave_a_whole_step(strategy: str) -> None:
    interrupted(strategy, 200, 1, limit=600)


@pytest.fixture
def strategy() -> Any:
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def test_values_stay_in_the_variables(strategy: Any) -> None:
    """An exception in the first step, or in any callback, takes no value away."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 2), "f4"), np.ones((8, 1), "f4")
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
        model.fit(x, y, batch_size=2, callbacks=[Raises()], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
    model.fit(x, y, batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6


def test_a_step_that_raises_after_it_ran_keeps_the_values(strategy: Any) -> None:
    with strategy.scope():
        w = keras.Variable(1.0, trainable=False)

    def step(x: Any) -> None:
        w.assign(w * x)

    strategy.run(step, (2.0,))
    # To say where it is from JAX runs the step again, on arguments that are donated.
    with jax.debug_nans(True), pytest.raises(RuntimeError, match="deleted"):
        strategy.run(step, (jnp.nan,))
    assert float(w.numpy()) == 2.0
    strategy.run(step, (2.0,))
    assert float(w.numpy()) == 4.0


def test_deleted_values_are_an_error(strategy: Any) -> None:
    """XLA's CPU client crashes the process when several devices are given some."""
    with strategy.scope():
        w = keras.Variable([1.0, 2.0], trainable=False, name="w")

    def step(x: Any = 1.0) -> None:
        w.assign(w * x)

    old = w.value
    strategy.run(step)
    strategy.run(step, (jnp.copy(w.value),))
    with pytest.raises(LostValuesError, match=r"an argument.*jnp\.copy"):
        strategy.run(step, (old,))
    jax.jit(lambda x: x, donate_argnums=0)(w.value)
    w.value.delete()
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


def test_a_thread_leaves_the_scope_whatever_happens(strategy: Any) -> None:
    def call() -> None:
        strategy.scope().__enter__()  # As if an interrupt had kept it from leaving.
        keras.StatelessScope().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called_in(strategy, call)
    assert current_strategy() is None
    assert keras.Variable(1.0).value is not None


def test_prefetch_gives_its_slots_back() -> None:
    def handler(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    stream = prefetch(lambda: iter(range(10**9)), depth=2)
    try:
        for _ in range(200):
            signal.setitimer(signal.ITIMER_REAL, 0.0003)
            try:
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


def test_one_interrupt_is_enough_though_some_code_swallows_it(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((40, 2), "f4"), np.ones((40, 1), "f4")

    class Swallows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                with contextlib.suppress(BaseException):
                    signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=2, epochs=50, callbacks=[Swallows()], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model.fit(x, y, batch_size=2, verbose=0)
    # A handler of the user's own decides.
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        model.fit(x, y, batch_size=2, callbacks=[Swallows()], verbose=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
