"""Checksums of the replicas' copies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.conftest import mirrored

from replicax.engine.checks.consistency import checksums_of_replicas


def prints(*arrays: np.ndarray, num_replicas: int = 2) -> np.ndarray:
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
def test_equal_copies_have_equal_prints(dtype) -> None:
    found = prints(
        np.asarray(jnp.array([[0, 1, 1]], dtype=dtype)), np.ones(()), num_replicas=3
    )
    assert found.shape == (3, 2)
    assert found.dtype == "uint32"
    assert (found == found[0]).all()


def test_arrays_without_elements() -> None:
    found = prints(np.zeros((0, 3), "float32"), np.ones(2, "float32"))
    assert (found == found[0]).all()
    assert found[0, 0] == 0 != found[0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_shows(dtype) -> None:
    arrays = [
        np.asarray(jnp.array(values, dtype=dtype))
        for values in itertools.product([0, 1], repeat=4)
    ]
    assert len(set(prints(*arrays)[0].tolist())) == len(arrays)


def test_every_bit_and_every_order_shows() -> None:
    base = np.random.default_rng(0).normal(size=8).astype("float32")
    changed = []
    for bit in range(base.nbytes * 8):
        copy = base.copy()
        copy.view("uint8")[bit // 8] ^= 1 << bit % 8
        changed.append(copy)
    swapped = base[[1, 0, *range(2, 8)]]
    found = prints(base, swapped, *changed)[0].tolist()
    assert len(set(found)) == 2 + 256


def test_signed_zeros_and_nans() -> None:
    zero, negative, nan = (np.float32([x]) for x in (0.0, -0.0, np.nan))
    found = prints(zero, negative, nan, nan.copy())[0]
    assert len(set(found.tolist())) == 3
    assert found[2] == found[3]


def test_nothing_to_compare() -> None:
    assert prints().shape == (2, 0)
    assert (prints(np.zeros((0, 3)))[0] == prints(np.zeros((0, 3)))[1]).all()
