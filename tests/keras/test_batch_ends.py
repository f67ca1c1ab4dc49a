"""What Keras does after each batch is left out only where nobody would notice."""

import itertools
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

BATCH_SIZE = 4
X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X[:, :1]


def regression() -> Any:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Listener(keras.callbacks.Callback):
    """Remembers batches; its subclasses say which."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def hear(self, batch: int, logs: Any = None) -> None:
        self.heard.append((batch, sorted(logs)))


class OfTraining(Listener):
    on_train_batch_end = Listener.hear


class OfTests(Listener):
    on_test_batch_end = Listener.hear


class OfPredictions(Listener):
    on_predict_batch_end = Listener.hear


class OfAnything(Listener):
    on_batch_end = Listener.hear


class Late(Listener):
    def on_train_begin(self, logs: Any = None) -> None:
        self.on_train_batch_end = self.hear


@pytest.mark.parametrize("kind", [OfTraining, OfTests, OfPredictions, OfAnything, Late])
def test_callbacks_hear_what_they_hear_in_keras(kind: Any, outcome: Any) -> None:
    def work() -> list[Any]:
        model, listener = regression(), kind()
        options: Any = {
            "batch_size": BATCH_SIZE,
            "verbose": 0,
            "callbacks": [listener],
        }
        model.fit(X, Y, validation_data=(X, Y), **options)
        listener.heard.append((-1, ["fit"]))
        model.evaluate(X, Y, **options)
        listener.heard.append((-1, ["evaluate"]))
        model.predict(X, **options)
        # Keras calls them in threads: of batches, any order will do.
        calls = itertools.groupby(listener.heard, lambda pair: pair[0] < 0)
        heard = itertools.chain.from_iterable(sorted(group) for _, group in calls)
        return [(batch, ",".join(logs)) for batch, logs in heard]

    def listed(num_replicas: int) -> list[Any]:
        return [x.item() for pair in outcome(work, num_replicas) for x in pair]

    assert listed(2) == listed(0)
    assert len(listed(2)) > 2 * 2  # More than the two that the test puts in.


def test_lists_of_callbacks_that_are_used_again(outcome: Any) -> None:
    def work() -> list[int]:
        model, listener = regression(), OfTraining()
        callbacks = keras.callbacks.CallbackList([], add_history=True, model=model)
        options: Any = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": callbacks}
        model.fit(X, Y, **options)
        callbacks.callbacks.append(listener)
        model.fit(X, Y, **options)
        first = len(listener.heard)
        callbacks.callbacks.remove(listener)
        model.fit(X, Y, **options)
        return [first, len(listener.heard)]

    assert list(map(int, outcome(work, 2))) == [3, 3]


def test_a_list_of_ones_own_is_called(outcome: Any) -> None:
    class Own(keras.callbacks.CallbackList):
        calls = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.calls += 1

    def work() -> int:
        model = regression()
        callbacks = Own(add_history=True, model=model)
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        return callbacks.calls

    assert outcome(work, 2) == 3


def test_no_thread_reads_logs_that_nobody_wants(outcome: Any) -> None:
    def work() -> int:
        model, found = regression(), []

        def count(epoch: int, logs: Any) -> None:
            found.extend(
                t for t in threading.enumerate() if t.name.startswith("ThreadPool")
            )

        at_end = keras.callbacks.LambdaCallback(on_epoch_end=count)
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[at_end])
        return len(found)

    assert outcome(work, 2) == 0
    assert outcome(work, 0) > 0  # Else there is nothing to leave out any more.


class SlowAtFirst(Listener):
    """Nobody waits for it, as for a progress bar."""

    async_safe = True

    def hear(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.05 if batch == 0 else 0)
        self.heard.append(batch)

    on_train_batch_end = on_test_batch_end = hear


def test_batches_are_heard_of_in_their_order(strategy_of: Any) -> None:
    with strategy_of(1).scope():
        model = regression()
    listener = SlowAtFirst()
    for _ in range(2):
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[listener])
        model.evaluate(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[listener])
    assert listener.heard == 4 * [0, 1, 2]
    assert not [t for t in threading.enumerate() if "callbacks" in t.name]
