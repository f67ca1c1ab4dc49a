"""Convolutions on CPUs as matrix products: the values of XLA's, and only where wanted.

Property tests convolve small whole numbers. Every product and sum of them is a float32,
so the order of sums cannot matter and results must be equal, not close. Layers convolve
normal numbers: sums in another order differ by 1e-5 of the largest value at most.
"""

from functools import partial

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from replicax.cpu import choice, forms, lowering
from replicax.cpu.windows import Window, phases, trimmed

NHWC = ("NHWC", "HWIO", "NHWC")
SUMS = 1e-5


def both(f, *args):
    """Compute with replicax' lowerings and with XLA's; return both results."""
    ours = jax.jit(lowering.apply(f))(*args)
    theirs = jax.jit(lambda *a: f(*a))(*args)
    return ours, theirs


def assert_close(ours, theirs, tolerance=SUMS):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, "float32"), np.asarray(b, "float32")
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


def assert_equal(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def lowered(f, *args, platform="cpu"):
    """The program of a function with replicax' lowerings."""
    return lowered_by_jax(lowering.apply(f), *args, platform=platform)


def lowered_by_jax(f, *args, platform="cpu"):
    text = jax.jit(lambda *a: f(*a)).trace(*args)
    return text.lower(lowering_platforms=(platform,)).as_text()


def whole(rng, shape, dtype="float32"):
    return jnp.asarray(rng.integers(-2, 3, shape), dtype)


@st.composite
def layers(draw):
    """Arguments of `lax.conv_general_dilated`, with at least one element of output.

    Returns the shapes of input and kernel, and the keywords.
    """
    dims = draw(st.integers(1, 3))
    small = partial(draw, st.integers(1, 2 if dims == 3 else 3))
    space, taps, strides, padding, spread, apart = ([] for _ in range(6))
    for _ in range(dims):
        size, tap, stride, gap, hole = (small() for _ in range(5))
        size += draw(st.integers(0, 3))
        full, span = (size - 1) * gap + 1, (tap - 1) * hole + 1
        low = draw(st.integers(max(-2, 1 - full), 3))
        least = max(span - full - low, -2, 1 - full - min(low, 0))
        high = draw(st.integers(least, least + 3))
        space.append(size)
        taps.append(tap)
        strides.append(stride)
        padding.append((low, high))
        spread.append(gap)
        apart.append(hole)
    kind = draw(st.sampled_from(["plain", "features", "batch"]))
    groups = 1 if kind == "plain" else draw(st.integers(2, 3))
    batch, features, outputs = (draw(st.integers(1, 2)) for _ in range(3))
    names = "NC" + "HWD"[:dims], "OI" + "HWD"[:dims]
    layouts = [
        "".join(draw(st.permutations(name))) for name in (names[0], names[1], names[0])
    ]
    # JAX takes strides and the like in the order of the kernel's dimensions.
    order = [c for c in layouts[1] if c in "HWD"]
    sizes = dict(zip(order, space, strict=True))
    sizes |= {"N": batch * (groups if kind == "batch" else 1)}
    sizes |= {"C": features * (groups if kind == "features" else 1)}
    kernel = dict(zip(order, taps, strict=True))
    kernel |= {"I": features, "O": outputs * groups}
    return (
        [sizes[c] for c in layouts[0]],
        [kernel[c] for c in layouts[1]],
        {
            "window_strides": strides,
            "padding": padding,
            "lhs_dilation": spread,
            "rhs_dilation": apart,
            "dimension_numbers": tuple(layouts),
            "feature_group_count": groups if kind == "features" else 1,
            "batch_group_count": groups if kind == "batch" else 1,
        },
    )


def applicable(lhs, rhs, params):
    """All forms that can compute a convolution."""
    lhs_spec, _, _ = params["dimension_numbers"]
    found = ["patches", "groups"]
    if params["feature_group_count"] == params["batch_group_count"] == 1:
        found.append("taps")
    outputs = [w.outputs for w in choice.spatial_windows(lhs, rhs, params)]
    if params["feature_group_count"] > 1 or np.prod(outputs) > 16:
        return found
    found.append("outputs")
    groups = params["batch_group_count"]
    if groups > 1 and lhs.shape[lhs_spec[0]] == groups:
        found.append("sums")
    return found


def params_of(f, *args):
    [equation] = [
        e for e in jax.make_jaxpr(f)(*args).eqns if "conv" in e.primitive.name
    ]
    return equation.params


@pytest.mark.slow
@settings(max_examples=5, derandomize=True, phases=[Phase.generate])
@given(st.lists(layers(), min_size=5, max_size=5))
def test_every_form_computes_every_convolution(cases) -> None:
    rng = np.random.default_rng(0)
    arrays = [(whole(rng, a), whole(rng, b)) for a, b, _ in cases]
    ours, theirs, index = [], [], []
    for i, ((lhs, rhs), (_, _, keywords)) in enumerate(zip(arrays, cases, strict=True)):
        f = partial(lax.conv_general_dilated, **keywords)
        params = params_of(f, lhs, rhs)
        for form in applicable(lhs, rhs, params):
            index.append(i)
            theirs.append(f)
            ours.append(
                partial(lowering._convolve, form=form, dtype=lhs.dtype, params=params)
            )

    def run(functions, arrays):
        return [f(*arrays[i]) for f, i in zip(functions, index, strict=True)]

    expected = jax.jit(partial(run, theirs))(arrays)
    got = jax.jit(partial(run, ours))(arrays)
    assert_equal(got, expected)


@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(st.lists(layers(), min_size=5, max_size=5))
def test_gradients_are_those_of_xla(cases) -> None:
    rng = np.random.default_rng(1)
    arrays = [(whole(rng, a), whole(rng, b)) for a, b, _ in cases]

    def run(arrays):
        results = []
        for (lhs, rhs), (_, _, keywords) in zip(arrays, cases, strict=True):
            f = partial(lax.conv_general_dilated, **keywords)
            y, back = jax.vjp(f, lhs, rhs)
            results.append((y, back(jnp.sign(y))))
        return results

    assert_equal(*both(run, arrays))


@given(
    st.builds(
        Window,
        size=st.integers(1, 6),
        taps=st.integers(1, 5),
        low=st.integers(-1, 6),
        high=st.integers(-1, 6),
        input_dilation=st.integers(1, 4),
        dilation=st.integers(1, 3),
    )
)
def test_phases_cover_every_output_once(window) -> None:
    numbers = [
        p
        for phase in phases(window)
        for p in range(phase.first, window.outputs, window.input_dilation)
    ]
    assert sorted(numbers) == list(range(window.outputs))
    for phase in phases(window):
        if phase.window is not None:
            found = len(range(phase.first, window.outputs, window.input_dilation))
            assert phase.window.outputs == found
            assert phase.window.taps == len(range(window.taps)[phase.taps])
    assert trimmed(window)[1].outputs == window.outputs


def conv(x, w, **keywords):
    keywords = {"window_strides": (1, 1), "padding": "SAME", **keywords}
    return lax.conv_general_dilated(x, w, dimension_numbers=NHWC, **keywords)


def depthwise(x, w, **keywords):
    return conv(x, w, feature_group_count=x.shape[-1], **keywords)


def filter_gradient(f, x, w):
    return jax.grad(lambda w: jnp.sum(f(x, w) ** 2))(w)


@pytest.mark.parametrize(
    ("f", "x", "w", "served"),
    [
        pytest.param(conv, (2, 9, 9, 8), (3, 3, 8, 8), False, id="plain"),
        pytest.param(conv, (2, 9, 9, 4), (1, 1, 4, 8), True, id="1x1"),
        pytest.param(conv, (2, 2, 2, 4), (3, 3, 4, 8), True, id="kernel is larger"),
        pytest.param(depthwise, (2, 9, 9, 4), (3, 3, 1, 4), True, id="depthwise"),
        pytest.param(depthwise, (2, 9, 9, 4), (12, 12, 1, 4), False, id="144 taps"),
    ],
)
def test_the_rule_serves_or_leaves_a_convolution(f, x, w, served) -> None:
    text = lowered(f, jnp.ones(x), jnp.ones(w))
    assert ("stablehlo.convolution" in text) is not served
    assert "stablehlo.convolution" in lowered_by_jax(f, jnp.ones(x), jnp.ones(w))


def test_filter_gradients_of_groups_are_served() -> None:
    x = jnp.ones((2, 8, 8, 4))
    f = partial(filter_gradient, depthwise)
    assert "stablehlo.convolution" not in lowered(f, x, jnp.ones((3, 3, 1, 8)))


@pytest.mark.parametrize(
    ("channels", "outputs", "served"), [(1, 16, True), (1, 8, False), (2, 16, False)]
)
def test_filter_gradients_of_few_channels(channels, outputs, served) -> None:
    """Where the input's elements of all 9 taps are no more than the gradient's."""
    rng = np.random.default_rng(6)
    x = whole(rng, (2, 17, 17, channels))
    w = whole(rng, (3, 3, channels, outputs))
    f = partial(conv, padding="VALID")
    dy = whole(rng, (2, 15, 15, outputs))

    def gradient(x, dy):
        return jax.linear_transpose(partial(f, x), w)(dy)

    assert ("stablehlo.convolution" in lowered(gradient, x, dy)) is not served
    assert_equal(*both(gradient, x, dy))


@pytest.mark.parametrize(
    ("images", "size", "strides", "dilation", "padding", "in_strips"),
    [
        (1, (8, 5), (1, 1), (1, 1), "SAME", True),
        (3, (12, 7), (2, 1), (1, 1), "SAME", True),
        (2, (10, 6), (1, 1), (2, 1), "VALID", True),
        (4, (9,), (1,), (1,), "SAME", True),
        (4, (7, 8), (1, 1), (1, 1), "SAME", True),
        (8, (8, 8), (1, 1), (1, 1), "SAME", False),  # Enough images.
        (1, (17, 8), (1, 1), (1, 1), "SAME", False),  # No divisor up to 16.
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_filter_gradients_of_few_images(
    images, size, strides, dilation, padding, in_strips, is_last
) -> None:
    rng = np.random.default_rng(12)
    x = whole(rng, (images, *size, 3) if is_last else (images, 3, *size))
    taps = (3,) * len(size)
    w = whole(rng, (*taps, 3, 4) if is_last else (4, 3, *taps))
    space = "HW"[: len(size)]
    layout = f"N{space}C" if is_last else f"NC{space}"
    f = partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        rhs_dilation=dilation,
        dimension_numbers=(layout, f"{space}IO" if is_last else f"OI{space}", layout),
    )

    def gradient(x, dy):
        return jax.linear_transpose(partial(f, x), w)(dy)

    dy = whole(rng, f(x, w).shape)
    assert_equal(*both(gradient, x, dy))
    assert ("stablehlo.concatenate" in lowered(gradient, x, dy)) is in_strips
    assert "stablehlo.concatenate" not in lowered_by_jax(gradient, x, dy)


@pytest.mark.parametrize(
    ("taps", "strides", "dilation", "padding", "layout"),
    [
        ((3, 3, 3), (1, 1, 1), (1, 1, 1), "SAME", "NDHWC"),
        ((3, 2, 3), (2, 2, 2), (1, 1, 1), "SAME", "NDHWC"),
        ((2, 1, 3), (2, 1, 1), (2, 1, 1), "VALID", "NCDHW"),
        ((1, 3, 3), (1, 1, 1), (1, 1, 1), "VALID", "NDHWC"),
        ((3, 1, 1), (1, 1, 1), (2, 1, 1), "SAME", "NCDHW"),
    ],
)
def test_volumes(taps, strides, dilation, padding, layout) -> None:
    """Layers, also transposed ones, and both gradients."""
    rng = np.random.default_rng(8)
    is_last = layout == "NDHWC"
    x = whole(rng, (2, 5, 4, 6, 3) if is_last else (2, 3, 5, 4, 6))
    w = whole(rng, (*taps, 3, 4) if is_last else (4, 3, *taps))
    numbers = (layout, "DHWIO" if is_last else "OIDHW", layout)
    for spread in ((1, 1, 1), strides):
        f = partial(
            lax.conv_general_dilated,
            window_strides=(1, 1, 1) if spread == strides else strides,
            padding=padding if spread == (1, 1, 1) else [(1, 1)] * 3,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
        )
        dy = whole(rng, jax.eval_shape(f, x, w).shape)

        def step(x, w, dy, f=f):
            y, back = jax.vjp(f, x, w)
            return y, *back(dy)

        for theirs, ours in zip(*both(step, x, w, dy), strict=True):
            assert_equal(theirs, ours)


@pytest.mark.parametrize(("taps", "strides"), [(3, 2), (4, 2), (2, 3), (5, 1)])
def test_kernel_gradients_of_transposed_layers(taps, strides) -> None:
    rng = np.random.default_rng(9)
    x, w = whole(rng, (2, 6, 5, 3)), whole(rng, (taps, taps, 3, 4))
    f = partial(
        conv,
        padding=[(taps - 1, taps - 1 + strides)] * 2,
        window_strides=(1, 1),
        lhs_dilation=(strides, strides),
    )
    dy = whole(rng, jax.eval_shape(f, x, w).shape)

    def gradient(x, dy):
        return jax.linear_transpose(partial(f, x), w)(dy)

    assert "stablehlo.convolution" not in lowered(gradient, x, dy)
    assert_equal(*both(gradient, x, dy))


@pytest.mark.parametrize(
    ("taps", "channels", "outputs", "served"),
    [
        (3, 1, 33, True),
        (2, 2, 33, True),
        (3, 2, 33, False),
        (4, 3, 32, True),
        (7, 1, 3, True),
        (8, 1, 3, False),
        (3, 6, 3, False),
    ],
)
def test_layers_of_few_terms(taps, channels, outputs, served) -> None:
    """Up to 9 products make an element of the output, or 49 of at most 32 outputs."""
    rng = np.random.default_rng(7)
    x = whole(rng, (2, 12, 12, channels))
    w = whole(rng, (taps, taps, channels, outputs))
    assert ("stablehlo.convolution" in lowered(conv, x, w)) is not served
    for strides in ((1, 1), (2, 1)):
        assert_equal(*both(partial(conv, window_strides=strides), x, w))


@pytest.mark.parametrize(
    ("f", "x", "w"),
    [
        (depthwise, (4, 11, 11, 5), (3, 3, 1, 5)),
        (depthwise, (6, 9, 9, 10), (2, 2, 1, 10)),
        (conv, (7, 6, 6, 1), (3, 3, 1, 6)),
        (conv, (4, 11, 11, 2), (2, 2, 2, 10)),
    ],
)
def test_a_convolution_has_one_value(f, x, w) -> None:
    """Gradients of `max` compare its result with its input, bit by bit."""
    rng = np.random.default_rng(8)
    x, w = (jnp.asarray(rng.normal(size=shape), "float32") for shape in (x, w))

    def loss(bias, x, w):
        return jnp.sum(jnp.sin(jnp.max(f(x, w) + bias, (1, 2))))

    assert_close(*both(jax.grad(loss), jnp.ones(w.shape[-1]), x, w))


def test_programs_for_other_platforms_are_left_to_jax() -> None:
    x, w = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 1, 4))
    for platform in ("tpu", "cuda"):
        assert "stablehlo.convolution" in lowered(depthwise, x, w, platform=platform)
    applied = jax.jit(lowering.apply(depthwise))
    exported = jax.export.export(applied, platforms=["tpu"])(x, w)
    assert "stablehlo.convolution" in exported.mlir_module()
    both_platforms = jax.export.export(applied, platforms=["cpu", "tpu"])
    assert_equal(both_platforms(x, w).call(x, w), depthwise(x, w))


