"""Training on the cards of this machine gives what training on its CPU gives.

Products are in float32 as a whole ("highest"), not in TF32, so that the card's results
can be told from wrong ones: what is left are sums in another order, 1e-6 of a value in
each step. Skipped where JAX finds no card.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.strategies import parity

import replicax as rx
from replicax.strategies.strategy import Strategy

if jax.default_backend() != "gpu":
    pytest.skip("there is no GPU", allow_module_level=True)

ROWS = 100  # Not divisible by the batch, nor its rest by the replicas.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one device": lambda: rx.OneDeviceStrategy("gpu:0"),
    "mirrored": rx.MirroredStrategy,
    "virtual replicas": lambda: rx.MirroredStrategy(["gpu:0"], replicas_per_device=4),
    "sharded update": lambda: rx.MirroredStrategy(shard_update=True),
    "fully sharded": rx.FullyShardedStrategy,
    "central storage": rx.CentralStorageStrategy,
    "multi-worker of one": rx.MultiWorkerMirroredStrategy,
}
each_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(autouse=True)
def whole_products() -> Iterator[None]:
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


def on_the_cpu(strategy: Strategy | None = None) -> Strategy:
    """A strategy of CPU devices with as many replicas as the other one."""
    number = strategy.num_replicas_in_sync if strategy else 1
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(number)])


def images() -> tuple[Any, Any]:
    """`float32[100, 8, 8, 3]` and `int32[100]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
    return x, rng.integers(0, 10, ROWS).astype("int32")


def convolutions(**options: Any) -> keras.Model:
    """A model with convolutions, pooling, batch normalization and dropout."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, strides=2),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=3),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        parity.crossentropy(),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
        **options,
    )
    return model


def trained(strategy: Strategy, **options: Any) -> dict[str, Any]:
    """State, logs and predictions after two epochs."""
    xy = images()
    model, found = parity.fitted(
        strategy, lambda: convolutions(**options), xy, epochs=2, validation_data=xy
    )
    found["evaluated"] = model.evaluate(*xy, batch_size=24, verbose=0)
    found["predicted"] = model.predict(xy[0], batch_size=24, verbose=0)
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        return trained(on_the_cpu())


def test_a_strategy_takes_the_cards() -> None:
    cards = jax.devices("gpu")
    strategy = rx.MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(cards)
    with strategy.scope():
        variable = keras.Variable(np.ones(3))
    assert variable.value.devices() == set(cards)
    assert rx.MirroredStrategy(["/gpu:0"]).num_replicas_in_sync == 1


@each_strategy
def test_fit_evaluate_and_predict(name: str, expected: dict[str, Any]) -> None:
    strategy = STRATEGIES[name]()
    if strategy.num_replicas_in_sync > 1:  # Each replica drops others.
        expected = trained(on_the_cpu(strategy))
    parity.assert_same(trained(strategy), expected, **TOLERANCE)


def test_several_steps_in_one_execution(expected: dict[str, Any]) -> None:
    found = trained(rx.MirroredStrategy(["gpu:0"]), steps_per_execution=3)
    parity.assert_same(found, expected, **TOLERANCE)


@each_strategy
@pytest.mark.parametrize("step", [parity.functional_step, parity.tape_step])
def test_a_loop_of_ones_own(name: str, step: Callable[..., Any]) -> None:
    strategy = STRATEGIES[name]()
    found = parity.looped(strategy, lambda: keras.optimizers.Adam(1e-2), step)
    expected = parity.looped(
        on_the_cpu(strategy), lambda: keras.optimizers.Adam(1e-2), step
    )
    for state in (found, expected):  # One value, or one of each replica.
        state["outputs"] = [np.sum(jax.tree.leaves(x)) for x in state["outputs"]]
    parity.assert_same(found, expected, **TOLERANCE)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    """Losses agree to half a percent: these numbers have 8 and 11 digits of two."""
    losses = []
    cards = rx.MirroredStrategy()
    for strategy in (cards, on_the_cpu(cards)):
        keras.config.set_dtype_policy(policy)
        try:
            found = trained(strategy)
        finally:
            keras.config.set_dtype_policy("float32")
        losses.append(found["history"]["loss"])
    np.testing.assert_allclose(*losses, rtol=5e-3)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_attention(policy: str) -> None:
    """By cuDNN in half precision.

    Keras asks for it where there is a card, also if it is not used: not on the CPU.
    """

    def reader() -> keras.Model:
        tokens = keras.Input((64,), dtype="int32")
        h = layers.Embedding(100, 128)(tokens)
        h = h + layers.MultiHeadAttention(2, 64)(h, h, use_causal_mask=True)
        model = keras.Model(tokens, layers.Dense(100)(h))
        return parity.compiled(model, keras.optimizers.Adam(1e-3))

    rng = np.random.default_rng(0)
    xy = [rng.integers(0, 100, (ROWS, 64)).astype("int32") for _ in range(2)]
    losses = []
    cards = rx.MirroredStrategy()
    for strategy in (cards, on_the_cpu(cards)):
        keras.config.set_dtype_policy(policy)
        if strategy is not cards:
            keras.config.disable_flash_attention()
        try:
            _, found = parity.fitted(strategy, reader, xy, epochs=2)
        finally:
            keras.config.set_dtype_policy("float32")
            keras.config.enable_flash_attention()
        losses.append(found["history"]["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5 if policy == "float32" else 2e-3)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_generator_may_fill_its_arrays_again(steps: int) -> None:
    """A thread copies a batch before the next one is made."""
    x, y = images()
    cards = rx.MirroredStrategy()

    def refilled() -> Iterator[Any]:
        images_of, labels_of = np.empty_like(x[:20]), np.empty_like(y[:20])
        for i in range(0, ROWS, 20):
            images_of[:], labels_of[:] = x[i : i + 20], y[i : i + 20]
            yield images_of, labels_of
        images_of[:] = np.nan

    def history(strategy: Strategy) -> Any:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = convolutions(steps_per_execution=steps)
        return model.fit(refilled(), shuffle=False, verbose=0).history

    np.testing.assert_allclose(
        history(cards)["loss"], history(on_the_cpu(cards))["loss"], rtol=1e-4
    )


def test_integers_of_64_bits_stay_where_jax_has_them() -> None:
    """JAX's setting is one of the thread that calls `predict`."""
    x = np.arange(8, dtype="int64")[:, None] + 2**40
    with jax.enable_x64(True), rx.MirroredStrategy(["gpu:0"]).scope():
        inputs = keras.Input((1,), dtype="int64")
        model = keras.Model(inputs, inputs // 2)
        np.testing.assert_array_equal(model.predict(x, verbose=0), x // 2)


def test_memory_does_not_grow() -> None:
    """Weights and slots are updated in place, and batches are let go of."""
    card = jax.devices("gpu")[0]
    with rx.MirroredStrategy(["gpu:0"]).scope():
        model = convolutions()
    x, y = (np.concatenate([a] * 50) for a in images())
    used = []
    for _ in range(3):
        model.fit(x, y, batch_size=100, verbose=0)
        stats = card.memory_stats()
        assert stats is not None
        used.append(stats["bytes_in_use"])
    assert used[2] == used[1]


def test_batches_of_a_distributed_dataset_are_on_the_card() -> None:
    strategy = rx.MirroredStrategy()
    batches = strategy.experimental_distribute_dataset(images(), batch_size=24)
    places = {
        device
        for batch in batches
        for array in jax.tree.leaves(strategy.run(lambda x, y: (x, y), batch))
        if isinstance(array, jax.Array)
        for device in array.devices()
    }
    assert places == set(jax.devices("gpu"))


def test_a_checkpoint_of_the_card_goes_on_on_the_cpu(tmp_path: Path) -> None:
    def begun(strategy: Strategy) -> tuple[keras.Model, rx.Checkpoint]:
        with strategy.scope():
            model = convolutions()
            model.optimizer.build(model.trainable_variables)
            return model, rx.Checkpoint(model=model, optimizer=model.optimizer)

    model, checkpoint = begun(rx.MirroredStrategy())
    model.fit(*images(), batch_size=24, verbose=0)
    saved = checkpoint.save(str(tmp_path / "checkpoint"))
    expected = parity.state(model)
    other, checkpoint = begun(on_the_cpu())
    checkpoint.restore(saved)
    parity.assert_same(parity.state(other), expected, rtol=0, atol=0)
