"""Workers that end an epoch together.

`in_step` is tested with threads as workers, which share a store in memory. `fit` and
loops, which run collectives, are tested with processes.
"""

import logging
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.input.package_log import PackageLog

import replicax as rx
import replicax.testing
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.workers import Workers
from replicax.input import lockstep
from replicax.input.lockstep import SharedEpoch, in_step


class SharedStore:
    """A key-value store for the threads of one process."""

    def __init__(self):
        self._lock = threading.Lock()
        self._texts = {}

    def put(self, key, value):
        with self._lock:
            self._texts[key] = value

    def read(self, folder):
        prefix = f"{folder}/"
        with self._lock:
            texts = dict(self._texts)
        return {k[len(prefix) :]: v for k, v in texts.items() if k.startswith(prefix)}

    def delete(self, key):
        with self._lock:
            self._texts.pop(key, None)


def stream(store, index, num_workers, **options):
    names = [f"worker:{i}" for i in range(num_workers)]
    options = {"same_data": False, "size_of": len, "name": "epoch", **options}
    timeouts = Timeouts(startup=20, step=options.pop("deadline", 20))
    workers = Workers(names, [""] * num_workers, index, store=store, timeouts=timeouts)
    return SharedEpoch(workers=workers, **options)


def together(*batches, num_batches=None, **options):
    """Return the batches that each worker yields, or its exception."""
    store = SharedStore()
    results: list[Any] = [None] * len(batches)
    counts = num_batches or [None] * len(batches)

    def work(index):
        own = stream(store, index, len(batches), num_batches=counts[index], **options)
        try:
            results[index] = list(in_step(batches[index], own))
        except (rx.InputError, rx.ClusterError) as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def sized(*sizes):
    """Make batches of these sizes; all values of batch `i` are `i`."""
    return [np.full(size, i) for i, size in enumerate(sizes)]


def lengths(results):
    return [len(result) for result in results]


@pytest.mark.parametrize("known", [True, False])
def test_ten_batches_and_seven(known, caplog):
    numbers = [10, 7]
    results = together(
        sized(*[8] * 10),
        sized(*[8] * 7),
        num_batches=numbers if known else None,
    )
    assert lengths(results) == [7, 7]
    (record,) = caplog.records  # Only the chief logs.
    assert record.levelno == logging.WARNING
    assert "epoch ended after 7 steps" in record.message
    assert "because worker:1 had no further batch" in record.message


def test_last_batches_of_different_sizes(caplog):
    results = together(sized(8, 8, 8), sized(8, 8, 5))
    assert lengths(results) == [2, 2]
    assert "after 2 steps, because worker:1 had no further batch, or a" in caplog.text


def test_a_worker_without_data_is_an_error_on_all():
    for error in together(sized(2, 2), [], sized(2)):
        assert isinstance(error, rx.InputError)
        assert "worker:1 got no batch, while the others did" in str(error)


def test_no_worker_has_data():
    assert together([], []) == [[], []]


def test_first_batches_that_differ_in_one_leaf():
    labels = np.arange(4)
    pair = [
        [{"image": np.full(4, float(i)), "label": labels, "weight": labels * 1.0}]
        for i in range(2)
    ]
    options = {"same_data": True, "size_of": lambda batch: len(batch["label"])}
    for error in together(*pair, **options):
        assert isinstance(error, rx.InputError)
        assert "worker:0: leaf ['image'], which is float32[4]. All" in str(error)
        for way in (
            "Seed the shuffling",
            "AutoShardPolicy.OFF",
            "AutoShardPolicy.FILE",
        ):
            assert way in str(error)
        assert "from_function" in str(error)
        assert "check_input=False" in str(error)
    assert lengths(together(*pair, **options, check=False)) == [1, 1]
    assert lengths(together(*pair, **{**options, "same_data": False})) == [1, 1]


class Restarting:
    """Like a Grain dataset: every `iter` starts at the first batch."""

    def __iter__(self):
        return iter(sized(*[2] * 9))


def test_a_dataset_is_iterated_once():
    results = together(Restarting(), Restarting())
    assert [[int(batch[0]) for batch in result] for result in results] == [
        [*range(9)]
    ] * 2


def test_an_abandoned_stream_waits_for_no_worker(monkeypatch):
    begin = time.monotonic()
    monkeypatch.setattr(
        lockstep, "is_abandoned", lambda: time.monotonic() > begin + 0.2
    )
    own = stream(SharedStore(), 0, 2)
    assert list(in_step(sized(2, 2), own)) == []
    assert time.monotonic() - begin < 10


def test_a_missing_worker_is_named():
    own = stream(SharedStore(), 0, 2, deadline=0.2)
    with pytest.raises(rx.ClusterError, match=r"worker:1 did not come to epoch within"):
        list(in_step(sized(2), own))


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=2, max_size=3
    )
)
def test_the_longest_common_start_is_used(sizes):
    results = together(*[sized(*own) for own in sizes])
    common = 0
    for column in zip(*sizes, strict=False):
        if len(set(column)) > 1:
            break
        common += 1
    for result in results:
        assert [int(batch[0]) for batch in result] == list(range(common))


