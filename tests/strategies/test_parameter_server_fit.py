"""`fit` of workers that share an epoch's steps, on real parameter servers.

Two workers of one device and two servers run every case below, in one cluster.
"""

import os
import time
import traceback

import grain
import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

NUM = 330  # Not a multiple of any batch size below.
_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(NUM, 6)).astype("float32")
LABELS = np.argmax(X @ _RNG.normal(size=(6, 3)), axis=1)
# Each example's label and number.
Y = np.stack([LABELS, np.arange(NUM)], axis=1).astype("int32")
QUIET = {"verbose": 0, "batch_size": 32}
WORKERS = ["worker:0", "worker:1"]


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


# What every worker does. Each case returns values that have to be equal on all workers,
# and under "own" those that need not be.


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


def unseeded_initial_weights(strategy):
    model = classifier("sgd")
    model.layers[0].trainable = False
    first = model.get_weights()
    return {"frozen": first[0], "trained": first[2]}


@slow_case
def frozen_layers_stay(strategy):
    model = classifier("sgd")
    model.layers[0].trainable = False
    model.compile("sgd", loss_of, metrics=[Seen()])
    first = model.get_weights()
    history = model.fit(X, Y, **QUIET)
    return outcome(model, history, first=first)


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


@slow_case
def reduced_on_plateau(strategy):
    model = classifier(keras.optimizers.SGD(0.5))
    weights = []
    callbacks = [
        # Every epoch but the first is a plateau.
        keras.callbacks.ReduceLROnPlateau(
            monitor="loss", factor=1e-9, patience=1, min_delta=1e9, min_lr=0.0
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


@case
def py_dataset(strategy):
    model = classifier()
    return outcome(model, model.fit(Batches(), epochs=2, verbose=0))


@slow_case
def py_dataset_with_threads(strategy):
    model = classifier()
    data = Batches(workers=2, max_queue_size=3)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


@case
def part_of_a_py_dataset_in_each_epoch(strategy):
    model = classifier()
    history = model.fit(
        Batches(), epochs=4, steps_per_epoch=4, shuffle=False, verbose=0
    )
    return outcome(model, history)


@slow_case
def grain_dataset(strategy):
    rows = grain.MapDataset.range(NUM).seed(5).shuffle().batch(32)
    model = classifier()
    return outcome(
        model, model.fit(rows.map(lambda i: (X[i], Y[i])), epochs=2, verbose=0)
    )


@slow_case
def generator_that_ends(strategy):
    model = classifier()
    return outcome(model, model.fit(batches(), verbose=0))


@case
def generator_in_epochs(strategy):
    model = classifier()
    return outcome(model, model.fit(endless(), steps_per_epoch=5, epochs=4, verbose=0))


@slow_case
def arrays_in_epochs_of_some_steps(strategy):
    model = classifier()
    history = model.fit(X, Y, steps_per_epoch=4, epochs=4, **QUIET)
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
def another_worker_stops_in_the_middle_of_an_epoch(strategy):
    model = classifier()
    callbacks = [] if strategy.is_chief else [StopAt(2)]
    history = model.fit(X, Y, epochs=50, verbose=0, batch_size=4, callbacks=callbacks)
    return outcome(model, history)


@slow_case
def another_worker_stops_after_an_epoch(strategy):
    # The chief decides, and has not decided so.
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


@slow_case
def constraints_and_regularizers(strategy):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(
                3,
                kernel_constraint=keras.constraints.UnitNorm(axis=0),
                bias_regularizer=keras.regularizers.L2(0.1),
            ),
        ]
    )
    model.compile("sgd", loss_of, metrics=[Seen()])
    return outcome(model, model.fit(X, Y, epochs=2, **QUIET))


@slow_case
def clipped_by_its_norm(strategy):
    model = classifier(keras.optimizers.SGD(1.0, global_clipnorm=1e-3))
    first = model.get_weights()
    history = model.fit(X, Y, epochs=1, **QUIET)
    return outcome(model, history, first=first)


@slow_case
def schedule_and_iterations(strategy):
    # Zero from the sixth update on.
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.0])
    model = classifier(keras.optimizers.SGD(schedule))
    model.fit(X, Y, epochs=1, **QUIET)
    first = model.get_weights()
    history = model.fit(X, Y, epochs=2, **QUIET)
    return outcome(model, history, first=first)


@case
def single_batches(strategy):
    model = classifier(keras.optimizers.SGD(0.1))
    losses = [float(model.train_on_batch(X, Y)[0]) for _ in range(5)]
    strategy.session.barrier("single batches")
    model.evaluate(X[:1], Y[:1], verbose=0)  # With what all have done.
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


def train(cases):
    # No seed: the workers' random numbers are the chief's all the same.
    strategy = rx.ParameterServerStrategy(step_timeout_seconds=30)
    with strategy.scope():
        unseeded = unseeded_initial_weights(strategy)
    results = run_cases(strategy, cases) | {"unseeded": unseeded}
    # Of the whole job: when all have come here.
    strategy.session.barrier("the end")
    staleness = strategy.staleness(), dict(strategy.session.staleness)
    strategy.session.barrier("the end is seen")
    with strategy.scope():
        # This worker ends, which the chief goes on without.
        results["mismatch"] = another_model_than_the_chief_has(strategy)
    return results, *staleness


