"""Interrupts training at random moments, in a process of its own.

`python -m tests.interrupts STRATEGY COUNT SEED`. The model counts: each variable, each
slot and the optimizer's number of steps grow by 1 in every step, so what is left after
an interrupt is a whole number of steps if all of them are equal.
"""

import _thread
import ctypes
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grain
import keras
import numpy as np
from keras import ops

import replicax as rx

STRATEGIES = {
    "one": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": rx.MirroredStrategy,
    "shard_update": lambda: rx.MirroredStrategy(shard_update=True),
    "fully_sharded": rx.FullyShardedStrategy,
    "model_parallel": lambda: rx.ModelParallelStrategy(
        {".*w": (None, "model")}, model_parallel=2
    ),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
}


class Stop(Exception):
    """What a user's own handler or callback raises."""


class Counting(keras.optimizers.Optimizer):
    """Adds 1 to each variable and to its slot."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slots = self.add_optimizer_variables(variables, "count")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slot = self.slots[self._get_variable_index(variable)]
        self.assign_add(variable, 1.0 + 0 * gradient)
        self.assign_add(slot, 1.0 + 0 * gradient)


class Weights(keras.layers.Layer):
    """Weights of which the output is a sum, and a counter that is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = [
            self.add_weight((8, 4), "zeros", trainable=True, name=f"{i}w")
            for i in range(12)
        ]
        self.seen = self.add_weight((), "zeros", trainable=False, name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign(self.seen + 1)
        return ops.sum(ops.stack([ops.matmul(x, w) for w in self.ws]), 0)


class Batches(keras.utils.PyDataset):
    """Batches that threads make."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        return X[:16], Y[:16]


X = np.ones((1000, 8), "float32")
Y = np.ones((1000, 4), "float32")


def raising(error: type[BaseException]) -> Callable[..., None]:
    def handler(*_: Any) -> None:
        raise error

    return handler


def in_async(done: threading.Event, main: int = threading.get_ident()) -> None:
    # A thread that is being started has its parent's number: Python 3.11 would raise
    # the exception there, and the parent would wait for it for ever.
    frame = sys._current_frames()[main]
    names = {f.f_code.co_filename for f, _ in traceback.walk_stack(frame)}
    if not done.is_set() and threading.__file__ not in names:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(main), ctypes.py_object(Stop)
        )


ARMED: list[tuple[threading.Event, threading.Thread]] = []


def disarm() -> None:
    """Have no timer interrupt any more, whoever set it."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for done, thread in ARMED:
        done.set()
        if thread.ident:  # An interrupt may have come before its start.
            thread.join(10)


def by_timer(send: Callable[[threading.Event], None]) -> Callable[[float], None]:
    """Have another thread interrupt this one, again until it is heard."""

    def arm(delay: float) -> None:
        done = threading.Event()

        def work() -> None:
            while not done.wait(delay):
                send(done)

        thread = threading.Thread(target=work, daemon=True)
        ARMED[:] = [(done, thread)]
        thread.start()

    return arm


def by_alarm(error: type[BaseException]) -> Callable[[float], None]:
    def arm(delay: float) -> None:
        signal.signal(signal.SIGALRM, raising(error))
        signal.setitimer(signal.ITIMER_REAL, delay, 0.05)

    return arm


class Inside(keras.callbacks.Callback):
    """Sets the alarm in the middle of training, or raises there."""

    def __init__(self, batch: int, *, alarm: bool) -> None:
        super().__init__()
        self.batch, self.alarm = batch, alarm

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < self.batch:
            return
        if not self.alarm:
            raise Stop
        self.batch = 10**9
        by_alarm(Stop)(random.uniform(0.0005, 0.01))


KINDS: dict[str, Callable[[float], None] | None] = {
    "SIGINT": by_timer(lambda done: os.kill(os.getpid(), signal.SIGINT)),
    "interrupt_main": by_timer(lambda done: _thread.interrupt_main()),
    "alarm": by_alarm(KeyboardInterrupt),
    "alarm of the user's": by_alarm(Stop),
    "PyThreadState_SetAsyncExc": by_timer(in_async),
    "alarm set inside": None,
    "callback": None,
}


class Trained:
    """A model and what it is trained by."""

    def __init__(self, strategy: Any, steps_per_execution: int) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((8,)), Weights()])
            self.model.compile(
                Counting(1.0),
                "mse",
                metrics=["mae"],
                steps_per_execution=steps_per_execution,
            )
        self.steps = 0
        self.has_metrics = steps_per_execution == 1

    def fit(self, callbacks: Any = None) -> None:
        self.model.fit(
            X[:500],
            Y[:500],
            batch_size=20,
            epochs=10**6,
            shuffle=random.random() < 0.5,
            validation_data=(X[:40], Y[:40]) if random.random() < 0.5 else None,
            callbacks=callbacks,
            verbose=0,
        )

    def fit_threads(self) -> None:
        data = Batches(workers=2)
        self.model.fit(data, epochs=10**6, verbose=0)

    def evaluate(self) -> None:
        while True:
            self.model.evaluate(X, Y, batch_size=20, verbose=0)

    def predict(self) -> None:
        while True:
            self.model.predict(X, batch_size=20, verbose=0)

    def on_batch(self) -> None:
        while True:
            self.model.train_on_batch(X[:20], Y[:20])

    def loop(self) -> None:
        def step(x: Any, y: Any) -> Any:
            with rx.GradientTape() as tape:
                loss = ops.mean((self.model(x, training=True) - y) ** 2)
            weights = self.model.trainable_variables
            self.model.optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        data = grain.MapDataset.source(list(range(1000)))
        data = data.map(lambda i: (X[i], Y[i])).batch(20)
        batches = self.strategy.experimental_distribute_dataset(data)
        while True:
            for batch in batches:
                self.strategy.run(step, batch)

    def check(self) -> None:
        """Raise unless all variables are of the same step."""
        variables = [*self.model.layers[0].variables, *self.model.optimizer.variables]
        values = {
            v.path: np.unique(v.numpy())
            for v in variables
            if "learning_rate" not in v.path
        }
        found = {tuple(x.tolist()) for x in values.values()}
        assert len(found) == 1, values
        ((steps,),) = found
        assert steps >= self.steps, (steps, self.steps)
        self.steps = steps