def test_symbolic_shapes_are_left_to_xla() -> None:
    [n] = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 9, 9, 4), jnp.float32)
    applied = jax.jit(lowering.apply(depthwise))
    exported = jax.export.export(applied)(x, jnp.ones((3, 3, 1, 4)))
    ones = jnp.ones((5, 9, 9, 4)), jnp.ones((3, 3, 1, 4))
    assert_equal(exported.call(*ones), depthwise(*ones))


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_other_dtypes_are_left_to_xla(dtype) -> None:
    x, w = jnp.ones((2, 2, 2, 3), dtype), jnp.ones((3, 3, 3, 2), dtype)
    assert "stablehlo.convolution" in lowered(conv, x, w)


def test_complex_convolutions_are_served_in_real_parts() -> None:
    """JAX itself lowers them to three convolutions of real numbers."""
    rng = np.random.default_rng(7)
    x, w = (whole(rng, shape, "complex64") for shape in [(2, 2, 2, 3), (3, 3, 3, 2)])
    x, w = x * (1 + 2j), w * (1 - 1j)
    assert "stablehlo.convolution" not in lowered(conv, x, w)
    assert_equal(*both(conv, x, w))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32(dtype) -> None:
    # 1024 products of 1 and 1/2: a sum in bfloat16 would stop at 128.
    x, w = jnp.ones((1, 1, 1, 1024), dtype), jnp.full((1, 1, 1024, 2), 0.5, dtype)
    d, k = jnp.ones((1, 16, 16, 1), dtype), jnp.ones((8, 16, 1, 1), dtype)

    def run(x, w, d, k):
        wide = conv(x, w, preferred_element_type=jnp.float32)
        gradient = filter_gradient(conv, jnp.ones((1, 16, 16, 2), dtype), w[:, :, :2])
        return conv(x, w), wide, depthwise(d, k, padding="VALID"), gradient

    ours, theirs = both(run, x, w, d, k)
    assert_equal(ours, theirs)
    assert ours[0].dtype == dtype
    assert ours[1].dtype == jnp.float32
    assert float(ours[0][0, 0, 0, 0]) == 512


