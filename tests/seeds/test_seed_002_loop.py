"""Seed 002, TensorFlow's guide: a custom training loop.

The snippets of "Distributed Training in TensorFlow", section "Using
tf.distribute.Strategy with custom training loops", which is written for TF 1 sessions;
comments quote the source where it is not the same.
"""

from collections.abc import Iterator
from typing import Any

import grain
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx

# Keras warns of `input_shape=`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")


def losses_of_loop(
    mirrored_strategy: Any,
    dataset: Any,
    num_inputs: int = 1,
    num_classes: int = 1,
) -> Iterator[float]:
    """The loop of the guide, on any dataset of global batches."""
    global_batch_size = len(dataset[0][0])

    with mirrored_strategy.scope():
        model: Any = keras.Sequential(
            [keras.layers.Dense(num_classes, input_shape=(num_inputs,))]
        )
        # Source: `tf.train.GradientDescentOptimizer(0.1)`
        optimizer = keras.optimizers.SGD(0.1)

    with mirrored_strategy.scope():
        dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    def train_step(dist_inputs: Any) -> Any:
        def step_fn(inputs: Any) -> Any:
            features, labels = inputs
            # Source: no tape, and below `train_op = optimizer.minimize(loss)`; the loss
            # is returned under `tf.control_dependencies([train_op])`.
            with rx.GradientTape() as tape:
                logits = model(features)
                # Source: `tf.nn.softmax_cross_entropy_with_logits(logits=, labels=)`
                cross_entropy: Any = keras.ops.categorical_crossentropy(
                    labels, logits, from_logits=True
                )
                loss = jnp.sum(cross_entropy) * (1.0 / global_batch_size)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )
            return loss

        per_replica_losses = mirrored_strategy.experimental_run_v2(
            step_fn, args=(dist_inputs,)
        )
        return mirrored_strategy.reduce(rx.ReduceOp.SUM, per_replica_losses, axis=None)

    with mirrored_strategy.scope():
        # Source: `make_initializable_iterator`, `get_next`, and a `tf.Session` that
        # runs the initializers and ten times the loss.
        input_iterator = iter(dist_dataset)
        for _ in range(10):
            loss = train_step(next(input_iterator))
            yield float(loss)
    mirrored_strategy.check_replicas()


@pytest.fixture
def mirrored_strategy() -> rx.MirroredStrategy:
    return rx.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])


def test_the_guides_own_example_prints_zeros(
    mirrored_strategy: rx.MirroredStrategy,
) -> None:
    # A softmax over one class: the guide's output is ten times 0.0.
    example = (np.ones(1, "float32"), np.ones(1, "float32"))
    dataset = grain.MapDataset.source([example]).repeat(1000).batch(10)
    assert list(losses_of_loop(mirrored_strategy, dataset)) == [0.0] * 10


def test_digits_from_numpy_as_on_one_replica(
    mirrored_strategy: Any, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = digits
    one_hot = np.eye(10, dtype="float32")[labels]
    # `make_experimental_numpy_dataset` is how the guide spells it.
    dataset = mirrored_strategy.make_experimental_numpy_dataset((images, one_hot))
    dataset = dataset.shuffle(seed=0).batch(128)

    losses = list(losses_of_loop(mirrored_strategy, dataset, 64, 10))
    assert losses[-1] < 0.95 * losses[0]

    keras.utils.set_random_seed(0)
    one = rx.MirroredStrategy(devices=["/cpu:0"])
    np.testing.assert_allclose(
        losses, list(losses_of_loop(one, dataset, 64, 10)), rtol=1e-5
    )


def test_local_results_are_one_per_replica(
    mirrored_strategy: rx.MirroredStrategy, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    (batch,) = mirrored_strategy.experimental_distribute_dataset(
        digits[0][:10], batch_size=10
    )
    results = mirrored_strategy.run(lambda x: x.sum(), args=(batch,))
    local = mirrored_strategy.experimental_local_results(results)
    np.testing.assert_allclose(
        local, [digits[0][:5].sum(), digits[0][5:10].sum()], rtol=1e-6
    )
