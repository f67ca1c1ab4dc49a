"""Custom training loops: several replicas train as one does with the global batch."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.conftest import mirrored
from tests.strategies.parity import (
    BATCH_SIZE,
    assert_same,
    compiled,
    data,
    looped,
    network,
    state,
    tape_step,
)

import replicax as rx


def test_loop_equals_plain_keras() -> None:
    """The oracle of the oracle: Keras' own `train_on_batch` with the global batch."""
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    looped_state = looped(mirrored(4), adam, tape_step)
    losses = [x.array.sum() for x in looped_state.pop("outputs")]
    keras.utils.set_random_seed(1)
    plain = compiled(network(), adam())
    x, y = data()
    for i, loss in enumerate(losses):
        rows = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
        plain.reset_metrics()
        expected = plain.train_on_batch(x[rows], y[rows])
        np.testing.assert_allclose(loss, expected, rtol=2e-5)
    assert_same(looped_state, state(plain), rtol=2e-4)


def test_loss_scale_skips_a_step_that_overflows_on_one_replica(digits) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=2
        )

    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = optimizer.scale_loss(ops.sum(w * x))
        optimizer.apply(tape.gradient(loss, [w]), [w])

    good = rx.PerReplica(np.float32([[0.5, 0.0], [0.5, 1.0]]))
    bad = rx.PerReplica(np.float32([[0.5, 0.0], [np.inf, 1.0]]))
    strategy.run(step, (good,))
    np.testing.assert_array_equal(np.asarray(w.value), [0.5, 1.5])
    assert float(optimizer.dynamic_scale.value) == 8.0
    strategy.run(step, (good,))
    np.testing.assert_array_equal(np.asarray(w.value), [0.0, 1.0])
    assert float(optimizer.dynamic_scale.value) == 16.0
    strategy.run(step, (bad,))
    np.testing.assert_array_equal(np.asarray(w.value), [0.0, 1.0])
    assert float(optimizer.dynamic_scale.value) == 8.0
    assert int(optimizer.iterations.value) == 2


@pytest.mark.parametrize("with_tape", [True, False])
def test_losses_that_layers_add_count(with_tape: bool) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        layer = layers.Dense(2, kernel_initializer="ones", activity_regularizer="l2")
        layer.build((None, 3))
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")

    def step(x: Any) -> Any:
        if not with_tape:
            return rx.value_and_grad(
                lambda: 0.0 * ops.sum(layer(x)) + sum(layer.losses), [layer.kernel]
            )()
        with rx.GradientTape() as tape:
            loss = 0.0 * ops.sum(layer(x)) + sum(layer.losses)
        return loss, [tape.gradient(loss, layer.kernel)]

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: x[context.replica_id_in_sync_group]
    )
    found = strategy.run(step, (rows,))
    loss, (gradient,) = strategy.reduce("mean", found)
    sums = x.sum(axis=2)
    # Keras divides the penalty by the batch: 0.01 * 2 * sum of squares / 5.
    assert float(loss) == pytest.approx(0.02 * np.mean(sums**2), rel=1e-5)
    expected = 0.02 * np.mean(x * sums[..., None], axis=(0, 1))
    np.testing.assert_allclose(gradient[:, 0], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_sum_of_scalars_adds_one_per_replica(num_replicas: int) -> None:
    """As in `tf.distribute`: each replica's update counts, a mean's does not change."""
    strategy = mirrored(num_replicas)
    with strategy.scope():
        total, mean = keras.metrics.Sum(), keras.metrics.Mean()

    def step() -> None:
        total.update_state(2.0)
        mean.update_state(2.0)

    for _ in range(3):
        strategy.run(step)
    assert float(total.result()) == 6.0 * num_replicas
    assert float(mean.result()) == 2.0