def test_empty_dimensions_are_left_to_xla() -> None:
    def run():
        empty = conv(jnp.ones((0, 3, 3, 2)), jnp.ones((1, 1, 2, 2)))
        zeros = conv(jnp.ones((1, 3, 3, 0)), jnp.ones((1, 1, 0, 2)))
        return empty, zeros

    assert_equal(*both(run))


def test_patches_are_bounded(monkeypatch) -> None:
    x, w = jnp.ones((1, 32, 32, 8)), jnp.ones((5, 5, 8, 8))
    windows = [Window(size=32, taps=5, low=2, high=2)] * 2
    run = partial(forms.by_patches, windows=windows, groups=1)

    def temporary():
        program = jax.jit(lambda x, w: run(x, w)).lower(x, w).compile()
        return program.memory_analysis().temp_size_in_bytes, program(x, w)

    whole_bytes, expected = temporary()
    monkeypatch.setattr(forms, "_PATCHES_BYTES", 4 * x.nbytes)
    fewer_bytes, result = temporary()
    assert_equal(result, expected)
    assert whole_bytes > 25 * x.nbytes
    assert fewer_bytes < 14 * x.nbytes


def separable(x, w):
    return conv(depthwise(x, w[0]), w[1])


@pytest.mark.parametrize("check", [True, False])
def test_in_shard_map(check) -> None:
    rng = np.random.default_rng(3)
    x = whole(rng, (4, 5, 5, 3))
    w = whole(rng, (3, 3, 1, 6)), whole(rng, (1, 1, 6, 2))
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("replica"), P()),
        out_specs=(P("replica"), P("replica"), P("replica")),
        check_vma=check,
    )
    def run(x, w):
        w = jax.tree.map(lambda a: a + 0 * lax.axis_index("replica"), w)
        y, back = jax.vjp(separable, x, w)
        dx, dw = back(jnp.sign(y))
        return y, dx, jax.tree.map(lambda a: a[None], dw)

    assert_equal(*both(run, x, w))
    # Gradients have types that name the mesh.
    assert "stablehlo.convolution" not in lowered(run, x, w)


