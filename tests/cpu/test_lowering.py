"""Lowerings for CPUs: under every setting of JAX, and in replicax' programs only."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.interpreters import mlir
from tests.cpu.test_convolutions import (
    applicable,
    assert_equal,
    both,
    conv,
    depthwise,
    layers,
    lowered,
    lowered_by_jax,
    params_of,
    whole,
)
from tests.cpu.test_reductions import inputs, residual_stream

import replicax as rx
from replicax._private.jax import lowering_rule_for_cpus
from replicax.cpu import lowering

SETTINGS = {
    "promotion": {"jax_numpy_dtype_promotion": "strict"},
    "rank": {"jax_numpy_rank_promotion": "raise"},
    "x64": {"jax_enable_x64": True},
    "nans": {"jax_debug_nans": True, "jax_debug_infs": True},
    "checks": {"jax_enable_checks": True, "jax_check_tracer_leaks": True},
    "transfers": {"jax_transfer_guard": "disallow"},
    "precision": {"jax_default_matmul_precision": "highest"},
    "weak_types": {"jax_numpy_dtype_promotion": "strict", "jax_enable_x64": True},
}
STRICT = SETTINGS["promotion"] | SETTINGS["rank"] | SETTINGS["checks"]
DTYPES = ["float16", "bfloat16", "float32"]


@contextlib.contextmanager
def configured(options):
    """JAX with settings, which are undone."""
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# A form, shapes of input and kernel, and options, for which `choose` selects the form.
CONVOLUTIONS = [
    ("patches", (1, 2, 2, 8), (3, 3, 8, 8), {}),
    ("patches", (1, 3, 3, 3, 4), (2, 2, 2, 2, 4), {"feature_group_count": 2}),
    ("groups", (2, 5, 5, 3), (3, 3, 1, 3), {"feature_group_count": 3}),
    ("groups", (2, 5, 5, 4), (2, 2, 2, 4), {"feature_group_count": 2}),
    ("groups", (2, 5, 5, 1), (3, 3, 1, 4), {}),
    ("groups", (2, 6, 1), (3, 1, 4), {"padding": "VALID"}),
    ("groups", (1, 4, 4, 2), (3, 3, 1, 2), {"feature_group_count": 2, "spread": 2}),
    ("taps", (2, 3, 3, 4), (1, 1, 8, 4), {"spec": "HWOI"}),
    ("outputs", (1, 8, 8, 2), (7, 7, 2, 32), {"padding": "VALID"}),
    ("outputs", (4, 3, 3, 2), (2, 2, 2, 4), {"batch_group_count": 2, "out": True}),
    ("strips", (3, 10, 9, 2), (8, 8, 2, 3), {"padding": "VALID"}),
    ("sums", (3, 4, 4, 2), (3, 3, 2, 3), {"batch_group_count": 3, "out": True}),
]


def convolution(options):
    options = dict(options)
    spec, spread = options.pop("spec", "HWIO"), options.pop("spread", 1)
    options.pop("out", None)
    options = {"padding": "SAME", **options}
    if spread > 1:
        options["padding"] = [(1, 1), (1, 1)]

    def run(x, w):
        dims = x.ndim - 2
        space = "HWD"[:dims]
        names = f"N{space}C", spec.replace("HW", space), f"N{space}C"
        return lax.conv_general_dilated(
            x,
            w,
            (1,) * dims,
            lhs_dilation=(spread,) * dims,
            dimension_numbers=names,
            **options,
        )

    return run


def forced(f, form, x, w):
    """Compute a convolution with a form, which `choose` may not select."""
    params = params_of(f, x, w)
    return partial(lowering._convolve, form=form, dtype=x.dtype, params=params)


def all_convolutions(dtype):
    rng = np.random.default_rng(0)
    cases = []
    for form, x, w, options in CONVOLUTIONS:
        f = convolution(options)
        cases.append((f, form, (whole(rng, x, dtype), whole(rng, w, dtype))))
    return cases


def pooled(x, size, stride):
    return lax.reduce_window(
        x, -np.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), "SAME"
    )


def everything(x, k, w, t):
    """Every served operation, forward and backward, under JAX's transformations."""

    def loss(k, x):
        y = conv(depthwise(x, k), w)
        y = pooled(pooled(y, 2, 2), 3, 1)
        return jnp.sum(y * y)

    def rows(x):
        return jax.vmap(jax.grad(loss), (None, 0))(k, x[:, None])

    def second(k):
        return jnp.sum(jnp.square(jax.grad(loss)(k, x)))

    def weights(v):
        return jnp.sum(jnp.square(jnp.einsum("bsi,io->bso", t, v)))

    def body(k, x):
        return k - jax.grad(jax.checkpoint(loss))(k, x[None]), jnp.sum(x)

    v = jnp.ones((t.shape[-1], 2), t.dtype)
    tangents = jax.jvp(partial(loss, x=x), (k,), (k,))
    return (
        *(rows(x), jax.grad(second)(k), jax.grad(weights)(v)),
        *(tangents, lax.scan(body, k, x)),
    )


