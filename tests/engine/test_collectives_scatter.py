"""`CrossDeviceOps.scatter`: every replica gets its block of the sum."""

import re
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

import replicax as rx
from replicax.engine.collectives import ReplicaAxis


class Plain(rx.CrossDeviceOps):
    """A user's own, which has `sum` only."""

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
        return lax.psum(value, axis.name)


def scattered(
    num_replicas: int, ops: rx.CrossDeviceOps, x: Any, dim: int
) -> tuple[np.ndarray, str]:
    """The replicas' blocks of `x`'s sum `[R, ...]`, and the compiled program."""
    names = tuple(f"cpu:{i}" for i in range(num_replicas))
    axis = ReplicaAxis(name="replica", devices=names, num_per_host=num_replicas)
    step = jax.jit(
        jax.shard_map(
            lambda x: ops.scatter(x[0], axis, dim)[None],
            mesh=Mesh(np.array(jax.devices()[:num_replicas]), ("replica",)),
            in_specs=P("replica"),
            out_specs=P("replica"),
            check_vma=False,
        )
    )
    x = jnp.asarray(x)
    return np.asarray(step(x)), step.lower(x).compile().as_text() or ""


def kinds(text: str) -> set[str]:
    return set(
        re.findall(
            r" (all-reduce|reduce-scatter|all-gather|collective-permute)"
            r"(?:-start)?\(",
            text,
        )
    )


@settings(max_examples=30)
@given(data=st.data())
def test_blocks_are_those_of_the_sum(data) -> None:
    num_replicas = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]), "num_replicas")
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3), "shape")
    dim = data.draw(st.integers(0, len(shape) - 1), "dim")
    shape[dim] *= num_replicas
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32"]), "dtype")
    divisors = [k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
    group_size = data.draw(st.sampled_from(divisors), "group_size")
    ops = data.draw(
        st.sampled_from(
            [
                rx.NcclAllReduce(),
                rx.HierarchicalCopyAllReduce(group_size=group_size),
                Plain(),
            ]
        ),
        "ops",
    )
    # Small integers: exact in every dtype and order.
    x = np.random.default_rng(0).integers(-9, 9, (num_replicas, *shape))
    got, _ = scattered(num_replicas, ops, jnp.asarray(x, dtype), dim)
    assert got.dtype == dtype
    expected = np.split(x.sum(0), num_replicas, axis=dim)
    np.testing.assert_array_equal(got.astype("int32"), np.stack(expected))


def test_programs() -> None:
    x = np.ones((8, 16, 3), "float32")
    _, text = scattered(8, rx.NcclAllReduce(), x, 0)
    assert kinds(text) == {"reduce-scatter"}
    _, text = scattered(8, Plain(), x, 0)
    assert kinds(text) == {"all-reduce"}


@pytest.mark.parametrize(
    "ops",
    [
        rx.NcclAllReduce(),
        rx.HierarchicalCopyAllReduce(),
        Plain(),
    ],
)
def test_what_cannot_be_cut(ops) -> None:
    name = type(ops).__name__
    x = np.ones((4, 6), "float32")
    with pytest.raises(
        ValueError, match=rf"{name}.scatter: dimension 0 .* shape \(6,\) .* 4 .* to 8"
    ):
        scattered(4, ops, x, 0)
