"""Checksums of the replicas' copies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import mirrored

from replicax.engine.checks.consistency import checksums_of_replicas


def checksums(*arrays: np.ndarray, num_replicas: int = 2) -> np.ndarray:
    group = mirrored(num_replicas).group
    placed = [jax.device_put(a, group.mirrored) for a in arrays]
    return checksums_of_replicas(placed, group.mesh, group.axis.name)


DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "int8",
    "uint32",
    "bool",
    "complex64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_copies_have_equal_checksums(dtype) -> None:
    sums = checksums(
        np.asarray(jnp.array([[0, 1, 1]], dtype=dtype)), np.ones(()), num_replicas=3
    )
    assert sums.shape == (3, 2)
    assert sums.dtype == "uint32"
    assert (sums == sums[0]).all()


def test_arrays_without_elements() -> None:
    sums = checksums(np.zeros((0, 3), "float32"), np.ones(2, "float32"))
    assert (sums == sums[0]).all()
    assert sums[0, 0] == 0 != sums[0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_shows(dtype) -> None:
    arrays = [
        np.asarray(jnp.array(values, dtype=dtype))
        for values in itertools.product([0, 1], repeat=4)
    ]
    assert len(set(checksums(*arrays)[0].tolist())) == len(arrays)


def test_every_bit_and_every_order_shows() -> None:
    base = np.random.default_rng(0).normal(size=8).astype("float32")
    changed = []
    for bit in range(base.nbytes * 8):
        copy = base.copy()
        copy.view("uint8")[bit // 8] ^= 1 << bit % 8
        changed.append(copy)
    swapped = base[[1, 0, *range(2, 8)]]
    sums = checksums(base, swapped, *changed)[0].tolist()
    assert len(set(sums)) == 2 + 256


def test_signed_zeros_and_nans() -> None:
    zero, negative, nan = (np.float32([x]) for x in (0.0, -0.0, np.nan))
    sums = checksums(zero, negative, nan, nan.copy())[0]
    assert len(set(sums.tolist())) == 3
    assert sums[2] == sums[3]


def test_nothing_to_compare() -> None:
    assert checksums().shape == (2, 0)
    assert (checksums(np.zeros((0, 3)))[0] == checksums(np.zeros((0, 3)))[1]).all()