def test_with_arrays_that_are_sharded() -> None:
    rng = np.random.default_rng(4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    rows = jax.sharding.NamedSharding(mesh, P("replica"))
    x = jax.device_put(whole(rng, (4, 5, 5, 3)), rows)
    w = whole(rng, (3, 3, 1, 6)), whole(rng, (1, 1, 6, 2))
    w = jax.device_put(w, jax.sharding.NamedSharding(mesh, P()))

    def run(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.sign(separable(x, w))))(w), separable(
            x, w
        )

    assert_equal(*both(run, x, w))


def test_with_shardings_in_types() -> None:
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2,), ("replica",), (explicit,), devices=jax.devices()[:2])
    x, w = jnp.ones((4, 5, 5, 3)), jnp.ones((3, 3, 1, 3))
    expected = depthwise(x, w)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("replica")))
        assert_equal(jax.jit(lowering.apply(depthwise))(x, w), expected)


LAYERS = [
    (keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2), (2, 7, 3)),
    (keras.layers.Conv2D(4, 3, strides=2, padding="same"), (2, 6, 6, 3)),
    (keras.layers.Conv2D(4, 3, padding="same", groups=2), (2, 2, 2, 4)),
    (keras.layers.Conv2D(4, 1, strides=2), (2, 5, 5, 3)),
    (keras.layers.Conv3D(4, 2, strides=2, padding="same"), (2, 4, 4, 4, 3)),
    (keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same"), (2, 2, 2, 3)),
    (keras.layers.DepthwiseConv2D(3, strides=2, padding="same"), (2, 6, 6, 3)),
    (keras.layers.DepthwiseConv2D(3, depth_multiplier=2), (2, 6, 6, 3)),
    (keras.layers.SeparableConv2D(4, 3, padding="same"), (2, 5, 5, 3)),
]


