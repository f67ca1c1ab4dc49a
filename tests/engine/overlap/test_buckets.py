"""Sums of gradients: the hook, compression, buckets and their order."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.engine.communication import sum_gradients
from replicax.engine.overlap.buckets import plan_sums
from replicax.engine.replica_axis import ReplicaAxis
from replicax.planning import compiler

TWO = ReplicaAxis(name="replica", devices=("cpu:0", "cpu:1"), num_per_host=2)
DTYPES = ["float32", "bfloat16", "int32", "float16"]


def summed(
    num_replicas: int,
    ops: rx.CrossDeviceOps,
    options: rx.CommunicationOptions,
    grads: list[Any],
) -> tuple[list[Any], str]:
    """`sum_gradients` of values `[R, ...]`, and the program that XLA compiled."""
    axis = ReplicaAxis(
        name="replica",
        devices=tuple(f"cpu:{i}" for i in range(num_replicas)),
        num_per_host=num_replicas,
    )
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("replica",))
    absent = [g is None for g in grads]

    def fn(arrays: list[Any]) -> list[Any]:
        own = iter(x[0] for x in arrays)
        total = sum_gradients(
            [None if a else next(own) for a in absent], ops, axis, options
        )
        assert [t is None for t in total] == absent
        return [t[None] for t in total if t is not None]

    step = jax.jit(
        jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=False,
        )
    )
    arrays = [jnp.asarray(g) for g in grads if g is not None]
    compiled = step.lower(arrays).compile()
    return step(arrays), compiled.as_text() or ""


def all_reduces(text: str) -> list[list[int]]:
    """The element counts of each all-reduce in a compiled program, in its order."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return [
        [
            int(np.prod([int(n) for n in dims.split(",") if n]))
            for dims in re.findall(r"\w+\[([\d,]*)\]", types)
        ]
        for types in found
    ]


@settings(max_examples=25)
@given(data=st.data())
def test_sums_in_buckets_equal_plain_sums(data) -> None:
    num_replicas = data.draw(st.sampled_from([2, 3, 4, 6, 8]), "num_replicas")
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), max_size=6),
        "shapes",
    )
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    absent = [data.draw(st.booleans()) for _ in shapes]
    ops = data.draw(
        st.sampled_from(
            [
                rx.NcclAllReduce(),
                rx.NcclAllReduce(num_packs=3),
                rx.HierarchicalCopyAllReduce(2),
            ]
        ),
        "ops",
    )
    options = rx.CommunicationOptions(
        bytes_per_pack=data.draw(st.sampled_from([0, 1, 16, 40, 10**6]))
    )
    rng = np.random.default_rng(0)
    grads = [
        # Small integers: their sums are exact in every dtype and order.
        None
        if gone
        else jnp.asarray(rng.integers(-8, 9, (num_replicas, *shape)), dtype)
        for shape, dtype, gone in zip(shapes, dtypes, absent, strict=True)
    ]
    got, _ = summed(num_replicas, ops, options, grads)
    for total, grad in zip(got, [g for g in grads if g is not None], strict=True):
        assert (total.shape, total.dtype) == (grad.shape, grad.dtype)
        expected = np.asarray(grad).astype("float64").sum(0)
        np.testing.assert_array_equal(
            np.asarray(total).astype("float64"),
            np.broadcast_to(expected, grad.shape),
        )


