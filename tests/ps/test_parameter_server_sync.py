"""`sync=True`: workers that make each step together are as one `MirroredStrategy`.

Two workers of one device, with two servers, run every case below; the oracle is the
same case on two devices of one process. A second cluster has a third worker, for the
one that a step does without.
"""

import logging
import logging.handlers
import time
import traceback

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.keras.test_masks_and_weights import in_loops
from tests.ps.sync_losses import losses_of_a_loop, losses_that_are_sums

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    # Keras says so at the end of a dataset of unknown length.
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(96, 6)).astype("float32")
Y = np.argmax(X @ _RNG.normal(size=(6, 3)), axis=1).astype("int32")
WEIGHTS = _RNG.uniform(0.2, 2.0, size=96).astype("float32")
OPTIONS = {"batch_size": 24, "verbose": 0}
DEADLINE = 40


def classifier(optimizer, *hidden, **options):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="first"),
            *hidden,
            layers.Dense(3),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def outcome(model, history):
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "iterations": np.asarray(model.optimizer.iterations),
    }


def adam_with_validation_and_weights():
    model = classifier(keras.optimizers.Adam(0.01), weighted_metrics=["accuracy"])
    history = model.fit(
        X,
        Y,
        epochs=2,
        sample_weight=WEIGHTS,
        validation_data=(X[:13], Y[:13]),
        **OPTIONS,
    )
    return outcome(model, history) | {
        "predicted": model.predict(X[:10], verbose=0),
        "evaluated": model.evaluate(X, Y, verbose=0),
    }


def batches_that_do_not_divide():
    """Three batches of 25, and a last one of 21: parts of 13, 12, 11 and 10 rows."""
    model = classifier(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(X, Y, batch_size=25, epochs=2, verbose=0)
    return outcome(model, history)


def batch_normalization():
    model = classifier("sgd", layers.BatchNormalization(momentum=0.8))
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


class Counts(layers.Layer):
    """Counts examples and steps."""

    def build(self, input_shape):
        options = {"initializer": "zeros", "trainable": False}
        self.steps = self.add_weight((), name="steps", dtype="int32", **options)
        self.examples = self.add_weight(
            (), name="examples", aggregation="sum", **options
        )

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
            self.examples.assign_add(len(x))
        return x


def variables_that_steps_count_in():
    model = classifier("sgd", layers.BatchNormalization(momentum=0.8), Counts())
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


def clipped_by_the_norm_of_all():
    model = classifier(keras.optimizers.SGD(0.5, global_clipnorm=0.05))
    return outcome(model, model.fit(X, Y, **OPTIONS))


def clipped_by_each_norm():
    model = classifier(keras.optimizers.SGD(0.5, clipnorm=0.02))
    return outcome(model, model.fit(X, Y, **OPTIONS))


def accumulated_gradients():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = classifier(optimizer)
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


def adamw_with_exclusions_and_a_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 8)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = classifier(optimizer)
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


def several_steps_per_execution():
    model = classifier("sgd", steps_per_execution=3)
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


def learning_rate_that_a_callback_assigns():
    callback = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.1 / (1 + epoch)
    )
    model = classifier(keras.optimizers.Adam(0.3))
    return outcome(model, model.fit(X, Y, epochs=3, callbacks=[callback], **OPTIONS))


class StopAt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True


def stopped_in_the_middle_of_an_epoch():
    model = classifier("sgd")
    return outcome(model, model.fit(X, Y, epochs=4, callbacks=[StopAt()], **OPTIONS))


def single_batches_and_then_fit():
    model = classifier(keras.optimizers.SGD(0.1))
    # Each worker has its rows; in one process the batch is divided.
    worker = getattr(rx.get_strategy(), "session", None)
    rows = slice(0, 24) if worker is None else slice(12 * worker.index, None)
    rows = rows if worker is None else slice(rows.start, rows.start + 12)
    for _ in range(2):
        model.train_on_batch(X[rows], Y[rows])
    return outcome(model, model.fit(X, Y, **OPTIONS))


