"""Custom training loops: several replicas train as one does with the global batch."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops
from tests.conftest import mirrored

import replicax as rx

REPLICAS = [1, 2, 4, 8]
BATCH = 48


class Loop:
    """A model of the digits with its optimizer, metrics and step."""

    def __init__(
        self,
        strategy: rx.Strategy,
        optimizer: Callable[[], Any] = keras.optimizers.Adam,
        gradients: str = "tape",
        built: bool = True,
        apply: str = "apply",
    ) -> None:
        self.strategy = strategy
        self.gradients, self.apply = gradients, apply
        keras.utils.set_random_seed(3)
        with strategy.scope():
            self.model = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(10)])
            if built:
                self.model.build((None, 64))
            self.optimizer = optimizer()
            self.loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=None
            )
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.mean_loss = keras.metrics.Mean()

    def forward(self, x: Any, y: Any) -> Any:
        logits = self.model(x, training=True)
        losses = self.loss(y, logits)
        self.accuracy.update_state(y, logits)
        self.mean_loss.update_state(losses)
        return rx.compute_average_loss(losses)

    def step(self, x: Any, y: Any) -> Any:
        if self.gradients == "tape":
            with rx.GradientTape() as tape:
                loss = self.forward(x, y)
            grads = tape.gradient(loss, self.model.trainable_variables)
        else:
            loss, grads = rx.value_and_grad(
                lambda: self.forward(x, y), self.model.trainable_variables
            )()
        variables = self.model.trainable_variables
        if self.apply == "apply":
            self.optimizer.apply(grads, variables)
        else:
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    def train(
        self, digits: Any, num_steps: int = 6, batch_size: int = BATCH
    ) -> list[float]:
        dataset = self.strategy.experimental_distribute_dataset(
            tuple(a[: num_steps * batch_size] for a in digits), batch_size=batch_size
        )
        return [
            float(self.strategy.reduce("sum", self.strategy.run(self.step, batch)))
            for batch in dataset
        ]

    def state(self) -> list[np.ndarray]:
        variables = [*self.model.variables, *self.optimizer.variables]
        return [np.asarray(v.value) for v in variables]

    def results(self) -> tuple[float, float]:
        return float(self.accuracy.result()), float(self.mean_loss.result())


def assert_same_training(
    loop: Loop, reference: Loop, digits: Any, **kwargs: Any
) -> None:
    losses, expected = loop.train(digits, **kwargs), reference.train(digits, **kwargs)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(loop.results(), reference.results(), rtol=2e-5)
    assert len(loop.state()) == len(reference.state()) > 4
    for a, b in zip(loop.state(), reference.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    loop.strategy.check_replicas()


def test_loop_equals_plain_keras(digits) -> None:
    """The oracle of the oracle: Keras' own `train_on_batch` with the global batch."""
    loop = Loop(mirrored(4))
    losses = loop.train(digits)
    keras.utils.set_random_seed(3)
    plain = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(10)])
    plain.build((None, 64))
    plain.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = digits
    for i, loss in enumerate(losses):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        plain.reset_metrics()
        expected = plain.train_on_batch(x[rows], y[rows])
        np.testing.assert_allclose(loss, expected, rtol=2e-5)
    for a, b in zip(loop.model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a.value), np.asarray(b.value), atol=2e-6)


def test_cross_device_ops_train_alike(digits) -> None:
    ops = rx.HierarchicalCopyAllReduce(group_size=2)
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)], ops)
    assert_same_training(Loop(strategy), Loop(mirrored(1)), digits)


@pytest.mark.slow
@settings(max_examples=4)
@given(per_replica=st.integers(1, 9), num_replicas=st.sampled_from([2, 3, 8]))
def test_any_batch_size(digits, per_replica, num_replicas) -> None:
    batch_size = per_replica * num_replicas
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    assert_same_training(
        Loop(mirrored(num_replicas), sgd),
        Loop(mirrored(1), sgd),
        digits,
        num_steps=2,
        batch_size=batch_size,
    )


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


def test_two_optimizers_of_a_gan_in_one_step() -> None:
    def train(num_replicas: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        strategy = mirrored(num_replicas)
        with strategy.scope():
            generator = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])
            critic = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(1)])
            g_optimizer, c_optimizer = (keras.optimizers.Adam(0.01) for _ in range(2))

        def step(noise: Any, real: Any) -> Any:
            with rx.GradientTape() as g_tape, rx.GradientTape() as c_tape:
                fake = generator(noise)
                on_fake, on_real = critic(fake), critic(real)
                g_loss = rx.compute_average_loss(ops.softplus(-on_fake[:, 0]))
                c_loss = rx.compute_average_loss(
                    ops.softplus(on_fake[:, 0]) + ops.softplus(-on_real[:, 0])
                )
            for tape, loss, model, optimizer in (
                (g_tape, g_loss, generator, g_optimizer),
                (c_tape, c_loss, critic, c_optimizer),
            ):
                grads = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(grads, model.trainable_variables)

        rng = np.random.default_rng(0)
        for _ in range(3):
            noise = rng.normal(size=(8, 4)).astype("float32")
            real = rng.normal(size=(8, 3)).astype("float32")
            split = jax.tree.map(
                lambda a: rx.PerReplica(a.reshape(num_replicas, -1, a.shape[-1])),
                (noise, real),
            )
            strategy.run(step, split)
        return [np.asarray(v.value) for m in (generator, critic) for v in m.variables]

    for a, b in zip(train(1), train(4), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_evaluation_step_only_reads(digits) -> None:
    loop = Loop(mirrored(2))

    def evaluate(x: Any, y: Any) -> Any:
        logits = loop.model(x, training=False)
        loop.accuracy.update_state(y, logits)
        return logits

    x, y = digits[0][:8], digits[1][:8]
    batch = rx.PerReplica(x.reshape(2, 4, 64)), rx.PerReplica(y.reshape(2, 4))
    logits = loop.strategy.gather(loop.strategy.run(evaluate, batch), axis=0)
    want = np.asarray(loop.model(x))
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        float(loop.accuracy.result()), np.mean(want.argmax(-1) == y), rtol=1e-6
    )
    assert len(list(loop.strategy.runner.programs)[-1].written) == 2


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
