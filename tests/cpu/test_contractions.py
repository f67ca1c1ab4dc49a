"""Contractions over leading dimensions on CPUs: to the bit what JAX computes.

Operands are small whole numbers, so that the order of sums cannot matter.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from tests.cpu.test_convolutions import assert_equal, both, lowered, lowered_by_jax

from replicax import cpu

SIZES = st.lists(st.integers(0, 4), max_size=2).map(tuple)
ONE_PRODUCT = "contracting_dims = [0] x [0]"


def whole(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


def contraction(of_lhs, of_rhs, batch=((), ()), **options):
    return lambda x, y: lax.dot_general(x, y, ((of_lhs, of_rhs), batch), **options)


@settings(max_examples=30, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(
    contracted=st.lists(st.integers(0, 4), min_size=2, max_size=3).map(tuple),
    rows=SIZES,
    columns=SIZES,
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex64"]),
    preferred=st.sampled_from([None, "float32"]),
)
def test_equal_to_jaxs(contracted, rows, columns, dtype, preferred):
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
def test_others_are_jaxs_own(f, shapes):
    x, y = (whole(shape, seed=i) for i, shape in enumerate(shapes))
    ours = lowered(f, x, y)
    products = re.compile("stablehlo.dot_general.*(?=loc|$)", re.M)
    assert products.findall(lowered_by_jax(f, x, y)) == products.findall(ours) != []


def test_other_platforms_have_jaxs_own():
    x, y = whole((2, 3, 4)), whole((2, 3, 5))
    text = lowered(contraction((0, 1), (0, 1)), x, y, platform="cuda")
    assert ONE_PRODUCT not in text


def test_shapes_with_symbols_are_exported():
    (n,) = jax.export.symbolic_shape("n")
    f = jax.jit(cpu.apply(contraction((0, 1), (0, 1))))
    shape = jax.ShapeDtypeStruct((n, 3, 4), "float32")
    exported = jax.export.export(f)(shape, shape)
    x, y = whole((5, 3, 4)), whole((5, 3, 4), seed=1)
    assert_equal(exported.call(x, y), f(x, y))
