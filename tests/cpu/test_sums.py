"""Sums of gradients in CPU programs: written once where many would compute them again.

The same additions in the same order. XLA may round the product before an addition or
not, by what it merges: 1e-5 of the largest value.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cpu.test_convolutions import assert_close, both, lowered

import replicax as rx
from replicax import cpu

WRITTEN = 'inlineable = "false"'


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)


def residual_stream(weights, x):
    for w in weights:
        x = x + jnp.tanh(normalised(x) @ w)
    return (x * x).mean()


def inputs(depth, *, rows=256, features=64, dtype="float32"):
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.1, (depth, features, features)).astype(dtype)
    return list(map(jnp.asarray, weights)), jnp.asarray(
        rng.normal(size=(rows, features)).astype(dtype)
    )


def widest_operation(f, *args):
    """Arrays that the operation which reads most of them reads."""
    text = jax.jit(lambda *a: f(*a)).lower(*args).compile().as_text()
    fused = re.findall(r" fusion\(([^)]*)\)", text)
    return max(operands.count("%") for operands in fused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same(dtype):
    weights, x = inputs(8, dtype=dtype)
    ours, theirs = both(jax.grad(residual_stream, (0, 1)), weights, x)
    # Halves are rounded where they are written: once more or less in a layer.
    assert_close(ours, theirs, 1e-5 if dtype == "float32" else 0.05)


def test_the_work_does_not_grow_with_the_square_of_the_depth():
    gradient = jax.grad(residual_stream)
    ours, theirs = (
        [widest_operation(f, *inputs(depth)) for depth in (16, 32)]
        for f in (cpu.apply(gradient), gradient)
    )
    assert theirs[1] > 1.5 * theirs[0], "XLA does not do it any more: leave sums alone"
    assert ours[1] == ours[0] < theirs[0]


@pytest.mark.parametrize(
    ("depth", "rows", "is_written"),
    [(8, 256, True), (2, 256, False), (8, 255, False)],
    ids=["long", "short", "small_arrays"],
)
def test_only_long_sums_of_large_arrays_are_written(depth, rows, is_written):
    text = lowered(jax.grad(residual_stream), *inputs(depth, rows=rows))
    assert (WRITTEN in text) == is_written


def test_other_platforms_and_a_switch_have_jaxs_own(monkeypatch):
    arguments = inputs(8)
    gradient = jax.grad(residual_stream)
    assert WRITTEN not in lowered(gradient, *arguments, platform="cuda")
    monkeypatch.setenv("REPLICAX_CPU_LOWERINGS", "xla")
    assert WRITTEN not in lowered(gradient, *arguments)


def test_shapes_with_symbols_are_exported():
    weights, _ = inputs(8)
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 64), "float32")
    gradient = cpu.apply(jax.grad(residual_stream))
    exported = jax.export.export(jax.jit(gradient))(weights, x)
    _, x = inputs(8)
    found = exported.call(weights, x)
    assert_close(found, jax.grad(residual_stream)(weights, x))


def test_replicas_have_the_gradients_of_one_device():
    weights, x = inputs(8, rows=512)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_values_from_function(
        lambda context: x[256 * context.replica_id_in_sync_group :][:256]
    )
    gradients = strategy.run(
        lambda x: jax.grad(residual_stream)(weights, x), (dataset,)
    )
    mean = strategy.reduce("mean", gradients, axis=None)
    assert_close(mean, jax.jit(jax.grad(residual_stream))(weights, x))
