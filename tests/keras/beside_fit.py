"""Calls a model's methods in threads while `fit` trains it; a script.

Each step adds 1 to both weights of the model, so that their values say after how many
steps they were read, and whether all were read after the same one.

    python -m tests.keras.beside_fit <devices> <calls of each method> <strategy>

Needs KERAS_BACKEND=jax.
"""

import faulthandler
import itertools
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np

import replicax as rx

ROWS = np.ones((32, 1), "float32")
BATCH = 8


class Counting(keras.layers.Layer):
    """Has two weights, which are its outputs for each row."""

    def build(self, _: Any) -> None:
        self.a = self.add_weight(shape=(1,), initializer="zeros", name="a")
        self.b = self.add_weight(shape=(1,), initializer="zeros", name="b")

    def call(self, x: Any) -> Any:
        return keras.ops.concatenate([0 * x + self.a, 0 * x + self.b], axis=-1)


def minus_sum(_: Any, y_pred: Any) -> Any:
    """A loss whose gradient is -1 for each weight."""
    return -keras.ops.sum(y_pred, axis=-1)


def steps_in(values: Any) -> None:
    """Assert that all values are the same whole number."""
    values = np.asarray(values)
    assert (values == values.flat[0]).all(), values
    assert values.flat[0] == round(float(values.flat[0])), values


class Readers:
    """Threads that call all methods in turns, so many times after `fit` has begun."""

    def __init__(self, strategy: Any, num_calls: int, num_threads: int = 2) -> None:
        with strategy.scope():
            self.model: Any = keras.Sequential([keras.Input((1,)), Counting()])
            self.model.compile(keras.optimizers.SGD(1.0), minus_sum, metrics=["mae"])
            self.loaded = keras.Sequential([keras.Input((1,)), Counting()])
        self.num_calls = num_calls
        self.num_done = itertools.count()
        self.errors: list[BaseException] = []
        self.has_begun = threading.Event()
        self.lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp())
        self.threads = [
            threading.Thread(target=self.read, args=(i,)) for i in range(num_threads)
        ]

    def read(self, number: int) -> None:
        """Call the methods, in one thread."""
        model, x = self.model, ROWS
        state = [*model.variables, *model.optimizer.variables]
        methods = [
            self.evaluate,
            lambda: steps_in(model.predict(x, batch_size=BATCH, verbose=0)),
            lambda: steps_in(model(x)),
            lambda: steps_in(model.get_weights()),
            lambda: self.save_weights(self.folder / f"{number}.weights.h5"),
            lambda: setattr(model.optimizer, "learning_rate", 1.0),
            lambda: model.save(self.folder / f"{number}.keras"),
            lambda: [v.numpy() for v in state],
            lambda: steps_in(model.predict_on_batch(x)),
            lambda: model.test_on_batch(x, x),
        ]
        calls = 0
        while calls < self.num_calls and not self.errors:
            for method in methods:
                try:
                    method()
                except BaseException as error:
                    self.errors.append(error)
                    raise
                next(self.num_done)
            calls += self.has_begun.is_set()

    def evaluate(self) -> None:
        """All batches are evaluated after the same step, by metrics of this call."""
        loss, error = self.model.evaluate(ROWS, ROWS, batch_size=BATCH, verbose=0)
        steps = -loss / 2
        assert steps == round(steps), loss
        assert error == abs(steps - 1), (loss, error)

    def save_weights(self, path: Path) -> None:
        """The file has the weights of one step."""
        self.model.save_weights(path)
        with self.lock:
            self.loaded.load_weights(path)
            steps_in(self.loaded.get_weights())


class Until(keras.callbacks.Callback):
    """Checks the logs of `fit`, and ends it when all readers are done."""

    def __init__(self, readers: Readers) -> None:
        super().__init__()
        self.readers = readers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.readers.has_begun.set()
        number = len(ROWS) // BATCH
        steps = range(number * epoch, number * (epoch + 1))
        assert logs["loss"] == -2 * sum(steps) / number, (epoch, logs)
        if not any(thread.is_alive() for thread in self.readers.threads):
            self.model.stop_training = True


def main(num_devices: int, num_calls: int, kind: str) -> None:
    """Fail unless all calls return the values of one step, and `fit` is as if alone."""
    faulthandler.enable()
    rx.set_logical_devices(num_devices)
    readers = Readers(getattr(rx, kind)(), num_calls)
    for thread in readers.threads:
        thread.start()
    history = readers.model.fit(
        ROWS,
        ROWS,
        batch_size=BATCH,
        epochs=10**6,
        verbose=0,
        callbacks=[Until(readers)],
    )
    assert not readers.errors, readers.errors
    weights = readers.model.get_weights()
    steps_in(weights)
    assert weights[0] == len(ROWS) // BATCH * len(history.epoch)
    print("finished", next(readers.num_done))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