# Two processes.

NUM_BATCHES = {0: 10, 1: 7}
STOP_AFTER = (1, 2, 6, None)


def rows(index, num_batches):
    """Yield batches of 8 rows with this worker's own numbers."""
    for i in range(num_batches):
        yield np.full((8, 3), i + 100 * index, "f")


def pairs(batches):
    return ((x, x[:, :1]) for x in batches)


def off(strategy, make, **options):
    return strategy.experimental_distribute_dataset(
        make, auto_shard_policy=rx.AutoShardPolicy.OFF, **options
    )


def fitted(strategy, dataset, epochs):
    """Train a model; return the number of steps of each epoch."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    numbers = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: numbers.append(0),
        on_train_batch_end=lambda batch, logs: numbers.append(numbers.pop() + 1),
    )
    model.fit(dataset, epochs=epochs, shuffle=False, callbacks=[count], verbose=0)
    strategy.check_replicas(model.variables)
    return numbers


def looped(strategy, dataset, stop_after=None):
    """Return each batch's mean over both workers, which a collective computes."""
    means = []
    for batch in dataset:
        mean = strategy.run(lambda x: x.mean(), (batch,))
        means.append(float(strategy.reduce("mean", mean, axis=None)))
        if len(means) == stop_after:
            break
    return means


def error_of(call):
    try:
        call()
    except rx.InputError as error:
        return str(error)
    return "no error"


def left_early(strategy):
    """Loops that are left early, on one worker after more batches than on the other."""
    index = strategy.workers.index
    dataset = off(strategy, lambda: rows(index, 9))
    iterator = iter(dataset)
    for _ in range(4 - index):
        next(iterator)
    time.sleep(0.3 * (1 - index))  # Worker 0 waits for the next batches meanwhile.
    iterator.close()
    return [looped(strategy, dataset, number) for number in STOP_AFTER]


def other_images(strategy):
    """Return the errors of all ways to read data with other images on each worker."""
    images = np.random.default_rng(strategy.workers.index).random((16, 3), "float32")
    labels = np.ones((16, 1), "float32")

    def model():
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-6), "mse")
        return model

    def batches():
        yield images, labels

    options = {"batch_size": 8, "verbose": 0}
    same = labels[:, [0, 0, 0]]
    validation = {"validation_data": (images, labels), **options}
    ways = {
        "fit": lambda: model().fit(images, labels, shuffle=False, **options),
        "validation": lambda: model().fit(same, labels, **validation),
        "generator": lambda: model().fit(batches(), verbose=0),
        "evaluate": lambda: model().evaluate(images, labels, **options),
        "predict": lambda: model().predict(images, **options),
        "loop": lambda: looped(
            strategy,
            (x for x, _ in strategy.experimental_distribute_dataset(lambda: batches())),
        ),
    }
    return {name: error_of(way) for name, way in ways.items()}


def uneven():
    log = PackageLog()
    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(step=60))
    index = strategy.workers.index
    number = NUM_BATCHES[index]
    results = {}

    own = off(strategy, lambda: pairs(rows(index, number)))
    results["fit"] = fitted(strategy, own, 2), log.pop()
    same = pairs(rows(0, number))
    results["generator"] = fitted(strategy, same, 1), log.pop()
    results["other images"] = other_images(strategy)
    # Each strategy counts its datasets anew.
    results["left early"] = [
        left_early(rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(step=20)))
        for _ in range(2)
    ]
    return results


@pytest.fixture(scope="module")
def workers():
    results = replicax.testing.run(uneven, num_workers=2, deadline_seconds=120)
    return list(results.returned.values())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("way", "num_epochs", "num_steps"),
    # A worker's own global batch is as many steps as there are workers.
    [("fit", 2, 14), ("generator", 1, 7)],
)
def test_fit_ends_its_epochs_together(workers, way, num_epochs, num_steps):
    for index, result in enumerate(workers):
        numbers, messages = result[way]
        assert numbers == [num_steps] * num_epochs
        # Once an epoch, and by the chief only.
        assert len(messages) == (num_epochs if index == 0 else 0)
    for message in workers[0][way][1]:
        assert f"ended after {num_steps} steps" in message
        assert "because worker:1 had no further batch" in message


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "way", ["fit", "validation", "generator", "evaluate", "predict", "loop"]
)
def test_other_images_with_equal_labels_are_an_error_for_both(workers, way):
    for result in workers:
        message = result["other images"][way]
        assert "the first batch of worker:1 differs from that of worker:0" in message
        leaf = "the batch" if way == "predict" else "leaf [0]"
        assert f"worker:0: {leaf}, which is float32[" in message


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [0, 1], ids=["first strategy", "second strategy"])
def test_after_an_epoch_that_was_left_early(workers, number):
    whole = [50.0 + i // 2 for i in range(18)]  # Two steps of each global batch.
    for result in workers:
        assert result["left early"][number] == [whole[:n] for n in STOP_AFTER]
