"""Gradients of max pooling on CPUs: the values of XLA's, and only where wanted.

Gradients by the pooled arrays are small whole numbers, -0 among them: sums of them are
exact in any order, so that results must be equal to the bit where nothing else is said.
"""

import collections
from functools import partial

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from tests.cpu.test_convolutions import both, lowered, lowered_by_jax

from replicax._private.jax import lowering_rule_for_cpus
from replicax.cpu import lowering, pooling

ONCE = settings(derandomize=True, phases=[Phase.generate])


def assert_same_bits(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


def source(x, window, strides, padding, normal=False):
    dims = zip(x.shape, window, strides, padding, strict=True)
    shape = [(n + low + high - w) // s + 1 for n, w, s, (low, high) in dims]
    rng = np.random.default_rng(7)
    return rng.normal(size=shape) if normal else -1.0 * rng.integers(-3, 4, shape)


def gradient(x, window, strides, padding, select=lax.ge_p, normal=False):
    dy = jnp.asarray(source(x, window, strides, padding, normal), x.dtype)
    params = {"window_dimensions": tuple(window), "window_strides": tuple(strides)}
    params |= {"padding": tuple(padding), "select_prim": select}
    return lax.select_and_scatter_add_p.bind(dy, x, **params)


def is_served(f, *args, platform="cpu"):
    return "select_and_scatter" not in lowered(f, *args, platform=platform)


@st.composite
def layers(draw):
    """Shape, window, strides and padding, with one window at least."""
    dims = []
    padding = draw(st.sampled_from(["VALID", "SAME", None]))
    for _ in range(draw(st.integers(1, 4))):
        taps, low = draw(st.integers(1, 3)), draw(st.integers(0, 3))
        size = draw(st.integers(taps if padding == "VALID" else 1, 7))
        high = draw(st.integers(max(0, taps - size - low), 4))
        dims.append((size, taps, draw(st.integers(1, 3)), (low, high)))
    shape, window, strides, edges = zip(*dims, strict=True)
    edges = lax.padtype_to_pads(shape, window, strides, padding) if padding else edges
    return shape, window, strides, edges


def values(rng, shape, dtype="float32", special=()):
    x = rng.integers(-1, 2, shape).astype("float32")
    for number in special:
        x = np.where(rng.random(shape) < 0.4, number, x)
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(ONCE, max_examples=3)
@given(st.lists(layers(), min_size=6, max_size=6))
def test_gradients_are_those_of_xla(dtype, cases) -> None:
    rng = np.random.default_rng(0)
    special = [np.inf, np.nan, -np.inf]
    arrays = [values(rng, a, dtype, [] if np.any(b) else special) for a, *_, b in cases]

    def run(arrays):
        return [
            gradient(x, *layer, [lax.ge_p, lax.le_p][n % 2])
            for n, (x, (_, *layer)) in enumerate(zip(arrays, cases, strict=True))
        ]

    assert_same_bits(*both(run, arrays))


def by_numpy(x, dy, window, strides, padding, keeps):
    """XLA's select-and-scatter, where padding is never chosen."""
    x, dx = np.asarray(x), np.zeros(x.shape, x.dtype)
    edges = np.array([low for low, _ in padding])
    for position in np.ndindex(dy.shape):
        best = None
        for tap in np.ndindex(*window):
            at = tuple(np.array(position) * strides + tap - edges)
            inside = np.all(np.array(at) >= 0) and np.all(np.array(at) < x.shape)
            if inside and (best is None or not keeps(x[best], x[at])):
                best = at
        if best is not None:
            dx[best] += dy[position]
    return dx


@settings(ONCE, max_examples=4)
@given(st.lists(layers(), min_size=4, max_size=4), st.integers(0, 9))
def test_nan_and_infinities_and_padding(cases, seed) -> None:
    """JAX's own rule for CPUs pads with -inf: then gradients get lost in padding."""
    rng = np.random.default_rng(seed)
    served = [case for case in cases if np.prod(case[2]) <= pooling._MOST_PHASES]
    for n, (shape, window, strides, padding) in enumerate(served):
        x = values(rng, shape, special=[np.nan, -np.inf, np.inf][n % 2 :])
        x = x if n else jnp.full_like(x, -np.inf)
        names = {"window": window, "strides": strides, "padding": padding}
        dy = source(x, **names)
        for select, keeps in ((lax.ge_p, np.greater_equal), (lax.le_p, np.less_equal)):
            ours = jax.jit(lowering.apply(partial(gradient, **names, select=select)))(x)
            assert_same_bits(ours, by_numpy(x, dy, **names, keeps=keeps))


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_gradients_of_overlapping_windows(dtype, close) -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 9, 9, 4)), dtype)
    window = 1, 3, 3, 1
    f = partial(
        gradient, window=window, padding=[(0, 0), (1, 1), (1, 1), (0, 0)], normal=True
    )
    ours, theirs = both(partial(f, strides=(1, 2, 2, 1)), x)
    a, b = np.asarray(ours, "float32"), np.asarray(theirs, "float32")
    np.testing.assert_allclose(a, b, atol=close * np.abs(b).max(), rtol=0)
    assert_same_bits(*both(partial(f, strides=window), x))


