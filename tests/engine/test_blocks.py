"""Computations on blocks give what they give on whole arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from replicax.engine.blocks import Block, BlockedValues, cut, on_blocks, whole
from replicax.engine.collectives import ReplicaAxis

Dims = Sequence[int | None]


def axis_of(num: int) -> ReplicaAxis:
    return ReplicaAxis(
        name="replica",
        devices=tuple(f"cpu:{i}" for i in range(num)),
        num_per_host=num,
    )


WHOLE = P()


def on_devices(body: Callable[..., Any], num: int, in_specs: Any = WHOLE) -> Any:
    """`body` on `num` devices; results of all devices, `[num, ...]`."""
    return jax.jit(
        jax.shard_map(
            lambda *args: jax.tree.map(lambda x: jnp.asarray(x)[None], body(*args)),
            mesh=Mesh(np.array(jax.devices()[:num]), ("replica",)),
            in_specs=in_specs,
            out_specs=P("replica"),
            check_vma=False,
        )
    )


def blockwise(
    fn: Callable[..., Any], arrays: Sequence[Any], dims: Dims, num: int
) -> list[np.ndarray]:
    """What `on_blocks` makes of arrays that are cut along `dims`, checked for size."""
    axis = axis_of(num)
    expected = jax.eval_shape(fn, *arrays)

    def body(*args: Any) -> list[Any]:
        given = [
            x if dim is None else cut(x, dim, axis)
            for x, dim in zip(args, dims, strict=True)
        ]
        results = on_blocks(fn, given, axis)
        for result, wanted in zip(results, expected, strict=True):
            if isinstance(result, Block):
                assert result.data.shape[result.dim] * num == wanted.shape[result.dim]
            assert jnp.asarray(whole(result, axis)).dtype == wanted.dtype
        return [whole(x, axis) for x in results]

    found = [np.asarray(x) for x in on_devices(body, num)(*arrays)]
    for copies in found:
        np.testing.assert_array_equal(copies, np.broadcast_to(copies[:1], copies.shape))
    return [copies[0] for copies in found]


def assert_as_whole(
    fn: Callable[..., Any], arrays: Sequence[Any], dims: Dims, num: int
) -> None:
    found = blockwise(fn, arrays, dims, num)
    for actual, expected in zip(found, jax.jit(fn)(*arrays), strict=True):
        # Sums over parts are added in another order.
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def clipped(x: Any, y: Any) -> list[Any]:
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in (x, y)))
    return [g * 0.1 / jnp.maximum(norm, 0.1) for g in (x, y)]


def adam(w: Any, g: Any, m: Any, v: Any, step: Any) -> list[Any]:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * jnp.square(g)
    rate = 0.01 * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    return [w - rate * m / (jnp.sqrt(v) + 1e-7), m, v, step + 1]


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x)) + jnp.sum(x)


softened.defjvp(lambda primals, tangents: (softened(*primals), tangents[0]))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def scanned(x: Any, y: Any) -> list[Any]:
    def step(carry: Any, row: Any) -> Any:
        return carry + row, carry * row

    total, each = lax.scan(step, jnp.zeros(x.shape[1:]), x)
    return [total, each, y]


def chosen(x: Any, y: Any) -> list[Any]:
    def left(x: Any, y: Any) -> Any:
        return x / jnp.sum(x), y, jnp.mean(y)

    def right(x: Any, y: Any) -> Any:
        return jnp.cumsum(x, 0), 2 * y, jnp.max(y)

    return [*lax.cond(jnp.all(jnp.isfinite(x)), left, right, x, y)]


def of_both_kinds(x: Any, y: Any) -> list[Any]:
    """One branch returns what it was given in blocks, the other a whole array."""
    zeros = jnp.zeros_like(x)
    return [
        *lax.cond(
            jnp.sum(y) > 1e6, lambda x, z: (x, z), lambda x, z: (z, x + 1), x, zeros
        )
    ]


FUNCTIONS: dict[str, Callable[..., list[Any]]] = {
    "elementwise": lambda x, y: [jnp.tanh(x) * y + 3 / (1 + x * x), -y, x > y],
    "where": lambda x, y: [jnp.where(x > 0, x, y), jnp.clip(x, -0.5, jnp.mean(y))],
    "dtypes": lambda x, y: [x.astype(jnp.bfloat16), (x * 9).astype(int) // 2],
    "scalars": lambda x, y: [jnp.float32(2) * x, x + jnp.int32(1), jnp.float32(4)],
    "unchanged": lambda x, y: [y, x, x],
    "norms": lambda x, y: [x / jnp.linalg.norm(x), jnp.sqrt(jnp.sum(y * y, axis=0))],
    "clip by global norm": clipped,
    "reductions": lambda x, y: [
        jnp.max(x), jnp.min(y, axis=0), jnp.sum(x, axis=1), jnp.mean(x, keepdims=True),
        jnp.var(y, axis=1), jnp.prod(x), jnp.argmax(x), jnp.sum(x, axis=(0, 1)),
    ],
    "booleans": lambda x, y: [
        jnp.all(x > -9), jnp.any(y > 2, axis=0), jnp.all(x > 0, axis=1),
        jnp.max(x > 1), jnp.sum(x > 0),
    ],
    "bits": lambda x, y: [
        lax.reduce_and((x * 64).astype(int) | 2, (0,)),
        lax.reduce_or((x * 2).astype(int), (1,)),
        lax.reduce_xor((x * 8).astype(int), (0,)),
    ],
    "broadcasts": lambda x, y: [
        x - jnp.mean(x, axis=0), y - jnp.mean(y, axis=1, keepdims=True),
        x[None] * jnp.ones((3, 1, 1)), jnp.sum(x, 0)[:, None] * jnp.ones((1, 2)),
    ],
    "outer product": lambda x, y: [jnp.sum(x, 1)[:, None] * jnp.sum(y, 0)[None] * x],
    "transposes": lambda x, y: [x.T, (x.T * y.T).T, jnp.moveaxis(x[None], 0, 2)],
    "reshapes": lambda x, y: [x.reshape(-1), x.ravel().reshape(y.shape[::-1]) + y.T],
    "slices": lambda x, y: [x[1:], jnp.concatenate([x, y], 1), jnp.flip(y), x[0]],
    "matmul": lambda x, y: [x @ y.T, x * jnp.trace(x.T @ y)],
    "sorts": lambda x, y: [jnp.sort(x, axis=0), jnp.cumsum(y, axis=1)],
    "scan": scanned,
    "while": lambda x, y: [
        lax.while_loop(lambda c: jnp.sum(c) > 0.1, lambda c: c / 2, jnp.abs(x)), y
    ],
    "cond": chosen,
    "cond of both kinds": of_both_kinds,
    "switch": lambda x, y: [
        lax.switch(jnp.argmax(y[0]) % 3, [jnp.sin, jnp.cos, lambda x: x], x)
    ],
    "nested jit": lambda x, y: [jax.jit(lambda a: jnp.sum(a) * jax.jit(jnp.sin)(a))(x)],
    "custom derivatives": lambda x, y: [softened(x), doubled(y), jax.nn.relu(x)],
    "remat": lambda x, y: [jax.checkpoint(lambda a, b: jnp.sum(a * b) * a)(x, y)],
    "random": lambda x, y: [
        x + jax.random.normal(jax.random.key(3), x.shape),
        jax.random.split(jax.random.PRNGKey(1))[0],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "dims",
    [
        (1, 0),
        pytest.param((0, 0), marks=pytest.mark.slow),
        pytest.param((None, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_as_whole(name: str, dims: Dims) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(8, 12)).astype("float32") for _ in range(2)]
    assert_as_whole(FUNCTIONS[name], arrays, dims, 4)


@pytest.mark.parametrize("num", [2, 8])
def test_numbers_of_devices(num: int) -> None:
    x = np.random.default_rng(1).normal(size=(8, 16)).astype("float32")
    for name in ("clip by global norm", "broadcasts", "cond"):
        assert_as_whole(FUNCTIONS[name], [x, x + 1], (0, 1), num)


@st.composite
def cases(draw: Any) -> tuple[int, list[tuple[int, ...]], list[int | None], Any]:
    """Devices, two equal shapes, where each is cut, and a reduction's dimensions."""
    num = draw(st.sampled_from([2, 4, 8]))
    rank = draw(st.integers(1, 3))
    can = draw(st.integers(0, rank - 1))
    shape = tuple(
        num * draw(st.integers(1, 2)) if d == can else draw(st.integers(1, 4))
        for d in range(rank)
    )
    divides = [d for d in range(rank) if shape[d] % num == 0]
    dims = [draw(st.sampled_from([None, *divides])) for _ in range(2)]
    axes = draw(st.sets(st.integers(0, rank - 1)))
    return (
        num,
        [shape, shape],
        dims,
        (tuple(axes), tuple(draw(st.permutations(range(rank))))),
    )


