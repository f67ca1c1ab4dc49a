"""Reductions in CPU programs: contractions over leading dimensions, sums of gradients.

Operands of contractions are small whole numbers, so that the order of sums cannot
matter: to the bit what JAX computes. Sums of gradients are the same additions in the
same order. XLA may round the product before an addition or not, by what it merges: 1e-5
of the largest value.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from tests.cpu.test_convolutions import (
    assert_close,
    assert_equal,
    both,
    lowered,
    lowered_by_jax,
)

import replicax as rx
from replicax.cpu import lowering

SIZES = st.lists(st.integers(0, 4), max_size=2).map(tuple)
ONE_PRODUCT = "contracting_dims = [0] x [0]"


def whole(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


def contraction(of_lhs, of_rhs, batch=((), ()), **options):
    return lambda x, y: lax.dot_general(x, y, ((of_lhs, of_rhs), batch), **options)


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.generate, Phase.shrink])
@given(
    contracted=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    rows=SIZES,
    columns=SIZES,
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex64"]),
    preferred=st.sampled_from([None, "float32"]),
)
def test_contractions_are_equal_to_jaxs(contracted, rows, columns, dtype, preferred):
    if preferred and dtype in ("int8", "complex64"):
        preferred = None
    leading = tuple(range(len(contracted)))
    f = contraction(leading, leading, preferred_element_type=preferred)
    x, y = whole((*contracted, *rows), dtype), whole((*contracted, *columns), dtype, 1)
    assert ONE_PRODUCT in lowered(f, x, y)
    ours, theirs = both(f, x, y)
    assert ours.shape == (*rows, *columns)
    assert_equal(ours, theirs)


def test_the_gradient_of_weights_over_steps_is_one_product():
    def loss(w, x):
        return (x @ w).sum()

    w, x = whole((8, 16)), whole((4, 5, 8), seed=1)
    assert ONE_PRODUCT in lowered(jax.grad(loss), w, x)
    assert_equal(*both(jax.grad(loss), w, x))


@pytest.mark.parametrize("contracted", [(64,), (8, 8)])
def test_tall_products_are_computed_transposed(contracted):
    leading = tuple(range(len(contracted)))
    f = contraction(leading, leading)
    x, y = whole((*contracted, 90)), whole((*contracted, 30), seed=1)
    compiled = jax.jit(lowering.apply(f)).lower(x, y).compile().as_text()
    # XLA has not turned it back.
    assert re.search(r"f32\[30,90\]\S* dot\(", compiled)
    assert_equal(*both(f, x, y))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (contraction((0,), (0,)), ((6, 4), (6, 3))),
        (contraction((1, 2), (1, 2)), ((4, 2, 3), (5, 2, 3))),
        (contraction((0, 1), (1, 0)), ((2, 3, 4), (3, 2, 5))),
        (contraction((1,), (1,), ((0,), (0,))), ((2, 3, 4), (2, 3, 5))),
    ],
    ids=["one_dimension", "not_leading", "in_another_order", "of_a_batch"],
)
def test_other_contractions_are_left_to_jax(f, shapes):
    x, y = (whole(shape, seed=i) for i, shape in enumerate(shapes))
    ours = lowered(f, x, y)
    products = re.compile("stablehlo.dot_general.*(?=loc|$)", re.M)
    assert products.findall(lowered_by_jax(f, x, y)) == products.findall(ours) != []


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
def test_gradients_with_sums_are_the_same(dtype):
    weights, x = inputs(8, dtype=dtype)
    ours, theirs = both(jax.grad(residual_stream, (0, 1)), weights, x)
    # Halves are rounded where they are written: once more or less in a layer.
    assert_close(ours, theirs, 1e-5 if dtype == "float32" else 0.05)


@pytest.mark.slow
def test_the_work_grows_linearly_with_the_depth():
    gradient = jax.grad(residual_stream)
    ours, theirs = (
        [widest_operation(f, *inputs(depth)) for depth in (16, 32)]
        for f in (lowering.apply(gradient), gradient)
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


def test_sums_elsewhere_and_switched_off_are_left_to_jax(monkeypatch):
    arguments = inputs(8)
    gradient = jax.grad(residual_stream)
    assert WRITTEN not in lowered(gradient, *arguments, platform="cuda")
    monkeypatch.setenv("REPLICAX_CPU", "off")
    assert WRITTEN not in lowered(gradient, *arguments)


def test_gradients_of_replicas_equal_one_device():
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
