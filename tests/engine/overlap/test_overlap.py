"""Buckets for GPUs, which overlap with the backward pass: order, sizes, sums."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.engine.communication import sum_gradients
from replicax.engine.overlap.buckets import deferred_products, overlapping_buckets
from replicax.engine.overlap.origins import Origin, origins_of
from replicax.engine.replica_axis import ReplicaAxis

MIB = 2**20
VOCABULARY, WIDTH, NUM_CLASSES = 1500, 256, 40

# An axis of GPUs makes programs as for GPUs; these tests run them on CPUs.


def axis_of(platform: str, num: int = 4) -> ReplicaAxis:
    names = tuple(f"{platform}:{i}" for i in range(num))
    return ReplicaAxis(name="replica", devices=names, num_per_host=num)


def weights(rng: np.random.Generator) -> dict[str, Any]:
    def of(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / 16, "float32")

    return {
        "0 table": of(VOCABULARY, WIDTH),
        "1 kernel": of(WIDTH, WIDTH),
        "1 bias": of(WIDTH),
        "1 half": of(WIDTH, WIDTH).astype("bfloat16"),
        "2 scale": of(),
        "2 kernel": of(WIDTH, 4 * WIDTH),
        "2 unused": of(3),
        "3 kernel": of(4 * WIDTH, WIDTH),
        "4 empty": of(0, 3),
        "4 kernel": of(WIDTH, NUM_CLASSES),
    }


def loss_of(w: dict[str, Any], tokens: Any) -> Any:
    h = w["0 table"][tokens]
    h = jnp.tanh(h @ w["1 kernel"] + w["1 bias"])
    h = (h.astype("bfloat16") @ w["1 half"]).astype("float32")
    h = h + jnp.tanh(h @ (w["2 scale"] * w["2 kernel"])) @ w["3 kernel"]
    return jnp.sum((h @ w["4 kernel"]) ** 2) + jnp.sum(w["4 empty"])


def step_of(
    axis: ReplicaAxis,
    options: rx.CommunicationOptions,
    dims: list[int | None] | None = None,
    **others: Any,
) -> Any:
    def step(w: dict[str, Any], tokens: Any) -> list[Any]:
        grads = jax.grad(loss_of)(w, tokens)
        own = [None if k == "2 unused" else g for k, g in sorted(grads.items())]
        return sum_gradients(
            own, rx.NcclAllReduce(), axis, options, dims=dims, **others
        )

    results = [
        P() if dim is None else P(*[None] * dim, "replica") for dim in dims or [None]
    ]
    mesh = Mesh(np.array(jax.devices()[: axis.size]), ("replica",))
    spmd = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P("replica")),
        out_specs=results if dims else P(),
        check_vma=False,
    )
    return jax.jit(spmd)


@pytest.mark.parametrize(
    "options",
    [
        rx.CommunicationOptions(),
        rx.CommunicationOptions(compression="bfloat16"),
        rx.CommunicationOptions(
            gradient_hook=lambda grads: [None if g is None else g * 2 for g in grads]
        ),
    ],
    ids=["plain", "compressed", "hooked"],
)
def test_overlapping_sums_equal_plain_sums(options) -> None:
    rng = np.random.default_rng(0)
    w = weights(rng)
    tokens = rng.integers(0, VOCABULARY, (64,))
    packed = step_of(axis_of("gpu"), options)
    expected = step_of(axis_of("cpu"), options)(w, tokens)
    got = packed(w, tokens)
    assert "optimization_barrier" in packed.lower(w, tokens).as_text()
    for (name, value), total, other in zip(
        sorted(w.items()), got, expected, strict=True
    ):
        if name == "2 unused":
            assert total is None
            assert other is None
            continue
        assert (total.shape, total.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(total, other, err_msg=name)


# By name: the dimension that is split; None for arrays that replicas get whole.
DIMS = [0, None, 1, 0, 1, None, None, 0, None, 0]


@pytest.mark.parametrize("updates_are_last", [False, True])
def test_overlapping_blocks_equal_plain_blocks(updates_are_last) -> None:
    rng = np.random.default_rng(0)
    w = weights(rng)
    tokens = rng.integers(0, VOCABULARY, (64,))
    options = rx.CommunicationOptions()
    packed = step_of(axis_of("gpu"), options, DIMS, updates_are_last=updates_are_last)
    expected = step_of(axis_of("cpu"), options, DIMS)(w, tokens)
    got = packed(w, tokens)
    for name, total, other in zip(sorted(w), got, expected, strict=True):
        if name != "2 unused":
            np.testing.assert_array_equal(total, other, err_msg=name)
    text = packed.lower(w, tokens).as_text()
    scattered = re.findall(
        r"reduce_scatter.*?\) : \(tensor<([\dx]*)x\w+>\)", text, re.DOTALL
    )
    sizes = [int(np.prod([int(n) for n in size.split("x")])) for size in scattered]
    assert sizes == [
        4 * WIDTH * WIDTH,  # "3 kernel"
        4 * WIDTH * WIDTH,  # "2 kernel"
        WIDTH * WIDTH,  # "1 half", of another dtype
        WIDTH * WIDTH,  # "1 kernel", which is in one bucket with the table
        VOCABULARY * WIDTH,
        WIDTH * NUM_CLASSES,
    ]


def test_products_are_deferred_while_a_bucket_is_summed() -> None:
    products = [Origin(i + 1, "dot_general") for i in range(6)]
    # No product computes gradient 4, so its bucket has none to hide the one before it.
    origins = dict(enumerate([*products[:4], Origin(5), *products[4:]]))
    buckets = [[0], [1, 2], [3], [4], [5, 6]]
    deferred = deferred_products(buckets, origins, scatters=True)
    assert deferred == {6: 3, 5: 2, 3: 1, 2: 0, 1: 0}
    # An all-reduce defers one product of the next bucket only.
    assert deferred_products(buckets, origins, scatters=False) == {6: 3, 3: 1}


def test_buckets_follow_the_backward_pass() -> None:
    w = weights(np.random.default_rng(0))
    lowered = step_of(axis_of("gpu"), rx.CommunicationOptions()).lower(
        w, np.zeros((64,), "int32")
    )
    sizes = re.findall(
        r"all_reduce.*?\) : \(tensor<([\dx]*)x\w+>\)", lowered.as_text(), re.DOTALL
    )
    counts = [int(np.prod([int(n) for n in size.split("x")])) for size in sizes]
    assert counts == [
        4 * WIDTH * WIDTH,  # "3 kernel"
        4 * WIDTH * WIDTH + 1,  # "2 kernel" and "2 scale"
        WIDTH * WIDTH,  # "1 half", of another dtype
        WIDTH,  # "1 bias"
        # Gradients of the end; then a small earlier one, whose product hides them.
        WIDTH * WIDTH + VOCABULARY * WIDTH,
        WIDTH * NUM_CLASSES,
    ]


def test_origins_of_gradients() -> None:
    found: dict[str, Origin] = {}

    def step(w: dict[str, Any], tokens: Any) -> None:
        grads = jax.grad(loss_of)(w, tokens)
        # A regularizer's gradient is added, and all are scaled.
        grads["3 kernel"] = 2.0 * (grads["3 kernel"] + 0.1 * w["3 kernel"])
        found.update(origins_of(grads))

    w = weights(np.random.default_rng(0))
    jax.eval_shape(step, w, np.zeros((64,), "int32"))
    products = {name for name, origin in found.items() if origin.product}
    assert products == {"1 kernel", "1 half", "2 kernel", "3 kernel", "4 kernel"}
    depths = {name: origin.depth for name, origin in found.items()}
    assert [
        depths[name]
        for name in ("4 kernel", "3 kernel", "2 kernel", "1 half", "1 kernel")
    ] == [6, 7, 8, 9, 10]
    assert depths["0 table"] == depths["1 kernel"]
    assert depths["1 bias"] == depths["1 half"]


def test_a_product_before_a_call_is_not_deferred() -> None:
    found: list[Origin] = []

    def step(x: Any) -> None:
        grads = {0: jax.jit(lambda y: 2 * y)(x @ x), 1: 2 * (x @ x)}
        found.extend(origins_of(grads).values())

    jax.eval_shape(step, np.ones((4, 4), "float32"))
    assert [origin.product for origin in found] == ["", "dot_general"]


def test_origins_of_the_kernels_of_convolutions() -> None:
    def loss(kernels: list[Any], x: Any) -> Any:
        for kernel in kernels[:2]:
            x = jax.lax.conv_general_dilated(
                x,
                kernel.astype("bfloat16"),
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=x.shape[-1] // kernel.shape[2],
            )
        return jnp.sum(x.mean((1, 2)) @ kernels[2].astype("bfloat16"))

    def step(kernels: list[Any], x: Any) -> None:
        origins = origins_of(dict(enumerate(jax.grad(loss)(kernels, x)))).values()
        assert [o.is_convolution for o in origins] == [True, True, False]
        assert all(o.product for o in origins)

    shapes = [(3, 3, 4, 8), (3, 3, 1, 8), (8, 5)]
    kernels = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    jax.eval_shape(step, kernels, jax.ShapeDtypeStruct((2, 6, 6, 4), "bfloat16"))


def test_other_transformations_and_arguments_have_no_origin() -> None:
    def step(grad: Any) -> None:
        assert origins_of({0: grad}) == {0: Origin()}

    jax.eval_shape(step, jnp.ones(3))
    jax.eval_shape(jax.vmap(lambda x: step(x * 2)), jnp.ones(3))
    assert origins_of({0: jnp.ones(3)}) == {0: Origin()}


@given(data=st.data())
def test_buckets_are_in_order_and_the_last_is_small(data) -> None:
    num = data.draw(st.integers(1, 30))
    draw: Callable[[Any], list[Any]] = lambda of: data.draw(  # noqa: E731
        st.lists(of, min_size=num, max_size=num)
    )
    sizes = draw(st.sampled_from([0, 4, 1000, MIB // 4, MIB, 40 * MIB]))
    dtypes = draw(st.sampled_from(["float32", "bfloat16"]))
    depths = draw(st.integers(0, 12))
    products = draw(st.sampled_from(["", "dot_general"]))
    origins = dict(enumerate(map(Origin, depths, products)))
    buckets = overlapping_buckets(
        {i: sizes[i] for i in reversed(range(num)) if sizes[i]},
        dict(enumerate(dtypes)),
        origins,
        spans_hosts=data.draw(st.booleans()),
    )
    if not buckets:
        assert sum(sizes) <= 4 * MIB
        return
    packed = [i for bucket in buckets for i in bucket]
    assert sorted(packed) == [i for i, size in enumerate(sizes) if size]
    for bucket in buckets:
        assert len({dtypes[i] for i in bucket}) == 1
        assert [depths[i] for i in bucket] == sorted(depths[i] for i in bucket)
        # Without its last gradient, a bucket is not full.
        assert sum(sizes[i] for i in bucket[:-1]) < 32 * MIB
    for i, number in deferred_products(buckets, origins, scatters=False).items():
        assert origins[i].product
        assert i in buckets[number + 1]
    smallest = min((sizes[i] for i in packed if products[i]), default=sum(sizes))
    if smallest <= sum(sizes) // 32:
        assert sum(sizes[i] for i in buckets[-1]) <= sum(sizes) // 32


def fit(strategy: rx.Strategy, *, by_tape: bool) -> list[np.ndarray]:
    """The weights of a model after a few steps."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(64, 3, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.DepthwiseConv2D(3),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(2, name="head"),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer, "mse", run_eagerly=False)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 16, 8, 8, 3)), rng.normal(size=(2, 16, 2))
    if not by_tape:
        model.fit(
            np.concatenate(x), np.concatenate(y), batch_size=16, verbose=0, epochs=2
        )
        return [np.asarray(v) for v in [*model.variables, *optimizer.variables]]
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with rx.GradientTape() as tape:
            loss = jnp.mean((model(x, training=True) - y) ** 2)
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)

    for features, targets in zip(x, y, strict=True):
        parts = [
            a.reshape(2, 8, *a.shape[1:]).astype("float32") for a in (features, targets)
        ]
        strategy.run(step, [rx.PerReplica(jnp.asarray(p)) for p in parts])
    return [np.asarray(v) for v in [*model.variables, *optimizer.variables]]