def check_shape(case: Any) -> None:
    num, shapes, dims, (axes, order) = case

    def fn(x: Any, y: Any) -> list[Any]:
        total = jnp.sum(x * y, axis=axes, keepdims=True)
        return [
            x - total,
            jnp.max(y, axis=axes),
            jnp.transpose(x, order) + 1,
            jnp.transpose(x * jnp.sum(y), order),
            y,
        ]

    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    assert_as_whole(fn, arrays, dims, num)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape(case: Any) -> None:
    check_shape(case)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_more_shapes(case: Any) -> None:
    check_shape(case)


def test_not_a_number_is_noticed_by_all() -> None:
    x = np.ones((8, 4), "float32")
    x[5, 1] = np.nan

    def fn(x: Any) -> list[Any]:
        finite = jnp.all(jnp.isfinite(x))
        return [jnp.max(x), jnp.sum(x), lax.cond(finite, lambda: 1.0, lambda: 2.0)]

    largest, total, choice = blockwise(fn, [x], [0], 4)
    assert np.isnan(largest)
    assert np.isnan(total)
    assert choice == 2


def compiled(fn: Callable[..., Any], shapes: Sequence[Any], dims: Dims) -> str:
    """The program in which 4 devices have blocks, and keep blocks."""
    axis = axis_of(4)
    specs = tuple(P() if dim is None else P(*([None] * dim), "replica") for dim in dims)

    def body(*parts: Any) -> list[Any]:
        given = [
            x if dim is None else Block(x, dim)
            for x, dim in zip(parts, dims, strict=True)
        ]
        results = on_blocks(fn, given, axis)
        return [x.data if isinstance(x, Block) else x for x in results]

    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return on_devices(body, 4, specs).lower(*arrays).compile().as_text() or ""