def a_distributed_dataset():
    model = classifier("sgd")
    data = rx.get_strategy().experimental_distribute_dataset((X, Y), batch_size=24)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


class Assigns(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.set_weights([v * 0 + 9 for v in self.model.get_weights()])


def values_that_are_assigned_within_an_epoch():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    # Its gradients are those of any values: others may have begun the next step.
    model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: outputs)
    history = model.fit(X, Y, epochs=2, shuffle=False, callbacks=[Assigns()], **OPTIONS)
    return outcome(model, history)["weights"], int(model.optimizer.iterations)


def own_data_of_unequal_length():
    """The worker with fewer batches ends the epoch for both."""
    model = classifier("sgd")
    worker = getattr(rx.get_strategy(), "session", None)
    if worker is None:
        parts = [slice(0, 12), slice(48, 60), slice(12, 24), slice(60, 72)]
        x, y = (np.concatenate([array[rows] for rows in parts]) for array in (X, Y))
        options = {**OPTIONS, "shuffle": False}
        longer = model.fit(x, y, epochs=2, **options).history
        shorter = model.fit(x[:24], y[:24], **options)
    else:
        rows = [slice(0, 48), slice(48, 72)][worker.index]

        def batches(context):
            num = [4, 2][context.input_pipeline_id]
            return list(
                zip(np.split(X[rows], num), np.split(Y[rows], num), strict=True)
            )

        data = rx.get_strategy().distribute_datasets_from_function(batches)
        longer = model.fit(data, epochs=2, verbose=0).history
        shorter = model.fit(data, steps_per_epoch=1, verbose=0)
    return outcome(model, shorter) | {"longer": longer}


class StopLater(StopAt):
    """Stops when the other worker has begun the next step, or long before it does."""

    def __init__(self, is_late):
        super().__init__()
        self.is_first = rx.get_strategy().session.is_chief
        self.is_late = is_late

    def on_train_batch_end(self, batch, logs=None):
        if self.is_first != self.is_late:
            time.sleep(1)
        if not self.is_first:
            super().on_train_batch_end(batch)


def own_data_that_one_worker_stops():
    """A step that another worker has begun is made by both; none after it."""
    model = classifier("sgd")
    worker = getattr(rx.get_strategy(), "session", None)
    found = []
    for is_late in (True, False):
        if worker is None:
            size = 72 if is_late else 48
            options = {**OPTIONS, "shuffle": False}
            parts = [slice(i, None, 2) for i in range(2)]
            halves = [
                [a[part].reshape(-1, 12, *a.shape[1:]) for part in parts]
                for a in (X[:96], Y[:96])
            ]
            x, y = (
                np.stack(both, 1).reshape(96, *both[0].shape[2:])[:size]
                for both in halves
            )
            found.append(model.fit(x, y, **options).history)
        else:
            x, y = (array[:96][worker.index :: 2] for array in (X, Y))
            data = rx.get_strategy().distribute_datasets_from_function(
                lambda context, x=x, y=y: list(
                    zip(np.split(x, 4), np.split(y, 4), strict=True)
                )
            )
            options = {"verbose": 0, "callbacks": [StopLater(is_late)]}
            found.append(model.fit(data, epochs=2, **options).history)
    return {"histories": found, "weights": model.get_weights()}


def masked_inputs_and_weighted_rows():
    # The last batch has a row for each worker.
    return in_loops("weighted rows", batch_size=7)


def masked_steps():
    """A loss is divided by a count that no worker knows."""
    in_loops("masked steps", batch_size=7)


def sums_in_steps():
    """Statistics and sums over replicas of which no worker knows all."""
    model = classifier("sgd", layers.BatchNormalization(synchronized=True))
    model.fit(X, Y, **OPTIONS)
    rx.get_strategy().run(
        lambda: rx.get_replica_context().all_reduce("sum", keras.ops.ones(()))
    )