def small(dtype):
    rng = np.random.default_rng(1)
    shapes = (2, 6, 6, 2), (3, 3, 1, 2), (1, 1, 2, 2), (3, 4, 5)
    return [whole(rng, shape, dtype) for shape in shapes]


@pytest.mark.slow(but=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_under_strict_settings(dtype) -> None:
    cases = all_convolutions(dtype)
    ours = [forced(f, form, *arrays) for f, form, arrays in cases]
    theirs = [f for f, _, _ in cases]

    def run(functions, arrays):
        return [f(*a) for f, a in zip(functions, arrays, strict=True)]

    arrays = [a for _, _, a in cases]
    expected = jax.jit(partial(run, theirs))(arrays)
    with configured(STRICT):
        assert_equal(jax.jit(partial(run, ours))(arrays), expected)


@pytest.mark.slow(but=["float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_under_strict_settings_are_those_of_jax(dtype) -> None:
    arrays = small(dtype)
    with configured(STRICT):
        text = lowered(everything, *arrays)
        assert "stablehlo.convolution" not in text
        assert "select_and_scatter" not in text
        if dtype == "float32":  # Halves are rounded where each of them ends.
            assert_equal(*both(everything, *arrays))


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_are_lowered_under_every_setting(name) -> None:
    arrays, (weights, stream) = small("float32"), inputs(8)
    with configured(SETTINGS[name]):
        assert "stablehlo.convolution" not in lowered(everything, *arrays)
        if name != "rank":  # The stream's own code promotes ranks.
            sums = lowered(jax.grad(residual_stream), weights, stream)
            assert 'inlineable = "false"' in sums


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.generate, Phase.shrink])
@given(
    st.lists(layers(), min_size=4, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_random_convolutions_under_strict_settings(cases, dtype, seed) -> None:
    rng = np.random.default_rng(seed)
    arrays = [(whole(rng, a, dtype), whole(rng, b, dtype)) for a, b, _ in cases]
    ours, theirs = [], []
    for (lhs, rhs), (_, _, keywords) in zip(arrays, cases, strict=True):
        f = partial(lax.conv_general_dilated, **keywords)
        for form in applicable(lhs, rhs, params_of(f, lhs, rhs)):
            theirs.append((f, lhs, rhs))
            ours.append((forced(f, form, lhs, rhs), lhs, rhs))

    def run(calls):
        return [f(a, b) for f, a, b in calls]

    with configured(STRICT):
        assert_equal(
            jax.jit(lambda: run(ours))(),
            jax.jit(lambda: run(theirs))(),
        )


# In programs of replicax only.


def test_programs_of_the_user_keep_the_rules_of_jax() -> None:
    """Before, during and after steps of a strategy; JAX's own rules are unchanged."""
    x, k = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 1, 4))
    weights, stream = inputs(8)
    t = jnp.ones((3, 4, 5))

    def pools(x):
        return jax.grad(lambda x: pooled(x, 2, 2).sum() + pooled(x, 3, 1).sum())(x)

    def texts():
        jax.clear_caches()
        return [
            lowered_by_jax(depthwise, x, k),
            lowered_by_jax(jax.grad(lambda k: depthwise(x, k).sum()), k),
            lowered_by_jax(pools, x),
            lowered_by_jax(lambda t: jnp.einsum("bsi,bso->io", t, t), t),
            lowered_by_jax(jax.grad(residual_stream), weights, stream),
        ]

    rules = [lowering_rule_for_cpus(p) for p in lowering._RULES]
    before = texts()
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    users = jax.jit(depthwise)  # The same compiled function in and outside of a step.
    results = strategy.run(lambda x: users(x, k), (x,))
    strategy.run(lambda x: (pools(x), jnp.einsum("bsi,bso->io", t, t)), (x,))
    strategy.run(lambda: jax.grad(residual_stream)(weights, stream))
    assert_equal(users(x, k), results)
    assert texts() == before
    assert rules == [lowering_rule_for_cpus(p) for p in lowering._RULES]
    assert rules == [
        (mlir._platform_specific_lowerings["cpu"].get(p) or mlir._lowerings[p]).rule
        for p in lowering._RULES
    ]
    assert all(rule.__module__.startswith("jax.") for rule in map(unwrapped, rules))


def unwrapped(rule):
    while isinstance(rule, partial):
        rule = rule.func
    return rule


def test_steps_of_a_strategy_are_served(monkeypatch) -> None:
    """`run`, `fit` and `predict`, with a user's compiled function within."""
    x, k = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 1, 4))
    chosen = []
    real = lowering._choose_convolution

    def noting(ctx, operands, params):
        chosen.append(real(ctx, operands, params))
        return chosen[-1]

    table = {lax.conv_general_dilated_p: ("convolutions", noting)}
    monkeypatch.setattr(lowering, "_RULES", {**lowering._RULES, **table})
    lowering._overrides.cache_clear()
    try:
        strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.run(lambda x: jax.jit(depthwise)(x, k), (x,))
        assert chosen.pop() is not None
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.layers.DepthwiseConv2D(3),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
        rows = np.ones((4, 5, 5, 2), "float32")
        model.fit(rows, np.ones((4, 1)), batch_size=4, verbose=0)
        assert chosen
        assert None not in chosen
        chosen.clear()
        model.predict(rows, verbose=0)
        assert chosen
        assert None not in chosen
    finally:
        lowering._overrides.cache_clear()


