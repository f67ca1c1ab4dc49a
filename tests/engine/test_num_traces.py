"""How often a user's step is traced, as `docs/architecture.md` says."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from tests.conftest import mirrored

import replicax as rx

X = np.ones((12, 7), "float32")
STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "1 replica": lambda: mirrored(1),
    "3 replicas": lambda: mirrored(3),
    "2 replicas on a device": lambda: rx.MirroredStrategy(
        ["cpu:0"], replicas_per_device=2
    ),
    "sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
}
DISCOVERS = ("sharded", "central")
"""Strategies whose updates follow the step, so that it is discovered in `fit` too."""


class Net(keras.Model):
    """Counts its traces once it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(5)
        self.num_traces = 0

    def build(self, input_shape: Any) -> None:
        self.layer.build(input_shape)
        self.built = True

    def call(self, x: Any) -> Any:
        self.num_traces += 1
        return self.layer(x)


class TapeNet(Net):
    """Its own step uses a tape."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def made(kind: type[Net], strategy: rx.Strategy) -> Net:
    with strategy.scope():
        net = kind()
        net.build((None, 7))
        net.compile("sgd", "mse")
    return net


def batch(strategy: rx.Strategy) -> rx.PerReplica:
    return rx.PerReplica(X.reshape(strategy.num_replicas_in_sync, -1, 7))


@pytest.mark.parametrize("name", STRATEGIES)
def test_run(name) -> None:
    strategy = STRATEGIES[name]()
    net = made(Net, strategy)
    for _ in range(3):
        strategy.run(lambda x: ops.mean(net(x)), (batch(strategy),))
    # To discover the variables, and to build the program.
    assert net.num_traces == 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_run_with_a_tape(name) -> None:
    strategy = STRATEGIES[name]()
    net = made(TapeNet, strategy)
    for _ in range(3):
        strategy.run(lambda x: net.train_step((x, x[:, :5])), (batch(strategy),))
    # The same: the tape does not trace the step again.
    assert net.num_traces == 2


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_fit(name, num_steps) -> None:
    strategy = STRATEGIES[name]()
    net, with_tape = made(Net, strategy), made(TapeNet, strategy)
    for model in (net, with_tape):
        model.steps_per_execution = num_steps
    net.fit(X, X[:, :5], batch_size=6, epochs=2, verbose=0)
    with_tape.fit(X, X[:, :5], batch_size=6, epochs=2, verbose=0)
    # Keras, which builds the metrics, calls the model once itself.
    assert net.num_traces == 1 + 1 + (name in DISCOVERS)
    assert with_tape.num_traces == 1 + 2


def test_a_trace_is_repeated_where_it_changes_the_program() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        first = keras.Variable(0.0, aggregation="only_first_replica")
    num_traces = 0

    def step(x: Any) -> None:
        nonlocal num_traces
        num_traces += 1
        first.assign(ops.sum(x))

    for _ in range(2):
        strategy.run(step, (batch(strategy),))
    assert num_traces == 3
