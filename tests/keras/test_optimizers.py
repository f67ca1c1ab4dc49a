"""Precision, added losses and optimizers on several replicas."""

import contextlib

import grain
import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

# 100 examples: three whole batches of 32, and one of 4, fewer than 8 replicas.
NUM_EXAMPLES, BATCH_SIZE = 100, 32


def classifier(*hidden):
    hidden = hidden or (layers.Dense(12, activation="relu"),)
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fitted(model, digits):
    x, y = (a[:NUM_EXAMPLES] for a in digits)
    history = model.fit(x, y, BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    slots = [v.numpy() for v in model.optimizer.variables]
    return model.get_weights(), slots, history.history


@contextlib.contextmanager
def precision(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that can train, and has no `get_config` to be saved by."""

    def __call__(self, step):
        return 0.1 * 0.5 ** ops.cast(step, "float32")


def test_a_schedule_without_a_config(digits, same_as_one_device):
    def work():
        model = classifier()
        model.compile(keras.optimizers.SGD(Halving()), crossentropy())
        return fitted(model, digits)

    same_as_one_device(work, 2)


def test_bfloat16(digits, same_as_one_device):
    def work():
        with precision("mixed_bfloat16"):
            model = classifier()
            model.compile(keras.optimizers.SGD(0.1), crossentropy())
            assert model.layers[0].compute_dtype == "bfloat16"
            weights, _, history = fitted(model, digits)
            return weights, history

    # bfloat16 has 8 bits: 4e-3 of each number, some of it left in sums of a batch.
    same_as_one_device(work, 8, rtol=2e-2, atol=4e-3)


def scaled_fit(digits, rows, value=1e6):
    """Weights and loss scale after three steps; `rows` of the second overflow."""
    x, y = (a[: 3 * BATCH_SIZE].copy() for a in digits)
    x[BATCH_SIZE:][rows] *= value
    with precision("mixed_float16"):
        model = classifier()
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1, 0.9),
                initial_scale=1024.0,
                dynamic_growth_steps=2,
            ),
            crossentropy(),
        )
        model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    optimizer = model.optimizer
    return {
        "weights": model.get_weights(),
        "scale": optimizer.dynamic_scale.numpy(),
        "counter": optimizer.step_counter.numpy(),
        "iterations": optimizer.inner_optimizer.iterations.numpy(),
    }


def test_a_step_that_reads_cast_weights_updates_the_stored_weights():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with precision("mixed_float16"), strategy.scope():
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))

        def step(x):
            with rx.GradientTape() as tape:
                loss = keras.ops.sum(model(x)) / 8
                scaled = optimizer.scale_loss(loss)
            weights = model.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(scaled, weights), weights, strict=True)
            )

        before = model.get_weights()
        strategy.run(step, args=(np.ones((8, 3), "float32"),))  # Each replica has all.
        kernel, bias = model.get_weights()
    assert (kernel.dtype, bias.dtype) == ("float32", "float32")
    np.testing.assert_allclose(kernel, before[0] - 1.0, rtol=1e-3)
    np.testing.assert_allclose(bias, before[1] - 1.0, rtol=1e-3)


def test_an_overflow_on_one_replica_skips_the_step(digits, same_as_one_device):
    # float16 has 11 bits: 5e-4 of each number.
    result = same_as_one_device(
        lambda: scaled_fit(digits, [31]), 8, rtol=5e-3, atol=5e-4
    )
    # One good step, the halving that skips the second, and a good third.
    assert (result["scale"], result["counter"], result["iterations"]) == (512, 1, 2)


def test_loss_scale_grows(digits, same_as_one_device):
    result = same_as_one_device(lambda: scaled_fit(digits, []), 4, rtol=5e-3, atol=5e-4)
    assert (result["scale"], result["counter"], result["iterations"]) == (2048, 1, 3)


# Losses beside the compiled one. The replicas' values are averaged, so these losses
# equal those of one device:
#   - regularizers of weights: equal on all replicas;
#   - activity regularizers: Keras divides them by the number of (local) examples;
#   - `add_loss` of a mean over the batch.
# replicax cannot know that an added loss is a sum over the batch: it averages the
# replicas' sums, as tf.keras does. Multiply such a loss by
# `rx.get_strategy().num_replicas_in_sync`.


class AddLoss(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss_of = loss

    def call(self, x):
        self.add_loss(self.loss_of(x))
        return x


@pytest.mark.slow(but=["add_loss"])
@pytest.mark.parametrize(
    "extra",
    [
        lambda: layers.Dense(
            12, "relu", kernel_regularizer="l2", bias_regularizer="l1"
        ),
        lambda: layers.Dense(12, "relu", activity_regularizer="l2"),
        lambda: layers.ActivityRegularization(l1=0.01, l2=0.02),
        lambda: AddLoss(lambda x: 0.1 * ops.mean(ops.square(x))),
    ],
    ids=["weights", "activity", "activity-layer", "add_loss"],
)
def test_additional_losses(digits, same_as_one_device, extra):
    def work():
        model = classifier(layers.Dense(12, activation="relu"), extra())
        model.compile(keras.optimizers.SGD(0.1, 0.9), crossentropy())
        return fitted(model, digits)

    same_as_one_device(work, 8)


def test_added_sums_are_averaged(digits, outcome, assert_same):
    x, y = (a[:16] for a in digits)

    def work(scale):
        hidden = layers.Dense(12, activation="relu")
        model = classifier(hidden, AddLoss(lambda x: scale * ops.sum(ops.square(x))))
        model.compile(keras.optimizers.SGD(1e-2), crossentropy())
        model.fit(x, y, batch_size=16, verbose=0)
        return model.get_weights()

    expected = outcome(lambda: work(0.5), 0)
    assert_same(outcome(lambda: work(2.0), 4), expected)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(outcome(lambda: work(0.5), 4), expected)


def trained_by_steps(digits, strategy, make_optimizer):
    """Weights after two steps of a loop, whose first one builds the optimizer."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = classifier(layers.Dense(12, activation="tanh"))
        optimizer = make_optimizer()
    x, y = (a[:32] for a in digits)
    x = x + 0.1  # Where all gradients are 0, Keras' Adafactor makes NaN.
    loss_fn = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            losses = loss_fn(y, model(x))
            loss = rx.compute_average_loss(losses, global_batch_size=32)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    dataset = grain.MapDataset.source([(x, y)] * 2)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    return [v.numpy() for v in (*model.weights, *optimizer.variables)]


@pytest.mark.parametrize(
    "make_strategy",
    [
        rx.MirroredStrategy,
        rx.CentralStorageStrategy,
        pytest.param(rx.FullyShardedStrategy, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.Adafactor(0.01),  # Makes slots from numbers.
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=1
        ),
    ],
    ids=["adafactor", "loss_scale"],
)
def test_a_step_may_build_an_optimizer_of_any_kind(
    digits, make_strategy, make_optimizer
):
    expected = trained_by_steps(digits, rx.OneDeviceStrategy("cpu:0"), make_optimizer)
    strategy = make_strategy(["cpu:0", "cpu:1"])
    found = trained_by_steps(digits, strategy, make_optimizer)
    assert len(found) == len(expected) > 5
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert np.isfinite(one).all()


class Scale(layers.Layer):
    """Multiplies features by weights of the given aggregation."""

    def __init__(self, aggregation):
        super().__init__()
        self.scale = self.add_weight(
            shape=(4,), initializer="ones", aggregation=aggregation
        )

    def call(self, inputs):
        return inputs * self.scale


def trained_scale(strategy, aggregation):
    """A weight and losses: of two steps of a loop, then of two epochs of `fit`."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Scale(aggregation)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        optimizer = keras.optimizers.SGD(0.1)
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 4), "float32")

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = ops.sum(ops.square(model(x) - y)) / 32
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    dataset = grain.MapDataset.source([(x, y)] * 2)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(batch,))))
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    return [*losses, *history, model.get_weights()[0][0]]


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize(
    "make_strategy",
    [
        rx.MirroredStrategy,
        lambda devices: rx.MirroredStrategy(devices, shard_update=True),
        pytest.param(rx.CentralStorageStrategy, marks=pytest.mark.slow),
    ],
    ids=["mirrored", "sharded", "central"],
)
def test_an_optimizer_updates_a_weight_of_any_aggregation(make_strategy, aggregation):
    expected = trained_scale(rx.OneDeviceStrategy("cpu:0"), aggregation)
    found = trained_scale(make_strategy(["cpu:0", "cpu:1"]), aggregation)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[0] == 1
