import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.input.split import (
    Remainder,
    leading_size,
    split_global_batch,
    split_replica_batches,
)

SIZES = st.integers(1, 40)
REPLICAS = st.integers(1, 9)


def rows(size, *shape):
    """An array whose rows all differ."""
    return np.arange(size * int(np.prod(shape)), dtype=np.float32).reshape(size, *shape)


@given(size=SIZES, num_replicas=REPLICAS)
def test_drop_keeps_the_largest_multiple_in_order(size, num_replicas):
    batch = {"x": rows(size, 2, 3), "y": np.arange(size)}
    if size < num_replicas:
        with pytest.raises(ValueError, match=f"{size} examples .* {num_replicas} rep"):
            split_global_batch(batch, num_replicas, "drop")
        return
    split = split_global_batch(batch, num_replicas, "drop")
    kept = size // num_replicas * num_replicas
    assert split.num_dropped == size - kept
    assert split.mask is None
    for name, array in batch.items():
        shape = (num_replicas, size // num_replicas, *array.shape[1:])
        assert split.batch[name].shape == shape
        np.testing.assert_array_equal(
            split.batch[name].reshape(kept, *array.shape[1:]), array[:kept]
        )
        assert np.shares_memory(split.batch[name], array)


@given(size=SIZES, num_replicas=REPLICAS)
def test_keep_gives_all_to_the_most_replicas_that_share_it(size, num_replicas):
    x = rows(size, 2)
    split = split_global_batch(x, num_replicas)
    active = split.num_active or num_replicas
    assert (split.num_active is None) == (size % num_replicas == 0)
    assert split.mask is None
    assert split.num_dropped == 0
    assert split.batch.shape == (num_replicas, size // active, 2)
    np.testing.assert_array_equal(split.batch[:active].reshape(size, 2), x)
    assert all(size % k for k in range(active + 1, num_replicas + 1))
    copies = {tuple(row) for row in split.batch[active:].reshape(-1, 2)}
    assert copies <= {tuple(row) for row in x}


@given(size=SIZES, num_replicas=REPLICAS)
def test_pad_adds_only_copies_and_masks_them(size, num_replicas):
    x = rows(size, 2)
    split = split_global_batch((x,), num_replicas, "pad")
    (padded,), mask = split.batch, split.mask
    assert mask is not None
    assert mask.dtype == bool
    assert mask.shape == padded.shape[:2]
    assert 0 <= mask.size - size < num_replicas
    assert split.num_dropped == 0
    np.testing.assert_array_equal(padded[mask], x)
    copies = {tuple(row) for row in padded[~mask]}
    assert copies <= {tuple(row) for row in x[-num_replicas:]}


@given(size=SIZES, num_replicas=REPLICAS)
def test_error_policy_accepts_exactly_the_multiples(size, num_replicas):
    x = rows(size)
    if size % num_replicas:
        with pytest.raises(ValueError, match=f"{size} examples"):
            split_global_batch(x, num_replicas, Remainder.ERROR)
    else:
        split = split_global_batch(x, num_replicas, "error")
        assert split.num_dropped == 0
        assert split.batch.shape == (num_replicas, size // num_replicas)


def test_pad_takes_the_last_rows():
    split = split_global_batch(np.arange(6), 4, "pad")
    assert split.batch.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    split = split_global_batch(np.arange(2), 5, "pad")
    assert split.batch.tolist() == [[0], [1], [0], [1], [0]]


def test_views_of_arrays_that_are_not_contiguous():
    for x in (np.asfortranarray(rows(8, 3)), rows(16, 3)[::2], rows(8, 6)[:, ::2]):
        split = split_global_batch(x, 4)
        assert np.shares_memory(split.batch, x)
        np.testing.assert_array_equal(split.batch[1], x[2:4])


def test_jax_arrays_and_none_in_a_batch():
    split = split_global_batch((jnp.arange(5), None), 2, "pad")
    assert split.batch[0].tolist() == [[0, 1, 2], [3, 4, 4]]
    assert split.batch[1] is None


def test_arrays_that_disagree_are_named():
    batch = ({"image": np.zeros((4, 2)), "id": np.zeros(5)}, np.zeros(4))
    with pytest.raises(ValueError, match=r"\[0\]\['id'\]: 5.*\[0\]\['image'\]: 4"):
        split_global_batch(batch, 2)


def test_scalars_and_strings_are_named():
    with pytest.raises(ValueError, match=r"leaf \['rate'\] is a scalar.*outside"):
        split_global_batch({"x": np.zeros(4), "rate": np.float32(0.1)}, 2)
    with pytest.raises(TypeError, match=r"leaf \[1\] is a str"):
        split_global_batch((np.zeros(4), "cat"), 2)


@pytest.mark.parametrize("batch", [(), {}, None])
def test_batches_without_arrays(batch):
    with pytest.raises(ValueError, match="holds no array"):
        leading_size(batch, "test")


@pytest.mark.parametrize("policy", list(Remainder))
def test_empty_batch(policy):
    with pytest.raises(ValueError, match="0 examples"):
        split_global_batch(np.zeros((0, 3)), 2, policy)


@given(size=st.integers(1, 6), num_replicas=REPLICAS, data=st.data())
def test_pad_keeps_all_rows_of_a_functions_batches(size, num_replicas, data):
    num_batches = data.draw(st.integers(1, num_replicas))
    last = data.draw(st.integers(1, size))
    total = size * (num_batches - 1) + last
    x = rows(total, 2)
    batches = [x[i : i + size] for i in range(0, total, size)]
    split = split_replica_batches(batches, num_replicas, "pad")
    assert split.mask is not None
    assert split.batch.shape[:2] == split.mask.shape
    assert len(split.batch) == num_replicas
    np.testing.assert_array_equal(split.batch[split.mask], x)


def test_each_replica_gets_a_batch_of_a_complete_step():
    batches = [{"x": rows(3, 2) + i} for i in range(4)]
    for policy in Remainder:
        split = split_replica_batches(batches, 4, policy)
        np.testing.assert_array_equal(split.batch["x"][2], batches[2]["x"])
        assert split.num_dropped == 0
        assert (split.mask is not None) == (policy == "pad")


@pytest.mark.parametrize("sizes", [[2, 3, 3], [3, 2, 3], [2, 2, 3]])
@pytest.mark.parametrize("policy", list(Remainder))
def test_only_the_last_batch_may_be_short(sizes, policy):
    with pytest.raises(ValueError, match="equal size"):
        split_replica_batches([np.zeros(size) for size in sizes], 3, policy)