@given(
    sizes=st.lists(st.integers(0, 25).map(lambda n: 4 * n), max_size=20),
    bytes_per_pack=st.integers(1, 150),
    num_packs=st.integers(2, 8),
    data=st.data(),
)
def test_buckets_hold_every_gradient_once(
    sizes, bytes_per_pack, num_packs, data
) -> None:
    dtypes = [data.draw(st.sampled_from(["float32", "int32"])) for _ in sizes]
    grads: Any = {
        i: np.zeros(size // 4, dtype)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    }
    by_bytes = plan_sums(grads, TWO, bytes_per_pack=bytes_per_pack, num_packs=9).buckets
    by_count = plan_sums(grads, TWO, num_packs=num_packs).buckets
    for buckets in (by_bytes, by_count):
        packed = [i for bucket in buckets for i in bucket]
        assert sorted(packed) == [i for i, size in enumerate(sizes) if size]
        for bucket in buckets:
            assert len({dtypes[i] for i in bucket}) == 1
            assert bucket == sorted(bucket, reverse=True)
    for bucket in by_bytes:
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= bytes_per_pack
    # Buckets of a dtype are in order, and the next gradient would not have fitted.
    for dtype in ("float32", "int32"):
        own = [bucket for bucket in by_bytes if dtypes[bucket[0]] == dtype]
        for bucket, following in itertools.pairwise(own):
            assert bucket[-1] > following[0]
            filled = sum(sizes[i] for i in bucket)
            assert filled + sizes[following[0]] > bytes_per_pack
        own = [bucket for bucket in by_count if dtypes[bucket[0]] == dtype]
        assert len(own) <= num_packs


# What XLA makes of the buckets of a 6-layer MLP.

WIDTHS = (32, 64, 48, 80, 40, 24, 10)
KERNELS = [a * b for a, b in itertools.pairwise(WIDTHS)]
NUM_WEIGHTS = sum(KERNELS) + sum(WIDTHS[1:])


@pytest.fixture(params=["cpu", "v5e:2x4"])
def eight_devices(request, monkeypatch) -> Sequence[Any]:
    """Devices to compile for; nothing runs on them."""
    if request.param == "cpu":
        return jax.devices()[:8]
    if compiler.find_libtpu() is None:
        pytest.skip("libtpu, the compiler for TPUs, is not here")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # No chip is taken.
    return topologies.get_topology_desc(
        platform="tpu", topology_name=request.param
    ).devices


def program(
    devices: Sequence[Any], ops: rx.CrossDeviceOps, options: rx.CommunicationOptions
) -> str:
    axis = ReplicaAxis(
        name="replica",
        devices=tuple(f"{d.platform}:{i}" for i, d in enumerate(devices)),
        num_per_host=4,
    )
    mesh = Mesh(np.array(devices), ("replica",))

    def step(params: list[Any], x: Any) -> list[Any]:
        def loss(params: list[Any]) -> Any:
            h = x
            for kernel, bias in zip(params[::2], params[1::2], strict=True):
                h = jnp.tanh(h @ kernel + bias)
            return jnp.sum(h**2)

        grads = sum_gradients(jax.grad(loss)(params), ops, axis, options)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    def described(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, spec)
        )

    params = [
        described(shape, P())
        for a, b in itertools.pairwise(WIDTHS)
        for shape in ((a, b), (b,))
    ]
    spmd = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P(), check_vma=False
    )
    x = described((len(devices) * 4, WIDTHS[0]), P("replica"))
    return jax.jit(spmd).lower(params, x).compile().as_text() or ""


def test_without_buckets_xla_makes_one_all_reduce(eight_devices) -> None:
    text = program(eight_devices, rx.NcclAllReduce(), rx.CommunicationOptions())
    (elements,) = all_reduces(text)
    assert sum(elements) == NUM_WEIGHTS


def test_every_bucket_is_one_all_reduce_in_order(eight_devices) -> None:
    options = rx.CommunicationOptions(bytes_per_pack=16_000)
    w, k = WIDTHS, KERNELS
    assert all_reduces(program(eight_devices, rx.NcclAllReduce(), options)) == [
        [w[6] + k[5] + w[5] + k[4] + w[4]],  # 5,096 bytes; with the next, 17,896
        [k[3] + w[3]],  # 13,120 bytes
        [k[2] + w[2]],  # 15,552 bytes
        [k[1] + w[1]],  # 12,544 bytes
        [k[0]],  # 8,192 bytes
    ]


def test_compressed_buckets(eight_devices) -> None:
    options = rx.CommunicationOptions(bytes_per_pack=8_000, compression="bfloat16")
    text = program(eight_devices, rx.NcclAllReduce(), options)
    assert len(all_reduces(text)) == 5
    # XLA's CPU collectives have no bfloat16: there it saves nothing.
    sent = "f32" if eight_devices[0].platform == "cpu" else "bf16"
    assert set(re.findall(r"= (\w+)\[.* all-reduce\(", text)) == {sent}


def test_number_of_packs(eight_devices) -> None:
    text = program(eight_devices, rx.NcclAllReduce(3), rx.CommunicationOptions())
    assert len(all_reduces(text)) == 3
    # bytes_per_pack wins.
    options = rx.CommunicationOptions(bytes_per_pack=10**9)
    text = program(eight_devices, rx.NcclAllReduce(3), options)
    assert all_reduces(text) == [[NUM_WEIGHTS]]


def test_buckets_of_other_operations() -> None:
    options = rx.CommunicationOptions(bytes_per_pack=16_000)
    ops = rx.HierarchicalCopyAllReduce(group_size=4)
    text = program(jax.devices()[:8], ops, options)
    for kind in ("reduce-scatter", "all-reduce", "all-gather"):
        assert len(re.findall(rf" {kind}\(", text)) == 5


