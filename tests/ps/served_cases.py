"""Cases of `fit` on parameter servers, which every worker runs.

Each case returns values that must be equal on all workers. Values under "own" may
differ.
"""

import os
import time
import traceback
from unittest import mock

import grain
import keras
import numpy as np
import pytest
import scipy.sparse
from keras import layers

import replicax as rx
from replicax.ps import limits

NUM = 330  # Not a multiple of any batch size below.
_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(NUM, 6)).astype("float32")
LABELS = np.argmax(X @ _RNG.normal(size=(6, 3)), axis=1)
# Each example's label and number.
Y = np.stack([LABELS, np.arange(NUM)], axis=1).astype("int32")
QUIET = {"verbose": 0, "batch_size": 32}


@keras.saving.register_keras_serializable()
def loss_of(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(
        y_true[:, 0], y_pred, from_logits=True
    )


def accuracy(y_true, y_pred):
    return keras.metrics.sparse_categorical_accuracy(y_true[:, 0], y_pred)


class Seen(keras.metrics.Metric):
    """How often each example was trained on in the epoch, by all workers together."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.counts = self.add_variable((NUM,), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = keras.ops.one_hot(y_true[:, 1], NUM)
        self.counts.assign_add(keras.ops.sum(ids, axis=0))

    def result(self):
        counts = keras.ops.cast(self.counts, "int32")
        return {
            "once": keras.ops.sum(counts == 1),
            "more": keras.ops.sum(counts > 1),
        }


def classifier(optimizer="sgd", *hidden, **options):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            *hidden,
            layers.Dense(3),
        ]
    )
    model.compile(optimizer, loss_of, metrics=[accuracy, Seen()], **options)
    return model


def outcome(model, history=None, **more):
    return {
        "weights": model.get_weights(),
        "history": {} if history is None else history.history,
        "iterations": int(model.optimizer.iterations),
        **more,
    }


CASES = {}
SLOW_CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def slow_case(function):
    SLOW_CASES[function.__name__] = function
    return function


@case
def uneven_data_with_validation(strategy):
    before = strategy.session.steps
    model = classifier(keras.optimizers.Adam(0.03))
    history = model.fit(X, Y, epochs=8, validation_data=(X[:50], Y[:50]), **QUIET)
    return outcome(
        model,
        history,
        evaluated=model.evaluate(X, Y, **QUIET),
        predicted=model.predict(X[:40], **QUIET),
        num_optimizer_variables=len(model.optimizer.variables),
        own={"steps": strategy.session.steps - before},
    )


@slow_case
def sparse_rows(strategy):
    rows = scipy.sparse.csr_array(np.where(np.abs(X) > 1, X, 0))
    model = classifier(keras.optimizers.SGD(0.1))
    history = model.fit(rows, Y, epochs=2, **QUIET)
    return outcome(model, history, predicted=model.predict(rows[:40], **QUIET))


@case
def evaluates_within_an_epoch(strategy):
    found = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 4 == 0:
                results = self.model.evaluate(X, Y, return_dict=True, **QUIET)
                predicted = self.model.predict(X, **QUIET)
                expected = np.mean(loss_of(Y, predicted))
                found.append((batch, results["loss"], float(expected)))

    model = classifier("sgd")
    model.fit(X, Y, callbacks=[Looks()], **QUIET)
    return outcome(model, own=found)


def unseeded_initial_weights(strategy):
    model = classifier("sgd")
    model.layers[0].trainable = False
    first = model.get_weights()
    return {"frozen": first[0], "trained": first[2]}


@case
def learning_rate_scheduler(strategy):
    # Nothing is learned any more after the first epoch.
    model = classifier(keras.optimizers.SGD(0.1))
    weights = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(
            lambda epoch, rate: 0.0 if epoch else 0.1
        ),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: weights.append(model.get_weights())
        ),
    ]
    history = model.fit(X, Y, epochs=3, callbacks=callbacks, **QUIET)
    return outcome(model, history, each=weights)


@case
def early_stopping_restores_best_weights(strategy):
    model = classifier(keras.optimizers.SGD(0.1))
    validation = (X[:50], Y[:50])
    stop = keras.callbacks.EarlyStopping(
        # Only the first epoch is an improvement.
        monitor="val_loss",
        patience=2,
        min_delta=1e9,
        restore_best_weights=True,
    )
    history = model.fit(
        X, Y, epochs=9, validation_data=validation, callbacks=[stop], **QUIET
    )
    best = model.get_weights()
    evaluated = model.evaluate(*validation, return_dict=True, **QUIET)
    # And the next fit begins with them.
    then = model.fit(X, Y, epochs=1, **QUIET)
    return outcome(model, then, first=history.history, best=best, evaluated=evaluated)


class Batches(keras.utils.PyDataset):
    """Ten batches, and a last one of ten examples."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * index + 32)
        return X[rows], Y[rows]


def batches():
    for index in range(11):
        yield Batches()[index]


def endless():
    while True:
        yield from batches()


def grain_rows():
    rows = grain.MapDataset.range(NUM).seed(5).shuffle().batch(32)
    rows = rows.repeat(1, reseed_each_epoch=False)  # As in plain Keras.
    return rows.map(lambda i: (X[i], Y[i]))


def fit_on(make_data, **options):
    def fitted(strategy):
        model = classifier()
        return outcome(model, model.fit(*make_data(), verbose=0, **options))

    return fitted


SLOW_CASES |= {
    "py_dataset_with_threads": fit_on(
        lambda: [Batches(workers=2, max_queue_size=3)], epochs=2
    ),
    "grain_dataset": fit_on(lambda: [grain_rows()], epochs=2),
    "generator_that_ends": fit_on(lambda: [batches()]),
    "generator_in_epochs": fit_on(lambda: [endless()], steps_per_epoch=5, epochs=4),
    "arrays_in_epochs_of_some_steps": fit_on(
        lambda: (X, Y), batch_size=32, steps_per_epoch=4, epochs=4
    ),
}


@case
def part_of_a_py_dataset_in_each_epoch(strategy):
    model = classifier()
    history = model.fit(
        Batches(), epochs=4, steps_per_epoch=4, shuffle=False, verbose=0
    )
    return outcome(model, history)


@slow_case
def steps_per_execution(strategy):
    model = classifier(keras.optimizers.Adam(0.01), steps_per_execution=3)
    return outcome(model, model.fit(X, Y, epochs=2, **QUIET))


@case
def more_workers_than_steps(strategy):
    before = strategy.session.steps
    model = classifier(keras.optimizers.SGD(0.1), layers.BatchNormalization())
    history = model.fit(
        X, Y, batch_size=NUM, epochs=3, validation_data=(X, Y), verbose=0
    )
    return outcome(model, history, own={"steps": strategy.session.steps - before})


@slow_case
def weights_of_classes_and_samples(strategy):
    model = classifier()
    model.fit(X, LABELS_ONLY, class_weight={0: 0.0, 1: 0.0, 2: 0.0}, **QUIET)
    weightless = outcome(model)["weights"]
    first = model.get_weights()
    weights = np.zeros(NUM, "float32")
    history = model.fit(X, Y, sample_weight=weights, **QUIET)
    return outcome(model, history, first=first, weightless=weightless)


LABELS_ONLY = Y[:, :1]


@case
def batch_normalization(strategy):
    model = classifier("sgd", layers.BatchNormalization(momentum=0.5))
    history = model.fit(X + 5, Y, epochs=4, **QUIET)
    return outcome(model, history, predicted=model.predict(X[:20] + 5, **QUIET))


@slow_case
def dropout_masks(strategy):
    with_mask = keras.Sequential([keras.Input((200,)), layers.Dropout(0.5)])

    def mask():
        return with_mask(np.ones((1, 200), "float32"), training=True)

    mine = strategy.experimental_local_results(strategy.run(mask))
    model = classifier("sgd", layers.Dropout(0.3))
    history = model.fit(X, Y, epochs=2, **QUIET)
    return outcome(model, history, own={"mask": np.asarray(mine[0])})


class StopAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step
        self.number = 0

    def on_train_batch_end(self, batch, logs=None):
        self.number += 1
        if self.number == self.step:
            self.model.stop_training = True


@case
def chief_stops_in_the_middle_of_an_epoch(strategy):
    model = classifier()
    callbacks = [StopAt(2)] if strategy.is_chief else []
    history = model.fit(X, Y, epochs=50, verbose=0, batch_size=4, callbacks=callbacks)
    return outcome(model, history)


@case
def another_worker_stops_in_the_middle_of_an_epoch(strategy, step=2):
    model = classifier()
    callbacks = [] if strategy.is_chief else [StopAt(step)]
    history = model.fit(X, Y, epochs=50, verbose=0, batch_size=4, callbacks=callbacks)
    return outcome(model, history)


@case
def one_of_a_thousand_stops_in_the_middle_of_an_epoch(strategy):
    # With these rates each worker claims several steps at once, as in a large job.
    with mock.patch.multiple(limits, _CLAIMS_PER_SECOND=0.01, _WORKERS_PER_STEP=0.1):
        return another_worker_stops_in_the_middle_of_an_epoch(strategy, step=8)


@slow_case
def another_worker_stops_after_an_epoch(strategy):
    # Only the chief decides after an epoch, and its callback does not stop.
    model = classifier()

    def stop(epoch, logs):
        model.stop_training = not strategy.is_chief

    callback = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    history = model.fit(X, Y, epochs=3, callbacks=[callback], **QUIET)
    return outcome(model, history)


@case
def weights_that_the_chief_assigns(strategy):
    model = classifier(keras.optimizers.SGD(0.0), layers.BatchNormalization())
    if strategy.is_chief:  # Before the first fit.
        model.set_weights([np.full_like(w, 0.25) for w in model.get_weights()])
    model.fit(X, Y, **QUIET)
    first = model.get_weights()
    if strategy.is_chief:  # Between two.
        model.set_weights([np.full_like(w, 0.5) for w in model.get_weights()])
    model.fit(X, Y, **QUIET)
    second = model.get_weights()
    if strategy.is_chief:
        path = os.path.join(os.environ["FOLDER"], "chief.weights.h5")
        model.save_weights(path)
        model.set_weights([np.full_like(w, 0.75) for w in model.get_weights()])
        model.load_weights(path)
    history = model.fit(X, Y, **QUIET)
    return outcome(model, history, first=first, second=second)


@slow_case
def moving_average_of_weights(strategy):
    model = classifier(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    return outcome(model, model.fit(X, Y, epochs=2, **QUIET))


@case
def single_batches(strategy):
    model = classifier(keras.optimizers.SGD(0.1))
    losses = [float(model.train_on_batch(X, Y)[0]) for _ in range(5)]
    strategy.session.barrier("single batches")
    model.evaluate(X[:1], Y[:1], verbose=0)  # Pulls the updates of all workers.
    return outcome(
        model,
        tested=model.test_on_batch(X[:40], Y[:40], return_dict=True)["loss"],
        predicted=model.predict_on_batch(X[:5]),
        own={"losses": losses},
    )


@case
def a_distributed_dataset(strategy):
    model = classifier()
    data = strategy.experimental_distribute_dataset((X, Y), batch_size=32)
    return outcome(model, model.fit(data, epochs=3, verbose=0))


@slow_case
def datasets_from_a_function(strategy):
    def dataset(context):
        rows = np.arange(NUM)[context.input_pipeline_id :: context.num_input_pipelines]
        size = context.get_per_replica_batch_size(30 * context.num_replicas_in_sync)
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            yield X[chosen], Y[chosen]

    model = classifier()
    data = strategy.distribute_datasets_from_function(dataset)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@case
def evaluates_distributed_datasets(strategy):
    model = classifier(keras.optimizers.SGD(0.0))

    def own(context):
        mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return list(batches())[mine]

    data = strategy.experimental_distribute_dataset((X, Y), batch_size=32)
    given = [data, strategy.distribute_datasets_from_function(own)]
    history = model.fit(X, Y, validation_data=data, **QUIET)
    return outcome(
        model,
        history,
        whole=model.evaluate(X, Y, return_dict=True, **QUIET),
        evaluated=[model.evaluate(d, return_dict=True, verbose=0) for d in given],
        predicted=[model.predict(x, verbose=0) for x in (X, data)],
    )


class Counts(layers.Layer):
    """Counts examples and steps, and keeps the mean of the last batch."""

    def build(self, input_shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.steps = self.add_weight(dtype="int32", **options)
        self.examples = self.add_weight(aggregation="sum", **options)
        self.last = self.add_weight(aggregation="only_first_replica", **options)

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
            self.examples.assign_add(len(x))
            self.last.assign(keras.ops.mean(x))
        return x


@case
def variables_that_steps_count_in(strategy):
    model = classifier("sgd", Counts())
    counts = model.layers[1]
    history = model.fit(X, Y, epochs=2, **QUIET)

    def counted():
        return [float(counts.steps), float(counts.examples)]

    first = counted()
    if strategy.is_chief:
        counts.steps.assign(100)
    model.fit(X, Y, **QUIET)
    found = outcome(model, history, counted=[first, counted()], own=float(counts.last))
    return found | {"weights": []}


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


@slow_case
def a_slow_worker_does_less(strategy):
    before = strategy.session.steps
    model = classifier()
    callbacks = [] if strategy.is_chief else [Slow()]
    history = model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    return outcome(model, history, own={"steps": strategy.session.steps - before})


@slow_case
def values_assigned_at_the_start_of_an_epoch(strategy):
    model = classifier(keras.optimizers.SGD(0.0))

    def assign(epoch, logs):
        if epoch and strategy.is_chief:
            model.set_weights([np.full_like(w, epoch) for w in model.get_weights()])

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=assign)
    history = model.fit(X, Y, epochs=3, callbacks=[callback], **QUIET)
    return outcome(model, history)


@slow_case
def a_large_metric(strategy):
    model = classifier()
    model.compile("sgd", loss_of, metrics=[Large(), Seen()])
    return outcome(model, model.fit(X, Y, **QUIET))


class Large(keras.metrics.Metric):
    """As a confusion matrix of 200 classes."""

    def __init__(self):
        super().__init__(name="large")
        self.matrix = self.add_variable((200, 200), "zeros", name="matrix")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.matrix.assign_add(keras.ops.ones((200, 200)) * 1.2345678)

    def result(self):
        return keras.ops.mean(self.matrix)


@slow_case
def assigned_steps_and_states(strategy):
    x = X[:40, :3]
    options = {"batch_size": 10, "verbose": 0}
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([50], [0.1, 0.0])
    model.compile(keras.optimizers.SGD(rates), "mse")
    recurrent = keras.Sequential(
        [keras.Input((4, 3), batch_size=10), layers.GRU(2, stateful=True)]
    )
    recurrent.compile("sgd", "mse")

    def train(steps):
        if strategy.is_chief:
            model.optimizer.iterations.assign(steps)
        before = model.get_weights()[0]
        model.fit(x, x[:, :1], **options)
        moved = np.abs(model.get_weights()[0] - before).max()
        return int(model.optimizer.iterations), float(moved)

    found = {"trained": [train(steps) for steps in (100, 0, 60, 7)]}
    with pytest.raises(NotImplementedError) as refused:
        recurrent.fit(np.ones((40, 4, 3)), np.ones((40, 2)), **options)
    found["refused"] = str(refused.value)
    with pytest.raises(NotImplementedError) as refused:
        model.fit(x, x[:, :1], callbacks=[keras.callbacks.SwapEMAWeights()], **options)
    return found | {"swaps": str(refused.value), "after": train(100)}


def another_model_than_the_chief_has(strategy):
    width = 8 if strategy.is_chief else 9
    model = keras.Sequential([keras.Input((6,)), layers.Dense(width), layers.Dense(3)])
    model.compile("sgd", loss_of)
    begin = time.monotonic()
    try:
        model.fit(X, Y, **QUIET)
    except rx.ClusterMismatchError as error:
        return str(error), time.monotonic() - begin
    return None


def run_cases(strategy, cases):
    results = {}
    for name, function in cases.items():
        keras.utils.set_random_seed(1)
        begin = time.monotonic()
        try:
            with strategy.scope():
                results[name] = function(strategy)
        except Exception:  # noqa: BLE001 - The test of the case shows it.
            results[name] = {"failed": traceback.format_exc()}
            print(name, results[name]["failed"], flush=True)
        print(f"{name}: {time.monotonic() - begin:.2f} s", flush=True)
    return results
