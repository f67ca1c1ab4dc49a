"""Checksums of leaves, which tell batches apart."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

from replicax.input.lockstep import differences, leaf_checksums

BATCH = {"x": np.arange(6, dtype="float32").reshape(3, 2), "y": np.arange(3)}


def difference_of(one, other):
    # Workers exchange JSON.
    checksums = json.loads(json.dumps([leaf_checksums(one), leaf_checksums(other)]))
    return differences(*checksums, "worker:0", "worker:1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BATCH, {**BATCH, "x": BATCH["x"].astype("float64")}),
        (BATCH, {**BATCH, "y": BATCH["y"].astype("int32")}),
        (BATCH, {**BATCH, "x": jnp.asarray(BATCH["x"])}),
        (BATCH, {**BATCH, "x": np.asfortranarray(BATCH["x"])}),
        (np.float32([np.nan, 0.0]), np.float32([-np.nan, -0.0])),
        (np.array(["a", 1], object), np.array(["b", 2], object)),
        (scipy.sparse.csr_matrix(np.eye(3)), scipy.sparse.csr_matrix(np.eye(3))),
        (sparse.BCOO.fromdense(np.eye(3)), sparse.BCOO.fromdense(np.eye(3))),
        (jax.random.key(3), jax.random.key(3)),
        (jnp.ones(3, "bfloat16"), jnp.ones(3, "bfloat16")),
    ],
)
def test_equal_batches(one, other):
    assert difference_of(one, other) == ""


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ((BATCH["x"], BATCH["y"]), (BATCH["x"] + 1, BATCH["y"]), "leaf [0], which is"),
        (BATCH, {**BATCH, "y": BATCH["y"][::-1]}, "leaf ['y'], which is int32[3]"),
        (BATCH["x"], BATCH["x"].T, "float32[3, 2] on worker:0 and float32[2, 3] on"),
        (np.ones(3), np.ones(3, int), "the batch, which is float32[3] on worker:0"),
        (BATCH, {"x": BATCH["x"]}, "['y'], which is int32[3] on worker:0 and missing"),
        ({"x": BATCH["x"]}, BATCH, "['y'], which is missing on worker:0 and int32[3]"),
        (scipy.sparse.eye(3, k=0), scipy.sparse.eye(3, k=1), "the batch, which is"),
        (
            sparse.BCOO.fromdense(np.eye(3)),
            sparse.BCOO.fromdense(2 * np.eye(3)),
            "the batch, which is sparse float32[3, 3]",
        ),
        (jax.random.key(3), jax.random.key(4), "the batch, which is uint32[2]"),
        (np.float32([np.nan]), np.float32([0]), "the batch, which is float32[1]"),
    ],
)
def test_batches_that_differ(one, other, name):
    assert name in difference_of(one, other)
