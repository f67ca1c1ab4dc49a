"""The work after each batch is skipped only if no callback needs it."""

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
    """Records batches; a subclass chooses the method that records."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def record(self, batch: int, logs: Any = None) -> None:
        self.batches.append((batch, sorted(logs)))


class OfTraining(Listener):
    on_train_batch_end = Listener.record


class OfTests(Listener):
    on_test_batch_end = Listener.record


class OfPredictions(Listener):
    on_predict_batch_end = Listener.record


class OfAnything(Listener):
    on_batch_end = Listener.record


class Late(Listener):
    def on_train_begin(self, logs: Any = None) -> None:
        self.on_train_batch_end = self.record


@pytest.mark.parametrize("kind", [OfTraining, OfTests, OfPredictions, OfAnything, Late])
def test_callbacks_get_the_batches_of_keras(kind: Any, outcome: Any) -> None:
    def work() -> list[Any]:
        model, listener = regression(), kind()
        options: Any = {
            "batch_size": BATCH_SIZE,
            "verbose": 0,
            "callbacks": [listener],
        }
        model.fit(X, Y, validation_data=(X, Y), **options)
        listener.batches.append((-1, ["fit"]))
        model.evaluate(X, Y, **options)
        listener.batches.append((-1, ["evaluate"]))
        model.predict(X, **options)
        # Keras calls them in threads, in any order.
        calls = itertools.groupby(listener.batches, lambda pair: pair[0] < 0)
        batches = itertools.chain.from_iterable(sorted(group) for _, group in calls)
        return [(batch, ",".join(logs)) for batch, logs in batches]

    def recorded(num_replicas: int) -> list[Any]:
        return [x.item() for pair in outcome(work, num_replicas) for x in pair]

    assert recorded(2) == recorded(0)
    assert len(recorded(2)) > 2 * 2  # More than the two markers.


def test_lists_of_callbacks_that_are_used_again(outcome: Any) -> None:
    def work() -> list[int]:
        model, listener = regression(), OfTraining()
        callbacks = keras.callbacks.CallbackList([], add_history=True, model=model)
        options: Any = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": callbacks}
        model.fit(X, Y, **options)
        callbacks.callbacks.append(listener)
        model.fit(X, Y, **options)
        first = len(listener.batches)
        callbacks.callbacks.remove(listener)
        model.fit(X, Y, **options)
        return [first, len(listener.batches)]

    assert list(map(int, outcome(work, 2))) == [3, 3]


def test_a_subclass_of_callback_list_is_called(outcome: Any) -> None:
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


def test_no_thread_starts_without_a_callback_for_batches(outcome: Any) -> None:
    def work() -> int:
        model, pools = regression(), []

        def count(epoch: int, logs: Any) -> None:
            pools.extend(
                t for t in threading.enumerate() if t.name.startswith("ThreadPool")
            )

        at_end = keras.callbacks.LambdaCallback(on_epoch_end=count)
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[at_end])
        return len(pools)

    assert outcome(work, 2) == 0
    assert outcome(work, 0) > 0  # Otherwise there would be nothing to skip.


class SlowAtFirst(Listener):
    """Keras does not wait for it, as for a progress bar."""

    async_safe = True

    def record(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.05 if batch == 0 else 0)
        self.batches.append(batch)

    on_train_batch_end = on_test_batch_end = record


def test_callbacks_get_batches_in_order(strategy_of: Any) -> None:
    with strategy_of(1).scope():
        model = regression()
    listener = SlowAtFirst()
    for _ in range(2):
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[listener])
        model.evaluate(X, Y, batch_size=BATCH_SIZE, verbose=0, callbacks=[listener])
    assert listener.batches == 4 * [0, 1, 2]
    assert not [t for t in threading.enumerate() if "callbacks" in t.name]
