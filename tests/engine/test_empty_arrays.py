"""Arrays without elements in replica functions."""

import keras
import numpy as np
import pytest
from keras import ops
from tests.conftest import mirrored, values_of

import replicax as rx

STRATEGIES = {
    "mirrored": lambda: mirrored(2),
    "divided updates": lambda: rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], shard_update=True
    ),
    "fully sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
    "central storage": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
}
X = np.arange(8, dtype="float32").reshape(4, 2)
NOTHING = np.zeros((0, 3), "float32")


def global_sum(array):
    return rx.get_replica_context().all_reduce("sum", ops.sum(array))


@pytest.mark.parametrize("name", STRATEGIES)
def test_constants_and_arguments(name):
    def step(x, nothing):
        constant = ops.convert_to_tensor(NOTHING)
        return global_sum(x) + ops.sum(constant + 1) + ops.sum(nothing + 1)

    strategy = STRATEGIES[name]()
    total = strategy.run(step, (X, NOTHING))
    assert [float(x) for x in values_of(total)] == [2 * X.sum()] * 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_variables(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weight = keras.Variable(np.ones(2, "float32"))
        empty = keras.Variable(NOTHING)
        read = keras.Variable(NOTHING, trainable=False)
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([weight, empty])

    def step(x):
        optimizer.apply(
            [ops.sum(x, axis=0), empty * 2 + read], trainable_variables=[weight, empty]
        )

    for _ in range(2):
        strategy.run(step, (X,))
    np.testing.assert_allclose(weight.numpy(), 1 - 2.5 * 2 * X.sum(axis=0))
    assert empty.numpy().shape == NOTHING.shape