@pytest.mark.slow(but=["1"])
@pytest.mark.parametrize("halves", [0, 1])
def test_gradients_of_keras_layers(halves) -> None:
    """Values, gradients and gradients of their squares: the second order."""
    rng = np.random.default_rng(5)
    chosen = LAYERS[halves::2]
    inputs = [rng.normal(size=shape).astype("float32") for _, shape in chosen]
    for (layer, _), x in zip(chosen, inputs, strict=True):
        layer.build(x.shape)
    weights = [[v.value for v in layer.trainable_variables] for layer, _ in chosen]

    def loss(weights, x, layer):
        y, _ = layer.stateless_call(weights, [], x)
        return jnp.sum(jnp.tanh(y)), y

    def second(weights, x, layer):
        g, y = jax.grad(loss, (0, 1), has_aux=True)(weights, x, layer)
        return sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(g)), (g, y)

    def run(weights, inputs):
        results = []
        for w, x, (layer, _) in zip(weights, inputs, chosen, strict=True):
            results.append(jax.grad(second, (0, 1), has_aux=True)(w, x, layer))
        return results

    assert_close(*both(run, weights, inputs))


def test_a_layer_of_one_tap_is_one_product() -> None:
    # Its result is much larger than its input and its kernel, as gradients' are.
    x, kernel = jnp.ones((8, 6, 6, 64)), jnp.ones((1, 1, 64, 384))

    def layer(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=NHWC
        )

    assert lowered(layer, x, kernel).count("dot_general") == 1


@pytest.mark.parametrize("outputs", [8, 384])
def test_a_kernel_gradient_of_one_tap_is_one_product(outputs) -> None:
    x, dy = jnp.ones((8, 6, 6, 64)), jnp.ones((8, 6, 6, outputs))

    def gradient(x, dy):
        kernel = jnp.ones((1, 1, 64, outputs))
        return jax.linear_transpose(partial(conv, x), kernel)(dy)

    text = lowered(gradient, x, dy)
    assert text.count("dot_general") == 1
    assert "concatenate" not in text  # Patches would be a copy for each position.


def test_a_kernel_gradient_with_groups_does_not_grow_with_its_positions() -> None:
    def num_operations(taps):
        x, w = jnp.ones((4, 16, 16, 8)), jnp.ones((taps, taps, 1, 8))
        forward = partial(depthwise, padding="SAME")
        gradient = jax.linear_transpose(partial(forward, x), w)
        return lowered(gradient, forward(x, w)).count("stablehlo.")

    assert num_operations(5) == num_operations(3)