# Compression.


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_bfloat16_sums_stay_in_their_bound(data) -> None:
    num_replicas = data.draw(st.integers(2, 8), "num_replicas")
    seed = data.draw(st.integers(0, 2**31), "seed")
    scale = 10.0 ** data.draw(st.integers(-30, 30), "exponent")
    ops = data.draw(
        st.sampled_from(
            [
                rx.NcclAllReduce(),
                rx.HierarchicalCopyAllReduce(),
            ]
        )
    )
    rng = np.random.default_rng(seed)
    grads = (rng.normal(size=(num_replicas, 50)) * scale).astype("float32")
    options = rx.CommunicationOptions(compression="bfloat16", bytes_per_pack=1024)
    (got,), _ = summed(num_replicas, ops, options, [grads])
    assert got.dtype == "float32"
    exact = grads.astype("float64").sum(0)
    # One rounding by the cast and one for each addition, of half a unit in 8 bits.
    bound = ((1 + 2**-8) ** num_replicas - 1) * np.abs(grads.astype("float64")).sum(0)
    assert (np.abs(np.asarray(got)[0] - exact) <= bound).all()
    np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))


def test_only_wider_floats_are_compressed() -> None:
    seen = set()

    class Watched(rx.NcclAllReduce):
        def sum(self, value: Any, axis: Any) -> Any:
            seen.add((str(value.dtype), value.size))
            return super().sum(value, axis)

    grads = [jnp.ones((2, 3), d) for d in ("float32", "bfloat16", "float16", "int32")]
    options = rx.CommunicationOptions(compression="bfloat16")
    got, _ = summed(2, Watched(), options, grads)
    assert [str(g.dtype) for g in got] == ["float32", "bfloat16", "float16", "int32"]
    assert seen == {("bfloat16", 3), ("float16", 3), ("int32", 3)}
    seen.clear()
    # Compressed sizes count: two of 12 bytes make a bucket of 24.
    options = rx.CommunicationOptions(compression="bfloat16", bytes_per_pack=24)
    summed(2, Watched(), options, [np.ones((2, 6), "float32")] * 2)
    assert seen == {("bfloat16", 12)}


def test_infinity_and_nan_stay_where_they_are() -> None:
    grads = [np.full((2, 3), v, "float32") for v in (np.nan, 1.0, np.inf, 2.0)]
    options = rx.CommunicationOptions(bytes_per_pack=12)
    got, text = summed(2, rx.NcclAllReduce(), options, grads)
    assert len(all_reduces(text)) == 4
    for total, expected in zip(got, (np.nan, 2, np.inf, 4), strict=True):
        np.testing.assert_array_equal(total, np.full((2, 3), expected))


# The hook.


def with_hook(hook: Any) -> rx.CommunicationOptions:
    return rx.CommunicationOptions(gradient_hook=hook, bytes_per_pack=64)


GRADS = [np.ones((2, 3), "float32"), None, np.ones((2, 2), "float32")]


def test_the_hook_sees_this_replicas_gradients_before_the_sum() -> None:
    def clip(grads: list[Any]) -> list[Any]:
        assert [None if g is None else g.shape for g in grads] == [(3,), None, (2,)]
        return [None if g is None else jnp.minimum(g, 1.5) for g in grads]

    grads = [np.float32([[1, 1, 1], [4, 4, 4]]), None, np.float32([[9, 0], [0, 9]])]
    (a, b), _ = summed(2, rx.NcclAllReduce(), with_hook(clip), grads)
    np.testing.assert_array_equal(a, np.full((2, 3), 2.5))
    np.testing.assert_array_equal(b, np.full((2, 2), 1.5))


@pytest.mark.parametrize(
    ("hook", "error", "match"),
    [
        (lambda g: None, ValueError, r"returned None.* expected a list of 3"),
        (lambda g: g[:2], ValueError, "expected a list of 3 gradients"),
        (lambda g: [None, None, g[2]], ValueError, "None where the hook got None"),
        (lambda g: [g[0], g[0], g[2]], ValueError, "None where the hook got None"),
        (
            lambda g: [g[0], None, g[0]],
            ValueError,
            r"gradient 2: returned shape \(3,\) .* shape \(2,\)",
        ),
        (
            lambda g: [g[0].astype("bfloat16"), None, g[2]],
            ValueError,
            "gradient 0: .* dtype bfloat16 for .* dtype float32",
        ),
        (
            lambda g: [g[0], None, "none"],
            TypeError,
            "gradient 2: returned 'none' of type str",
        ),
    ],
)
def test_hooks_with_wrong_results_are_refused(hook, error, match) -> None:
    with pytest.raises(error, match=match):
        summed(2, rx.NcclAllReduce(), with_hook(hook), GRADS)


