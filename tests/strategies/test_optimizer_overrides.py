"""Optimizers of a user's, with an `apply` of their own around Keras'."""

from typing import Any

import keras
from keras import layers, ops, optimizers

import replicax as rx


class Halved(optimizers.SGD):
    """Halves all gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([g / 2 for g in grads], trainable_variables)


TWO = ["cpu:0", "cpu:1"]


def test_layers_of_classes_and_names_of_arguments() -> None:
    class Twice(Halved):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([g / 2 for g in grads], trainable_variables)

    strategy = rx.MirroredStrategy(TWO)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = Twice(1.0)
    for call in (
        lambda g: optimizer.apply([g], [weight]),
        lambda g: optimizer.apply(trainable_variables=[weight], grads=[g]),
        lambda g: optimizer.apply(iter([g]), iter([weight])),
        lambda g: optimizer.apply_gradients([(g, weight)]),
        lambda g: optimizer.apply([g]),
    ):
        weight.assign(0.0)
        strategy.run(call, args=(3.0,))
        assert float(weight) == -2 * 3.0 / 4


def test_without_a_strategy_nothing_changes() -> None:
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build((None, 1))
    Halved(1.0).apply([ops.ones((1, 1))], layer.trainable_variables)
    assert float(layer.kernel[0, 0]) == -0.5
