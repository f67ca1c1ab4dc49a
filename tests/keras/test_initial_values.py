"""Initial and assigned values of sharded variables have the bits of one device."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from keras import initializers

import replicax as rx

SHAPE = (64, 48)


def of_a_generator() -> Any:
    return initializers.RandomNormal(seed=keras.random.SeedGenerator(3))


INITIALIZERS: dict[str, Callable[[], Any]] = {
    "zeros": initializers.Zeros,
    "constant": lambda: initializers.Constant(0.3),
    "identity": initializers.Identity,
    "uniform": lambda: initializers.RandomUniform(-0.3, 1.1, seed=1),
    "normal": lambda: initializers.RandomNormal(1.3, 0.7, seed=1),
    "truncated": lambda: initializers.TruncatedNormal(0.5, 0.3, seed=1),
    "glorot": lambda: initializers.GlorotUniform(seed=1),
    "he": lambda: initializers.HeNormal(seed=1),
    "orthogonal": lambda: initializers.Orthogonal(seed=1),
    "generator": of_a_generator,
    "own": lambda: lambda shape, dtype: keras.random.normal(shape, dtype=dtype),
    "numpy": lambda: lambda shape, dtype: np.arange(64 * 48.0).reshape(shape),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values(name: str, dtype: str) -> None:
    if name == "orthogonal" and dtype == "bfloat16":
        pytest.skip("JAX has no QR in bfloat16.")

    def values() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        initializer = INITIALIZERS[name]()
        # Twice: a generator has another state, and a program is used again.
        variables = [keras.Variable(initializer, SHAPE, dtype) for _ in range(2)]
        return [np.asarray(v.value) for v in variables]

    expected = values()
    with rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]).scope():
        actual = values()
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(got, want)


# Of one element, around the sizes of shared programs, and larger than all of them.
SHAPES = [(), (7, 9), (1, 4096), (17, 241), (3, 3, 64, 128), (2049, 2048)]
NAMES = ["zeros", "ones", "uniform", "normal", "generator"]


@pytest.mark.slow(but=["normal-bfloat16", *(f"{name}-float32" for name in NAMES)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_initial_values_of_shapes(name: str, dtype: str) -> None:
    def values() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        initializer = {"ones": initializers.Ones, **INITIALIZERS}[name]()
        variables = [keras.Variable(initializer, shape, dtype) for shape in SHAPES]
        return [np.asarray(v.value) for v in variables]

    expected = values()
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        actual = values()
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_initial_values_share_programs(caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), rx.OneDeviceStrategy("cpu:0").scope():
        keras.Variable("glorot_uniform", (3, 5, 7))
        caplog.clear()
        for i in range(2, 30):
            keras.Variable("glorot_uniform", (3, i))
            keras.Variable("zeros", (5, i, 3))
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["float64", "float32", ml_dtypes.bfloat16, "int32"])
def test_assigned_values(source: Any, dtype: str) -> None:
    rows = (np.random.default_rng(0).normal(size=SHAPE) * 1000).astype(source)
    plain = keras.Variable("zeros", SHAPE, dtype)
    with rx.FullyShardedStrategy([f"cpu:{i}" for i in range(4)]).scope():
        sharded = keras.Variable("zeros", SHAPE, dtype)
    plain.assign(rows.copy())  # Keras may use its memory.
    sharded.assign(rows)
    rows[:] = 0  # The variable has a copy.
    np.testing.assert_array_equal(np.asarray(sharded.value), np.asarray(plain.value))
    assert {s.data.shape for s in sharded.value.addressable_shards} == {(16, 48)}