def test_a_hook_may_return_numpy_and_a_tuple() -> None:
    def zeros(grads: list[Any]) -> Any:
        return (np.zeros(3, "float32"), None, grads[2])

    (a, b), _ = summed(2, rx.NcclAllReduce(), with_hook(zeros), GRADS)
    assert not np.any(a)
    assert np.all(np.asarray(b) == 2)


# Operations of a user's own.


def test_reduce_of_a_subclass_gets_all_gradients_at_once() -> None:
    seen = []

    class Whole(rx.NcclAllReduce):
        def reduce(self, op: Any, tree: Any, axis: Any) -> Any:
            seen.append([x.shape for x in tree])
            return super().reduce(op, tree, axis)

    summed(2, Whole(), rx.CommunicationOptions(), GRADS)
    assert seen[0] == [(3,), (2,)]
    seen.clear()
    summed(2, Whole(), rx.CommunicationOptions(bytes_per_pack=64), GRADS)
    assert seen[0] == [(5,)]


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (lambda tree: tree[:1], ValueError, r"Odd.reduce: .*expected a list of 2"),
        (lambda tree: [x[:1] for x in tree], ValueError, r"Odd.reduce: .*shape \(1,\)"),
        (lambda tree: [1.0 for _ in tree], TypeError, "Odd.reduce: returned 1.0"),
    ],
)
def test_wrong_results_of_reduce_are_refused(returned, error, match) -> None:
    class Odd(rx.NcclAllReduce):
        def reduce(self, op: Any, tree: Any, axis: Any) -> Any:
            return returned(tree)

    with pytest.raises(error, match=match):
        summed(2, Odd(), rx.CommunicationOptions(), GRADS)


def test_no_gradients() -> None:
    for bytes_per_pack in (0, 64):
        options = rx.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        axis = ReplicaAxis(name="replica", devices=("cpu:0",), num_per_host=1)
        assert sum_gradients([], rx.NcclAllReduce(), axis, options) == []
        assert sum_gradients([None], rx.NcclAllReduce(), axis, options) == [None]


# Several replicas on a device, and blocks of sums.


def on_two_devices(fn: Any, *args: Any) -> Any:
    spmd = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x[None], fn(*(a[0] for a in args))),
        mesh=Mesh(np.array(jax.devices()[:2]), ("replica",)),
        in_specs=P("replica"),
        out_specs=P("replica"),
        check_vma=False,
    )
    return jax.jit(spmd)(*args)


def test_sums_on_a_device_come_between_hook_and_compression() -> None:
    seen = []

    def hook(grads: list[Any]) -> list[Any]:
        seen.append("hook")
        return [None if g is None else g + 1 for g in grads]

    def on_device(grads: list[Any]) -> list[Any]:
        assert [g.dtype for g in grads] == ["float32"]  # Without None.
        seen.append("device")
        return [10 * g for g in grads]

    options = rx.CommunicationOptions(gradient_hook=hook, compression="bfloat16")

    def fn(x: Any) -> Any:
        total = sum_gradients(
            [None, x], rx.NcclAllReduce(), TWO, options, on_device=on_device
        )
        return total[1]

    got = on_two_devices(fn, np.float32([[1], [2]]))
    assert got.tolist() == [[50], [50]]
    assert seen[:2] == ["hook", "device"]


@pytest.mark.parametrize("bytes_per_pack", [0, 64])
def test_blocks_of_some_sums(bytes_per_pack) -> None:
    options = rx.CommunicationOptions(
        bytes_per_pack=bytes_per_pack,
        compression="bfloat16",
        gradient_hook=lambda grads: [None if g is None else 2 * g for g in grads],
    )

    def fn(a: Any, b: Any, c: Any) -> Any:
        dims = [0, 0, None, 1]
        got = sum_gradients(
            [a, None, b, c], rx.NcclAllReduce(), TWO, options, dims=dims
        )
        assert got[1] is None
        assert [g.dtype for g in got if g is not None] == ["float32"] * 3
        return [g for g in got if g is not None]

    a = np.arange(8, dtype="float32").reshape(2, 4)
    b = np.ones((2, 3), "float32")
    c = np.arange(8, dtype="float32").reshape(2, 1, 4)
    blocks = on_two_devices(fn, a, b, c)
    np.testing.assert_array_equal(blocks[0], [[8, 12], [16, 20]])
    np.testing.assert_array_equal(blocks[1], np.full((2, 3), 4))
    np.testing.assert_array_equal(blocks[2], [[[8, 12]], [[16, 20]]])