def messages_about(strategy, case):
    """What is logged of a case."""
    handler = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("replicax")
    logger.addHandler(handler)
    try:
        with strategy.scope():
            case()
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def a_custom_loop():
    strategy = rx.get_strategy()
    model = classifier(
        keras.optimizers.SGD(0.1, momentum=0.9), keras.layers.BatchNormalization()
    )
    other = keras.optimizers.Adam(0.01)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        with rx.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))
            loss = rx.compute_average_loss(losses, global_batch_size=24)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients[:2], model.trainable_variables[:2])
        other.apply(gradients[2:], model.trainable_variables[2:])
        return loss

    losses = []
    data = strategy.experimental_distribute_dataset((X, Y), batch_size=24)
    for _ in range(2):
        for batch in data:
            loss = strategy.reduce("sum", strategy.run(step, batch))
            losses.append(np.asarray(loss))
    return {"weights": model.get_weights(), "losses": losses}


def of_loops(results):
    """The outcome of the custom loop of all workers: each has a part of the loss."""
    mine = [result["a_custom_loop"] for result in results]
    return mine[0] | {
        "losses": [
            sum(parts) for parts in zip(*(m["losses"] for m in mine), strict=True)
        ]
    }


def evaluates_within_an_epoch():
    found = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            results = self.model.evaluate(X, Y, verbose=0)
            found.append((batch, results, self.model.predict(X, verbose=0)))

    model = classifier("sgd")
    history = model.fit(X, Y, callbacks=[Looks()], **OPTIONS)
    return outcome(model, history) | {"found": found}


CASES = [
    adam_with_validation_and_weights,
    batches_that_do_not_divide,
    batch_normalization,
    clipped_by_the_norm_of_all,
    accumulated_gradients,
    own_data_of_unequal_length,
    variables_that_steps_count_in,
    losses_that_are_sums,
    losses_of_a_loop,
]
SLOW_CASES = [
    values_that_are_assigned_within_an_epoch,
    clipped_by_each_norm,
    adamw_with_exclusions_and_a_schedule,
    several_steps_per_execution,
    learning_rate_that_a_callback_assigns,
    stopped_in_the_middle_of_an_epoch,
    single_batches_and_then_fit,
    a_distributed_dataset,
    own_data_that_one_worker_stops,
    masked_inputs_and_weighted_rows,
    evaluates_within_an_epoch,
]
BACKED_UP = [adam_with_validation_and_weights, batches_that_do_not_divide]


def run_cases(strategy, cases):
    results = {}
    for case in cases:
        keras.utils.set_random_seed(1)
        try:
            with strategy.scope():
                results[case.__name__] = case()
        except Exception:  # noqa: BLE001 - The test of the case shows it.
            results[case.__name__] = traceback.format_exc()
            print(results[case.__name__], flush=True)
        print(case.__name__, flush=True)
    return results


def in_step(is_slow):
    strategy = rx.ParameterServerStrategy(
        # Of two rows, so that kernels are cut and biases as well.
        variable_partitioner=rx.experimental.partitioners.FixedShardsPartitioner(2),
        sync=True,
        timeouts=rx.Timeouts(step=DEADLINE),
    )
    if is_slow:
        results = run_cases(strategy, SLOW_CASES)
        results["messages"] = messages_about(strategy, masked_steps)
        results["of sums"] = messages_about(strategy, sums_in_steps)
    else:
        results = run_cases(strategy, [*CASES, a_custom_loop])
    return results, strategy.num_replicas_in_sync, strategy.staleness()


class Sleep(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.3)


def with_a_backup():
    strategy = rx.ParameterServerStrategy(
        sync=True, backup_workers=1, timeouts=rx.Timeouts(step=DEADLINE)
    )
    results = run_cases(strategy, BACKED_UP)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = classifier("sgd")
    slow = strategy.session.index == 2
    before = strategy.session.steps
    history = model.fit(X, Y, epochs=2, callbacks=[Sleep()] if slow else [], **OPTIONS)
    results["slow"] = outcome(model, history)
    return results, strategy.session.steps - before, refused_loop(strategy)


