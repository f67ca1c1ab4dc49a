"""Optimizers of a user's, with an `apply` of their own around Keras'."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers, ops, optimizers
from tests.strategies.parity import (
    assert_same,
    compiled,
    fitted,
    looped,
    network,
    tape_step,
)

import replicax as rx


class Halved(optimizers.SGD):
    """Halves all gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([g / 2 for g in grads], trainable_variables)


class Clipped(optimizers.Adam):
    """Clips gradients by a norm of its own; under other names, which it may have."""

    def apply(self, gradients: Any, *args: Any, **kwargs: Any) -> None:
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        factor = ops.minimum(1.0, 0.05 / norm)
        super().apply([g * factor for g in gradients], *args, **kwargs)


class Lookahead(optimizers.Optimizer):
    """Pulls the weights of another optimizer back to slow ones."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.inner.build(variables)
            self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    @property
    def variables(self) -> Any:
        return [*super().variables, *self.inner.variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        weights = trainable_variables or self._trainable_variables
        self.inner.apply(grads, weights)
        for weight, slow in zip(weights, self.slow, strict=True):
            slow.assign(slow + 0.5 * (ops.convert_to_tensor(weight) - slow))
        self.iterations.assign_add(1)


MAKERS: dict[str, Callable[[], Any]] = {
    "halved": lambda: Halved(0.1, momentum=0.9),
    "clipped": lambda: Clipped(0.01),
    "lookahead": lambda: Lookahead(optimizers.SGD(0.1)),
}

TWO = ["cpu:0", "cpu:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: rx.MirroredStrategy(TWO),
    "shard_update": lambda: rx.MirroredStrategy(TWO, shard_update=True),
    "fully sharded": lambda: rx.FullyShardedStrategy(TWO),
    "central": lambda: rx.CentralStorageStrategy(TWO),
}


@pytest.mark.slow(
    but=[
        "mirrored-clipped",
        "shard_update-halved",
        "fully sharded-lookahead",
        "central-lookahead",
    ]
)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fit(strategy: str, maker: str) -> None:
    def outcome(strategy: Any) -> Any:
        _, found = fitted(strategy, lambda: compiled(network(), MAKERS[maker]()))
        return found

    assert_same(outcome(STRATEGIES[strategy]()), outcome(rx.OneDeviceStrategy("cpu:0")))


@pytest.mark.slow(
    but=[
        "mirrored-halved",
        "shard_update-clipped",
        "fully sharded-halved",
        "central-clipped",
    ]
)
@pytest.mark.parametrize("maker", ["halved", "clipped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops(strategy: str, maker: str) -> None:
    def outcome(strategy: Any) -> Any:
        found = looped(strategy, MAKERS[maker], tape_step)
        return {k: v for k, v in found.items() if k != "outputs"}

    assert_same(outcome(STRATEGIES[strategy]()), outcome(rx.OneDeviceStrategy("cpu:0")))


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