@pytest.mark.parametrize("dim", [0, 1])
def test_elementwise_updates_need_no_communication(dim: int) -> None:
    shapes = [(16, 64)] * 4 + [()]
    text = compiled(adam, shapes, [dim] * 4 + [None])
    assert "all-gather" not in text
    assert "all-reduce" not in text
    assert "f32[16,64]" not in text  # Nothing is whole.


def test_norms_need_scalars_only() -> None:
    text = compiled(clipped, [(16, 64)] * 2, [0, 1])
    assert "all-gather" not in text
    assert "all-reduce" in text
    assert "f32[16,64]" not in text


def test_whole_of_a_known_block_is_not_cut_again() -> None:
    axis = axis_of(2)

    def body(part: Any) -> Any:
        known = BlockedValues(axis)
        array = known.whole(Block(part, 0))
        assert array.shape == (8, 2)
        found = known.block_of(array)
        assert found is not None
        assert found.data is part
        assert known.block_of(array + 1) is None
        return cut(array, 1, axis).data

    x = np.arange(16.0, dtype="float32").reshape(8, 2)
    columns = on_devices(body, 2, P("replica"))(x)
    np.testing.assert_array_equal(columns, [x[:, :1], x[:, 1:]])


def test_a_block_is_cut_along_another_dimension() -> None:
    axis = axis_of(2)
    x = np.arange(16.0, dtype="float32").reshape(4, 4)

    def body(x: Any) -> Any:
        rows = cut(x, 0, axis)
        assert cut(rows, 0, axis) is rows
        return cut(rows, 1, axis).data

    np.testing.assert_array_equal(on_devices(body, 2)(x), [x[:, :2], x[:, 2:]])
