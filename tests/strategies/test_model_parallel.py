"""Weights sharded over a replica's devices: results equal one device's."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from tests.strategies.parity import (
    BATCH_SIZE,
    NUM_FEATURES,
    assert_same,
    blocks_of,
    bytes_on,
    compiled,
    data,
    fitted,
    network,
    texts_of_programs,
)

import replicax as rx

FOUR = [f"cpu:{i}" for i in range(4)]
# Models that Keras loads from files have paths without the model's name.
MAP = {
    r"(.*/)?first/kernel": (None, "model"),
    r"(.*/)?first/bias": ("model",),
    r"(.*/)?second/kernel": ("model", None),
}


def parallel(layout_map: Any = None, num: int | None = 2, **options: Any) -> Any:
    return rx.ModelParallelStrategy(layout_map, num, devices=FOUR, **options)


def mirrored(num: int = 2) -> rx.MirroredStrategy:
    return rx.MirroredStrategy(FOUR[:num])


def two_layers() -> Any:
    return network(
        layers.Dense(64, activation="relu", name="first"),
        layers.Dense(32, activation="relu", name="second"),
    )


def dense(optimizer: Any = "adam", **options: Any) -> Any:
    return compiled(two_layers(), optimizer, metrics=["accuracy"], **options)


@functools.cache
def expected_of(make: Callable[[], Any], replicas: int, rows: int) -> Any:
    return fitted(mirrored(replicas), make, data(rows))


def same_as_mirrored(strategy: Any, make: Callable[[], Any], rows: int = 72) -> Any:
    """Train under both, compare, and return the model that is split."""
    model, actual = fitted(strategy, make, data(rows))
    _, expected = expected_of(make, strategy.num_replicas_in_sync, rows)
    # XLA adds up the parts of a product in another order.
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
    return model


@pytest.mark.parametrize(
    ("layout_map", "num", "options"),
    [
        (MAP, 2, {}),
        pytest.param(MAP, 2, {"shard_update": True}, marks=pytest.mark.slow),
        pytest.param(MAP, None, {}, marks=pytest.mark.slow),
        pytest.param(MAP, 1, {}, marks=pytest.mark.slow),
        pytest.param(None, 4, {}, marks=pytest.mark.slow),
        pytest.param(rx.layout_maps.DENSE, 2, {}, marks=pytest.mark.slow),
    ],
    ids=["map", "updates", "one replica", "whole", "automatic", "DENSE"],
)
def test_fit(layout_map: Any, num: int | None, options: Any) -> None:
    if layout_map is rx.layout_maps.DENSE:  # Layers that Keras named.

        def make() -> Any:
            return compiled(network(layers.Dense(64), layers.Dense(32)))

        same_as_mirrored(parallel(layout_map, num), make)
        return
    # A last batch of 9 rows does not divide.
    same_as_mirrored(parallel(layout_map, num, **options), dense, 2 * BATCH_SIZE + 9)


@functools.cache
def trained_by_map(shard_update: bool) -> Any:
    return fitted(parallel(MAP, 2, shard_update=shard_update), dense, data(BATCH_SIZE))


def test_each_device_holds_its_shards() -> None:
    model, _ = trained_by_map(shard_update=False)
    first, second, last = model.layers
    assert blocks_of(first.kernel) == [(NUM_FEATURES, 32)] * 4
    assert blocks_of(first.bias) == [(32,)] * 4
    assert blocks_of(second.kernel) == [(32, 32)] * 4
    assert blocks_of(second.bias) == [(32,)] * 4
    assert blocks_of(last.kernel) == [(32, 10)] * 4
    slots = [v for v in model.optimizer.variables if v.shape == first.kernel.shape]
    assert [blocks_of(v) for v in slots] == [[(NUM_FEATURES, 32)] * 4] * 2
    split = [first.kernel, first.bias, second.kernel]
    total = sum(np.asarray(v).nbytes for v in split)
    for device in jax.devices()[:4]:
        assert bytes_on(split, device) == total // 2


def test_replicas_shard_the_optimizer_state_as_well() -> None:
    model, _ = trained_by_map(shard_update=True)
    kernel = model.layers[0].kernel
    assert blocks_of(kernel) == [(NUM_FEATURES, 32)] * 4
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert [blocks_of(v) for v in slots] == [[(NUM_FEATURES // 2, 32)] * 4] * 2


def test_heads() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")

    def outputs(strategy: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layer = layers.MultiHeadAttention(4, 8)
            layer.build(x.shape, x.shape)
        return layer, np.asarray(strategy.run(lambda x: layer(x, x), (x,)))

    layer, actual = outputs(parallel(rx.layout_maps.TRANSFORMER))
    _, expected = outputs(mirrored(2))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert blocks_of(layer.query_dense.kernel) == [(8, 2, 8)] * 4
    assert blocks_of(layer.output_dense.kernel) == [(2, 8, 8)] * 4


def test_replica_context_sees_replicas_only() -> None:
    strategy = parallel(num=2)
    assert strategy.num_replicas_in_sync == 2
    assert repr(strategy) == "ModelParallelStrategy(cpu:0+cpu:1, cpu:2+cpu:3)"

    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        assert context.num_replicas_in_sync == 2
        number = context.replica_id_in_sync_group
        return number, context.all_reduce("sum", x), context.all_gather(x[None], 0)

    x = rx.PerReplica(np.array([3.0, 4.0], "float32"))
    numbers, sums, rows = strategy.run(step, (x,))
    assert [int(i) for i in strategy.experimental_local_results(numbers)] == [0, 1]
    np.testing.assert_array_equal(sums, 7)
    np.testing.assert_array_equal(rows, [3, 4])
    assert float(strategy.reduce("mean", sums, axis=None)) == 7


def test_check_replicas() -> None:
    strategy = parallel(MAP, 2)
    with strategy.scope():
        model = two_layers()
    strategy.check_replicas()
    kernel = model.layers[0].kernel
    shards = [s.data for s in kernel.value.addressable_shards]
    shards[3] = shards[3] + 1  # Of the second replica.
    kernel._value = jax.make_array_from_single_device_arrays(
        kernel.value.shape, kernel.value.sharding, shards
    )
    with pytest.raises(rx.DivergenceError, match=r"first/kernel' on replicas \[1\]"):
        strategy.check_replicas()


def test_products_are_computed_in_parts() -> None:
    """No device computes with a whole weight."""
    strategy = parallel(MAP, 4)
    with strategy.scope():
        model = two_layers()
    texts = texts_of_programs(strategy)
    strategy.run(lambda x: jnp.sum(model(x)), (np.ones((8, NUM_FEATURES), "float32"),))
    _, compiled_text = texts[0]
    assert "f32[48,16]" in compiled_text
    assert "f32[48,64]" not in compiled_text
    assert "f32[8,64]" not in compiled_text


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_sums_of_16_bits_do_not_abort_the_process(policy: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        _, actual = fitted(parallel(MAP), dense)
        _, expected = fitted(mirrored(), dense)
    finally:
        keras.config.set_dtype_policy(before)
    np.testing.assert_allclose(
        actual["history"]["loss"], expected["history"]["loss"], rtol=0.02
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16", "uint8", "bool"])
def test_collectives_of_small_numbers(dtype: str) -> None:
    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        x = x + context.replica_id_in_sync_group.astype(x.dtype)
        names = context.axis_names
        return context.all_reduce("sum", x), *(
            op(x, names) for op in (jax.lax.psum, jax.lax.pmax, jax.lax.pmin)
        )

    x = jnp.ones(4, dtype)
    actual = parallel(None).run(step, (x,))
    expected = mirrored().run(step, (x,))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Refusals.


@pytest.mark.parametrize("num", [3, 8])
def test_devices_do_not_divide(num: int) -> None:
    with pytest.raises(
        rx.DeviceError, match=f"model_parallel={num} does not divide the 4 devices"
    ):
        parallel(num=num)


@pytest.mark.parametrize(
    "options",
    [
        {"communication_options": rx.CommunicationOptions(bytes_per_pack=1024)},
        {"cross_device_ops": rx.NcclAllReduce(num_packs=2)},
    ],
    ids=["bytes_per_pack", "num_packs"],
)
def test_packs_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="gradients cannot be summed in buckets"):
        parallel(**options)
