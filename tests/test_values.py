"""`PerReplica`: conversions, pytree, and what it shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx


def test_numpy_conversion() -> None:
    value = mirrored(2).run(lambda x: x * 2, (rx.PerReplica(np.float32([[1], [2]])),))
    array = np.asarray(value)
    assert array.dtype == "float32"
    np.testing.assert_array_equal(array, [[2.0], [4.0]])
    assert np.array(value, dtype="int64").dtype == "int64"
    assert np.mean(value) == 3.0


def test_values_of_host_and_replicated_arrays() -> None:
    assert rx.PerReplica(np.array([1.0, 2.0])).values == (1.0, 2.0)
    assert [float(v) for v in rx.PerReplica(jnp.array([1.0, 2.0])).values] == [1.0, 2.0]
    whole = jax.device_put(np.array([1, 2]), mirrored(2).group.mirrored)
    assert [int(v) for v in rx.PerReplica(whole).values] == [1, 2]


def test_values_keep_the_order_of_the_replicas() -> None:
    strategy = rx.MirroredStrategy(["cpu:3", "cpu:1", "cpu:2"])
    out = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(v) for v in out.values] == [0, 1, 2]
    assert [v.devices() for v in out.values] == [{jax.devices()[i]} for i in (3, 1, 2)]


def test_only_one_value_becomes_a_number() -> None:
    one = rx.PerReplica(np.float32([2.5]))
    assert (float(one), int(one)) == (2.5, 2)
    for convert in (float, int):
        with pytest.raises(
            TypeError, match=rf"{convert.__name__}\(PerReplica\): there are 2 values"
        ):
            convert(rx.PerReplica(np.ones(2)))


def test_repr() -> None:
    small = rx.PerReplica(np.int32([[1], [2]]))
    assert repr(small) == (
        "PerReplica(num_replicas=2, shape=(1,), dtype=int32, values=[[1], [2]])"
    )
    large = rx.PerReplica(jnp.zeros((2, 3, 4), "bfloat16"))
    assert repr(large) == "PerReplica(num_replicas=2, shape=(3, 4), dtype=bfloat16)"
    seen = []
    jax.jit(lambda x: seen.append(repr(rx.PerReplica(x))))(jnp.ones(2))
    assert seen == ["PerReplica(num_replicas=2, shape=(), dtype=float32)"]


def test_pytree() -> None:
    value = {"a": [rx.PerReplica(np.arange(2))], "b": None}
    assert [leaf.tolist() for leaf in jax.tree.leaves(value)] == [[0, 1]]
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled["a"][0], rx.PerReplica)
    assert doubled["a"][0].values == (0, 2)
    jitted = jax.jit(lambda v: v)(value)
    assert isinstance(jitted["a"][0], rx.PerReplica)
    jax.block_until_ready(jitted)