@pytest.mark.parametrize("name", ["promotion", "rank", "checks", "x64"])
def test_a_users_step_trains_under_strict_settings(name) -> None:
    """Means, sums, shares, tapes and checks of the replicas are in the program."""
    with configured(SETTINGS[name]):
        strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            weights = keras.Variable(jnp.zeros((4, 3), "float32"))
            steps = keras.Variable(0.0, aggregation="sum")
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weights])

        def step(x, size):
            with rx.GradientTape() as tape:
                errors = jnp.square(jnp.matmul(x, weights.value) - 1.0)
                loss = rx.compute_average_loss(
                    errors.sum(1), global_batch_size=size.sum()
                )
            optimizer.apply(tape.gradient(loss, [weights]), [weights])
            steps.assign_add(1.0)
            return rx.get_replica_context().all_reduce("sum", loss)

        x, size = jnp.ones((8, 4), "float32"), jnp.full(2, 8, "int32")
        losses = [float(strategy.run(step, (x, size))) for _ in range(2)]
        # Each replica sees half of the sizes: 4 rows of 3 errors, divided by 8.
        assert losses[0] == pytest.approx(3.0)
        assert losses[1] < losses[0]
        assert float(steps.value) == 4
        strategy.check_replicas()


def test_effects_of_a_program_are_kept(capfd) -> None:
    def run(x):
        jax.debug.print("sum {s}", s=jnp.sum(x), ordered=True)
        return 2 * x

    x = jnp.ones(3)
    assert_equal(jax.jit(lowering.apply(run))(x), 2 * x)
    jax.effects_barrier()
    assert "sum 3.0" in capfd.readouterr().out
    with jax.disable_jit():
        assert_equal(jax.jit(lowering.apply(run))(x), 2 * x)


def test_functions_that_jax_traces_as_one_operation() -> None:
    """From JAX 0.11 on: it replaces them before it lowers the program."""

    def of(x):
        root = lax.custom_root(
            lambda y: y * y - x, x, lambda f, y: y - f(y) / (2 * y), lambda g, y: y / 2
        )
        return jnp.searchsorted(x, x - 1), jnp.nonzero(x > 1, size=3), root

    x = jnp.arange(1.0, 4.0)
    for got, expected in zip(
        jax.tree.leaves(jax.jit(lowering.apply(of))(x)),
        jax.tree.leaves(jax.jit(of)(x)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)