def refused_loop(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        variable = keras.Variable(1.0)
    try:
        strategy.run(lambda: optimizer.apply([variable.value], [variable]))
    except NotImplementedError as error:
        return str(error)
    return None


def plain_sgd():
    model = classifier("sgd")
    return outcome(model, model.fit(X, Y, epochs=2, **OPTIONS))


def values_of(cluster, count):
    return [cluster[f"worker:{i}"].value for i in range(count)]


def of_two(is_slow):
    results = replicax.testing.run(
        in_step,
        args=(is_slow,),
        tasks={"worker": 2, "ps": 2},
        logical_devices=1,
        deadline_seconds=150,
    )
    return values_of(results, 2)


@pytest.fixture(scope="module")
def two():
    """What both workers returned."""
    return of_two(is_slow=False)


@pytest.fixture(scope="module")
def two_in_other_ways():
    return of_two(is_slow=True)


@pytest.fixture(scope="module")
def three():
    """What the three workers returned, of whom two are needed."""
    results = replicax.testing.run(
        with_a_backup,
        tasks={"worker": 3, "ps": 1},
        logical_devices=1,
        deadline_seconds=150,
    )
    return values_of(results, 3)


def expected_of(case):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    return run_cases(strategy, [case])[case.__name__]


def assert_same(actual, expected):
    # float32 gradients are summed in another order, by servers that compile the
    # optimizer by itself: about 1e-7 of a value each step, and Adam divides by sizes.
    assert not isinstance(actual, str), actual
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5, err_msg=where)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_workers_equal_two_devices(two, case):
    expected = expected_of(case)
    for results, _, _ in two:
        assert_same(results[case.__name__], expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=lambda case: case.__name__)
def test_two_workers_equal_two_devices_in_other_ways(two_in_other_ways, case):
    expected = expected_of(case)
    for results, _, _ in two_in_other_ways:
        assert_same(results[case.__name__], expected)


def test_a_custom_loop_equals_one_on_two_devices(two):
    expected = expected_of(a_custom_loop)
    assert_same(of_loops([results for results, _, _ in two]), expected)
    weights = [results["a_custom_loop"]["weights"] for results, _, _ in two]
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_all_workers_replicas_are_in_sync(two):
    assert [number for _, number, _ in two] == [2, 2]


def test_nothing_is_stale(two):
    for _, _, staleness in two:
        assert sorted(staleness) == ["worker:0", "worker:1"]
        assert all(set(found) == {0} for found in staleness.values()), staleness


@pytest.mark.slow
def test_masked_losses_are_said_to_be_means_of_means(two_in_other_ways):
    for results, _, _ in two_in_other_ways:
        (message,) = [m for m in results["messages"] if "own rows only" in m]
        assert "number of its unmasked values" in message


@pytest.mark.slow
def test_sums_over_replicas_are_said_to_be_of_one_worker(two_in_other_ways):
    for results, _, _ in two_in_other_ways:
        found = [m for m in results["of sums"] if "own rows only" in m]
        assert len(found) == 2, found
        assert "BatchNormalization normalises by mean and variance" in found[0]
        assert "ReplicaContext.all_reduce" in found[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", BACKED_UP, ids=lambda case: case.__name__)
def test_with_a_backup_worker_equal_two_devices(three, case):
    expected = expected_of(case)
    for results, _, _ in three:
        assert_same(results[case.__name__], expected)


@pytest.mark.slow
def test_a_slow_worker_is_done_without(three):
    expected = expected_of(plain_sgd)
    for results, _, _ in three:
        assert_same(results["slow"], expected)
    assert min(steps for _, steps, _ in three[:2]) > 0


@pytest.mark.slow
def test_a_custom_loop_has_no_backups(three):
    assert all("backup_workers" in error for _, _, error in three)