@pytest.mark.slow(but=["fit"])
@pytest.mark.parametrize("by_tape", [False, True], ids=["fit", "tape"])
def test_training_is_the_same_with_overlapping_buckets(monkeypatch, by_tape) -> None:
    devices = ["cpu:0", "cpu:1"]
    expected = fit(rx.MirroredStrategy(devices), by_tape=by_tape)
    seen: set[tuple[int, ...]] = set()
    original = jax.lax.optimization_barrier

    def barrier(operand: Any) -> Any:
        seen.update(map(jnp.shape, jax.tree.leaves(operand)))
        return original(operand)

    monkeypatch.setattr(jax.lax, "optimization_barrier", barrier)
    monkeypatch.setattr(ReplicaAxis, "overlaps", True)
    monkeypatch.setattr("replicax.engine.overlap.buckets._LEAST_BYTES", 1024)
    got = fit(rx.MirroredStrategy(devices), by_tape=by_tape)
    # Kernels of both convolutions waited for their sums.
    assert {(3, 3, 3, 64), (3, 3, 64, 1)} <= seen
    for value, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6, atol=1e-7)


def test_no_buckets_by_default_on_cpus_and_tpus() -> None:
    w, tokens = weights(np.random.default_rng(0)), np.zeros((64,), "int32")
    text = step_of(axis_of("tpu"), rx.CommunicationOptions()).lower(w, tokens).as_text()
    assert "optimization_barrier" not in text
    assert "concatenate" not in text
    assert not ReplicaAxis(
        name="r", devices=("gpu:0+gpu:1", "gpu:2+gpu:3"), num_per_host=2
    ).overlaps
    assert ReplicaAxis(
        name="r", devices=("worker:0/gpu:0", "worker:1/gpu:0"), num_per_host=1
    ).overlaps