POOLING = [
    (keras.layers.MaxPooling1D(3, 2, padding="same"), (2, 7, 3)),
    (keras.layers.MaxPooling2D(), (2, 7, 6, 3)),
    (keras.layers.MaxPooling2D(2, data_format="channels_first"), (2, 3, 6, 7)),
    (keras.layers.MaxPooling2D(3, 2, padding="same"), (2, 7, 6, 3)),
    (keras.layers.MaxPooling3D(2, padding="same"), (2, 4, 5, 4, 3)),
]


def squares(layer, x):
    return jnp.sum(layer(x) ** 2)


def test_keras_layers_and_transformations() -> None:
    """Gradients, those of rows under vmap, and the second order."""
    arrays = [values(np.random.default_rng(3), shape) for _, shape in POOLING]

    def each(arrays):
        for (layer, _), x in zip(POOLING, arrays, strict=True):
            first = jax.grad(partial(squares, layer))
            rows = jax.vmap(first)(x[:, None])
            second = jax.grad(lambda x, first=first: jnp.sum(first(x) ** 2))(x)
            yield rows, second, jax.jvp(first, (x,), (jnp.sign(x) - 2,))

    assert_same_bits(*both(lambda arrays: [*each(arrays)], arrays))


@pytest.mark.parametrize("check", [True, False])
def test_in_shard_map_and_with_sharded_arrays(check) -> None:
    x = values(np.random.default_rng(4), (4, 5, 5, 3))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    rows = jax.sharding.PartitionSpec("replica")

    def run(x):
        return [jax.grad(partial(squares, POOLING[n][0]))(x) for n in (1, 3)]

    f = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check)
    assert_same_bits(*both(f, x))
    assert is_served(f, x)
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
    assert_same_bits(*both(run, sharded))


def test_unsupported_poolings_are_left_to_jax() -> None:
    x = jnp.ones((2, 12, 12, 3))
    layers = [keras.layers.MaxPooling2D(n, s) for n, s in [(2, 2), (6, 6), (12, 1)]]
    two, six, twelve = (jax.grad(partial(squares, layer)) for layer in layers)
    assert [is_served(f, x) for f in (two, six, twelve)] == [True, False, False]
    assert not is_served(two, x, platform="tpu")
    assert "select_and_scatter" in lowered_by_jax(two, x)
    of_n = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 12, 12, 3"), x.dtype)
    exported = jax.export.export(jax.jit(lowering.apply(two)), platforms=["cpu"])(of_n)
    assert_same_bits(exported.call(x), two(x))


def test_a_jax_without_rules_for_cpus(monkeypatch, caplog) -> None:
    """Without rules for CPUs, JAX's general rules apply; without those, nothing."""
    primitive = lax.select_and_scatter_add_p
    nothing = collections.defaultdict(dict)
    monkeypatch.setattr(lowering.mlir, "_platform_specific_lowerings", nothing)
    assert lowering_rule_for_cpus(primitive) is lowering.mlir._lowerings[primitive].rule
    monkeypatch.setattr(lowering.mlir, "_platform_specific_lowerings", None)
    caplog.set_level("INFO", logger="replicax")
    lowering._overrides.cache_clear()
    assert lowering._overrides() == ()
    lowering._overrides.cache_clear()
    assert caplog.text.count("convolutions and gradients of max pooling") == 1