def train_in_most_ways():
    return train(CASES)


def train_in_other_ways():
    return train(SLOW_CASES)


def run(program, folder):
    results = replicax.testing.run(
        program,
        tasks={"worker": 2, "ps": 2},
        logical_devices=1,
        env={"FOLDER": str(folder)},
        deadline_seconds=200,
    )
    return [results[name].value for name in WORKERS]


@pytest.fixture(scope="module")
def most(tmp_path_factory):
    """What both workers returned."""
    return run(train_in_most_ways, tmp_path_factory.mktemp("most"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return run(train_in_other_ways, tmp_path_factory.mktemp("others"))


def equal_outcome(workers, name):
    """A case's outcome, the very same on both workers, but for each one's own."""
    found = [dict(results[name]) for results, _, _ in workers]
    for outcome_of in found:
        assert "failed" not in outcome_of, outcome_of["failed"]
    own = [outcome_of.pop("own", None) for outcome_of in found]
    leaves = [jax.tree_util.tree_leaves_with_path(f) for f in found]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=where)
    return found[0], own


NUM_STEPS = {
    "uneven_data_with_validation": 88,
    "learning_rate_scheduler": 33,
    "early_stopping_restores_best_weights": 44,
    "py_dataset": 22,
    "part_of_a_py_dataset_in_each_epoch": 15,
    "generator_in_epochs": 20,
    "more_workers_than_steps": 3,
    "batch_normalization": 44,
}
SLOW_NUM_STEPS = {
    "frozen_layers_stay": 11,
    "arrays_in_epochs_of_some_steps": 15,
    "generator_that_ends": 11,
    "steps_per_execution": 22,
    "reduced_on_plateau": 33,
    "grain_dataset": 22,
    "py_dataset_with_threads": 22,
    "moving_average_of_weights": 22,
    "constraints_and_regularizers": 22,
    "another_worker_stops_after_an_epoch": 33,
    "schedule_and_iterations": 33,
    "values_assigned_at_the_start_of_an_epoch": 33,
    "dropout_masks": 22,
    "a_slow_worker_does_less": 83,
}
# As in Keras, whose threads give some batches of an earlier start again; and epochs
# of some of the data.
NOT_ALL = {
    "py_dataset_with_threads": [138, 138],
    "part_of_a_py_dataset_in_each_epoch": [128, 128, 74, 128],
    "arrays_in_epochs_of_some_steps": [128, 128, 74, 128],
    "generator_in_epochs": [160, 160, 138, 160],
}


def assert_every_batch_once(workers, name, num_steps):
    found, _ = equal_outcome(workers, name)
    history = found["history"]
    expected = NOT_ALL.get(name, [NUM] * len(history["once"]))
    assert history["once"] == expected
    assert name == "py_dataset_with_threads" or not any(history["more"])
    assert found["iterations"] == num_steps
    assert all(np.isfinite(loss) for loss in history["loss"])


@pytest.mark.parametrize("name", NUM_STEPS)
def test_every_batch_is_trained_on_once(most, name):
    assert_every_batch_once(most, name, NUM_STEPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NUM_STEPS)
def test_every_batch_is_trained_on_once_in_other_ways(others, name):
    assert_every_batch_once(others, name, SLOW_NUM_STEPS[name])


def test_both_workers_train_together(most):
    found, own = equal_outcome(most, "uneven_data_with_validation")
    assert sum(each["steps"] for each in own) == 88
    assert min(each["steps"] for each in own) > 0
    assert found["history"]["accuracy"][-1] > 0.93
    assert found["history"]["val_accuracy"][-1] > 0.93
    assert found["evaluated"][1] > 0.93
    # Slots are on the servers: here are iterations and learning rate only.
    assert found["num_optimizer_variables"] == 2


def test_staleness_is_what_the_workers_saw(most):
    for _, of_all, _ in most:
        for name, (_, _, own) in zip(WORKERS, most, strict=True):
            # Each server counts each push; the two see the same number of them.
            assert sum(of_all[name].values()) >= sum(own.values())
            assert max(of_all[name]) == max(own)


def test_initial_weights_are_the_chiefs_without_a_seed(most):
    equal_outcome(most, "unseeded")


def test_a_scheduled_learning_rate_holds_from_its_epoch_on(most):
    found, _ = equal_outcome(most, "learning_rate_scheduler")
    assert_unchanged(found["each"][0], found["each"][2])
    assert found["history"]["learning_rate"] == pytest.approx([0.1, 0, 0])


def assert_unchanged(before, after, tolerance=0.0):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def assert_changed(before, after):
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-3


@pytest.mark.slow
def test_a_reduced_learning_rate_reaches_the_servers(others):
    found, _ = equal_outcome(others, "reduced_on_plateau")
    assert_changed(found["each"][0], found["each"][1])
    assert_unchanged(found["each"][1], found["each"][2], 1e-6)


def test_early_stopping_restores_the_best_weights(most):
    found, _ = equal_outcome(most, "early_stopping_restores_best_weights")
    history = found["first"]
    assert len(history["loss"]) == 3
    assert found["evaluated"]["loss"] == pytest.approx(history["val_loss"][0], rel=1e-5)
    # The next fit goes on from there.
    assert found["history"]["loss"][0] < history["loss"][0]


def test_a_worker_without_a_step_has_all_values(most):
    found, own = equal_outcome(most, "more_workers_than_steps")
    assert sum(each["steps"] for each in own) == 3
    history = found["history"]
    assert history["val_once"] == [NUM] * 3
    assert history["val_loss"][2] < history["val_loss"][0]


def test_moving_statistics_are_those_of_all_workers(most):
    found, _ = equal_outcome(most, "batch_normalization")
    mean = found["weights"][4]
    assert np.abs(mean).max() > 0.1


@pytest.mark.parametrize(
    "name",
    [
        "chief_stops_in_the_middle_of_an_epoch",
        "another_worker_stops_in_the_middle_of_an_epoch",
    ],
)
def test_all_stop_in_the_middle_of_an_epoch(most, name):
    found, _ = equal_outcome(most, name)
    (once,) = found["history"]["once"]
    assert 8 <= once < NUM
    assert once == 4 * found["iterations"]


def test_weights_that_the_chief_assigns_are_everywhere(most):
    found, _ = equal_outcome(most, "weights_that_the_chief_assigns")
    for weights, value in ((found["first"], 0.25), (found["second"], 0.5)):
        # The learning rate is 0; the moving statistics do move.
        for each in weights[:4] + weights[6:8]:
            if each.ndim == 2:
                np.testing.assert_array_equal(each, value)
    for a, b in zip(found["weights"], found["second"], strict=True):
        if a.ndim == 2:
            np.testing.assert_array_equal(a, b)


def test_single_batches_train_everywhere(most):
    found, own = equal_outcome(most, "single_batches")
    assert found["tested"] < min(each["losses"][0] for each in own)
    assert found["iterations"] == 10


def test_a_distributed_dataset_is_trained_on(most):
    found, _ = equal_outcome(most, "a_distributed_dataset")
    assert found["history"]["more"] == [0, 0, 0]
    assert all(0 < once <= NUM for once in found["history"]["once"])


def test_another_model_than_the_chiefs_is_an_error_at_once(most):
    (chief, _, _), (worker, _, _) = most
    assert chief["mismatch"] is None
    error, seconds = worker["mismatch"]
    assert "differs from the chief's" in error
    assert "[6, 9]" in error
    assert "[6, 8]" in error
    assert seconds < 20


@pytest.mark.slow
def test_weightless_examples_change_nothing(others):
    found, _ = equal_outcome(others, "weights_of_classes_and_samples")
    assert_unchanged(found["first"], found["weights"])


@pytest.mark.slow
def test_frozen_layers_stay(others):
    found, _ = equal_outcome(others, "frozen_layers_stay")
    assert_unchanged(found["first"][:2], found["weights"][:2])
    assert_changed(found["first"][2:], found["weights"][2:])


@pytest.mark.slow
def test_masks_differ_between_workers(others):
    _, own = equal_outcome(others, "dropout_masks")
    assert (own[0]["mask"] != own[1]["mask"]).mean() > 0.2


@pytest.mark.slow
def test_constraints_hold(others):
    found, _ = equal_outcome(others, "constraints_and_regularizers")
    norms = np.linalg.norm(found["weights"][0], axis=0)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


@pytest.mark.slow
def test_gradients_are_clipped(others):
    found, _ = equal_outcome(others, "clipped_by_its_norm")
    moved = [a - b for a, b in zip(found["first"], found["weights"], strict=True)]
    norm = np.sqrt(sum(np.square(m).sum() for m in moved))
    assert 0 < norm <= 11 * 1e-3 * 1.001


@pytest.mark.slow
def test_a_schedule_counts_the_updates_of_all(others):
    found, _ = equal_outcome(others, "schedule_and_iterations")
    assert_unchanged(found["first"], found["weights"])


@pytest.mark.slow
def test_a_slow_worker_does_less(others):
    _, own = equal_outcome(others, "a_slow_worker_does_less")
    assert 0 < own[1]["steps"] < own[0]["steps"]
    assert own[0]["steps"] + own[1]["steps"] == 83


@pytest.mark.slow
def test_metrics_of_many_numbers_are_summed(others):
    found, _ = equal_outcome(others, "a_large_metric")
    assert found["history"]["large"] == pytest.approx([11 * 1.2345678], rel=1e-5)


@pytest.mark.slow
def test_values_assigned_at_the_start_of_an_epoch_are_used(others):
    found, _ = equal_outcome(others, "values_assigned_at_the_start_of_an_epoch")
    for each in found["weights"]:
        np.testing.assert_array_equal(each, 2)


@pytest.mark.slow
def test_each_worker_trains_on_its_own_files(others):
    found, _ = equal_outcome(others, "datasets_from_a_function")
    assert not any(found["history"]["more"])
