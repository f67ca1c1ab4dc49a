"""Shuffled Grain datasets: another order in each epoch, the same after a restart.

A metric identifies a step's rows: each row has its own power of two, and the metric is
their sum since the epoch's start.
"""

import contextlib

import grain
import keras
import numpy as np
import pytest

import replicax as rx

ROWS = 12
# Keras learns the length of such data at their end.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")


class Seen(keras.callbacks.Callback):
    """Records the rows of each epoch; may fail after some steps."""

    def __init__(self, fails_after=None):
        super().__init__()
        self.epochs, self.fails_after, self.steps = {}, fails_after, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs[epoch] = []
        self.now = self.epochs[epoch]

    def on_train_batch_end(self, batch, logs=None):
        self.now.append(round(logs["total"]))
        self.steps += 1
        if self.steps == self.fails_after:
            raise KeyError("stopped")


class OfBatch(keras.metrics.Metric):
    """The sum of the rows' numbers."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(initializer="zeros", name="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true))

    def result(self):
        return keras.ops.convert_to_tensor(self.total)


def examples():
    # Sums of two of them are all different.
    x = np.ones((ROWS, 1), "float32")
    return grain.MapDataset.source(
        list(
            zip(x, 2.0 ** np.arange(ROWS).reshape(-1, 1).astype("float32"), strict=True)
        )
    )


def dataset(kind="map"):
    shuffled = examples().shuffle(seed=7)
    match kind:
        case "map":
            return shuffled.batch(2)
        case "one_order":
            return shuffled.batch(2).repeat(1, reseed_each_epoch=False)
        case "iter":
            return shuffled.to_iter_dataset().batch(2)
        case "filter":
            return shuffled.filter(lambda row: row[1][0] > 8).to_iter_dataset().batch(2)
        case "endless":
            return shuffled.repeat().batch(2)
    raise ValueError(kind)


def made(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(
            "sgd", lambda y, p: keras.ops.mean(0 * p + 0 * y), metrics=[OfBatch()]
        )
    return model


def trained(data, strategy=None, epochs=3, model=None, **options):
    model = model or made(strategy or rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    seen = Seen(options.pop("fails_after", None))
    callbacks = [*options.pop("callbacks", []), seen]
    with contextlib.suppress(KeyError):
        model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return seen.epochs


def given(name, data, strategy):
    if name == "raw":
        return data
    if name == "distributed":
        return strategy.experimental_distribute_dataset(data)
    return strategy.distribute_datasets_from_function(lambda context: data)


@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("raw", "map", 2),
        ("distributed", "iter", 2),
        pytest.param("raw", "iter", 1, marks=pytest.mark.slow),
        pytest.param("raw", "filter", 2, marks=pytest.mark.slow),
        pytest.param("distributed", "map", 1, marks=pytest.mark.slow),
        pytest.param("distributed", "filter", 2, marks=pytest.mark.slow),
    ],
)
def test_each_epoch_has_its_order(name, kind, devices) -> None:
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    found = trained(given(name, dataset(kind), strategy), strategy)
    assert len({tuple(order) for order in found.values()}) == 3
    assert len({order[-1] for order in found.values()}) == 1
    again = trained(given(name, dataset(kind), strategy), strategy)
    assert again == found


def test_epochs_of_datasets_from_a_function() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    found = trained(given("function", examples().shuffle(seed=7).batch(1), strategy))
    assert len({tuple(order) for order in found.values()}) == 3
    assert len({order[-1] for order in found.values()}) == 1


def test_a_repeat_without_reseeding_keeps_one_order() -> None:
    found = trained(dataset("one_order"))
    assert found[0] == found[1] == found[2]
    assert found[0] == trained(dataset(), epochs=1)[0]


def test_a_later_fit_continues_the_iterations() -> None:
    whole = trained(dataset(), epochs=4)
    data = dataset()
    parts = [trained(data, epochs=1)[0] for _ in range(2)]
    assert parts == [whole[0], whole[1]]
    assert trained(data, epochs=4, initial_epoch=2) == {2: whole[2], 3: whole[3]}
    # Also in another process, which has not iterated over it before.
    assert trained(dataset(), epochs=4, initial_epoch=3) == {3: whole[3]}


@pytest.mark.parametrize("kind", ["endless", "map"])
def test_epochs_of_some_steps_continue_in_the_data(kind) -> None:
    """5 steps of 6 an epoch: an iteration lasts several epochs."""
    whole = np.concatenate([np.diff(x, prepend=0) for x in trained(dataset()).values()])
    epochs = 2 if kind == "endless" else 1
    found = trained(dataset(kind), epochs=epochs, steps_per_epoch=5)
    steps = np.concatenate([np.diff(x, prepend=0) for x in found.values()])
    assert steps.tolist() == whole[: 5 * epochs].tolist()


CASES = [("map", {}), ("iter", {}), ("endless", {"steps_per_epoch": 5})]


@pytest.mark.parametrize(
    ("name", "kind", "options", "fails_after"),
    [
        ("raw", "map", {}, 8),
        *(
            pytest.param(name, *case, number, marks=pytest.mark.slow)
            for name in ("raw", "distributed")
            for case in CASES
            for number in (6, 8)
        ),
    ],
)
def test_resumed_training_has_the_order_of_uninterrupted(
    tmp_path, name, kind, options, fails_after
) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    whole = trained(given(name, dataset(kind), strategy), strategy, **options)

    def run(fails_after):
        backup = rx.BackupAndRestore(str(tmp_path), save_freq=1)
        data = given(name, dataset(kind), strategy)
        return trained(
            data, strategy, callbacks=[backup], fails_after=fails_after, **options
        )

    first, second = run(fails_after), run(None)
    assert first[0] == whole[0]
    assert 2 in second
    for epoch, totals in second.items():
        assert totals == whole[epoch][-len(totals) :]
    steps = [sum(map(len, run.values())) for run in (first, second, whole)]
    # The step that failed was not backed up.
    assert steps[2] in (steps[0] + steps[1], steps[0] + steps[1] - 1)


def test_predict_and_evaluate_have_the_order_of_the_dataset() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
        model.compile("sgd", "mse")
    data = grain.MapDataset.range(ROWS).map(lambda i: np.float32([i])).shuffle(seed=1)
    order = [int(row[0]) for row in data]
    distributed = strategy.experimental_distribute_dataset(data.batch(4))
    for given_data in (data.batch(4), distributed):
        for _ in range(2):
            found = model.predict(given_data, verbose=0)
            assert [int(row[0]) for row in found] == order
    assert distributed.iteration == 0