def interrupt(kind: str, call: Callable[..., None]) -> None:
    """Interrupt a call, which would not end."""
    arm = KINDS[kind]
    try:
        if arm is None:
            call([Inside(random.randrange(20), alarm=kind == "alarm set inside")])
        else:
            arm(random.choice([0.005, 0.02, 0.05]) * random.random() + 1e-3)
            call()
    except (Stop, KeyboardInterrupt):
        pass
    except Exception as error:
        # An `except Exception` of the standard library's may go wrong over it.
        if not isinstance(error.__context__, Stop):
            raise
    calm = 0
    while calm < 3:  # One may have come just before it was called off.
        try:
            disarm()
            time.sleep(0.001)
            calm += 1
        except (Stop, KeyboardInterrupt):
            continue


def calls(kind: str, trained: Trained) -> list[Callable[..., None]]:
    if KINDS[kind] is None:
        return [trained.fit]
    return [
        trained.fit,
        trained.fit,
        trained.fit,
        trained.fit_threads,
        trained.evaluate,
        trained.predict,
        trained.on_batch,
        trained.loop,
    ]


def main(name: str, count: int, seed: int) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(os.environ.get("LIMIT", "500")), exit=True)
    random.seed(seed)
    rx.set_logical_devices(2 if name != "one" else 1)
    strategy = STRATEGIES[name]()
    models = [Trained(strategy, 1), Trained(strategy, 4)]
    for trained in models:  # Compiled: what is interrupted is the steps.
        trained.model.fit(X[:60], Y[:60], batch_size=20, epochs=2, verbose=0)
        trained.check()
    before = threading.active_count()
    began = time.monotonic()
    done: Counter[str] = Counter()
    kinds: Iterator[str] = itertools.cycle(KINDS)
    for _ in range(count):
        kind = next(kinds)
        trained = random.choice(models)
        call = random.choice(calls(kind, trained))
        interrupt(kind, call)
        trained.check()
        done[f"{kind}: {call.__name__}"] += 1
        print(f"{time.monotonic() - began:.2f}", kind, call.__name__, trained.steps)
    for trained in models:
        # Usable: as many steps more as were asked for.
        trained.model.fit(X[:60], Y[:60], batch_size=20, epochs=1, verbose=0)
        steps = trained.steps
        trained.check()
        assert trained.steps == steps + 3
        trained.model.evaluate(X[:60], Y[:60], verbose=0)
    end = time.monotonic() + 10
    while threading.active_count() > before + 2 and time.monotonic() < end:
        time.sleep(0.05)
    left = [t.name for t in threading.enumerate()]
    assert len(left) <= before + 2, left
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("INTERRUPTED", sum(done.values()), dict(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
