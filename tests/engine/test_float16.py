"""Steps in float16 skip as many updates on several replicas as on one device."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx

X = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
Y = X[:, :1] * 2


@pytest.fixture(autouse=True)
def half() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


class Taped(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


class Functional(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data

        def scaled_loss() -> Any:
            loss = keras.ops.mean(
                keras.ops.square(y - keras.ops.cast(self(x), "float32"))
            )
            return self.optimizer.scale_loss(loss), loss

        variables = self.trainable_variables
        (_, loss), grads = rx.value_and_grad(scaled_loss, variables, has_aux=True)()
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


def updates(strategy: Any, kind: Any, batch_size: int) -> tuple[int, float]:
    """The updates that were made, and the scale of losses after them."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.layers.Dense(n, "relu") for n in (64, 32)]
        model = kind([keras.Input((64,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False)
    inner = model.optimizer.inner_optimizer
    return int(inner.iterations), float(model.optimizer.dynamic_scale)


STRATEGIES = {
    "mirrored 2": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored 8": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(8)]),
    "fully sharded": lambda: rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]),
    "central storage": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
}


@pytest.mark.parametrize("batch_size", [16, 13])
@pytest.mark.parametrize("kind", [keras.Sequential, Taped, Functional])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.slow(
    but=["mirrored 8-Sequential-16", "mirrored 8-Taped-13", "mirrored 2-Functional-16"]
)
def test_as_many_updates_as_on_one_device(
    name: str, kind: Any, batch_size: int
) -> None:
    plain = None if kind is keras.Sequential else rx.OneDeviceStrategy("cpu:0")
    expected = updates(plain, kind, batch_size)
    assert expected[0] < 10  # Some were skipped, or the scale has no part in it.
    made = updates(STRATEGIES[name](), kind, batch_size)
    # A replica's gradient is the sum of fewer rows, which float16 may still hold where
    # that of all rows overflows; then one device skips an update that replicas make.
    assert made[0] >= expected[0]
    assert made[1] >= expected[1]
