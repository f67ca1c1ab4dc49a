"""A worker's part of the input in custom loops on parameter servers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.ps.worker_input import ElasticInputShard, own_rows


@given(st.integers(1, 9), st.integers(0, 40))
def test_workers_take_turns_at_whole_batches(num_workers, num_batches):
    shards = [ElasticInputShard(i, num_workers, None) for i in range(num_workers)]
    taken = [list(shard.in_step(iter(range(num_batches)))) for shard in shards]
    assert sorted(i for each in taken for i in each) == list(range(num_batches))
    assert [shard.num_steps(num_batches) for shard in shards] == list(map(len, taken))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_parts_of_a_step_are_all_rows_once(num_parts, more):
    size = num_parts + more
    x = np.arange(2 * size).reshape(size, 2)
    shards = [ElasticInputShard(i, num_parts, num_parts) for i in range(num_parts)]
    parts = [next(shard.in_step(iter([{"x": x}])))["x"] for shard in shards]
    np.testing.assert_array_equal(np.concatenate(parts), x)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(shard.num_steps(7) == 7 for shard in shards)


def test_a_batch_with_fewer_rows_than_parts_is_refused():
    with pytest.raises(ValueError, match="2 examples cannot be divided between 3"):
        own_rows((np.zeros((2, 4)), np.zeros(2)), 0, 3)


@pytest.mark.parametrize("num_parts", [None, 3])
def test_own_data_is_taken_whole(num_parts):
    shard = ElasticInputShard(1, 3, num_parts)
    assert list(shard.in_step(iter([1, 2, 3]), same_data=False, name="x")) == [1, 2, 3]


def test_files_are_divided_between_all_workers():
    shard = ElasticInputShard(1, 3, 2)
    assert (shard.worker, shard.num_workers) == (1, 3)
    # But the datasets' own rows are all here: no further division.
    assert (shard.index, shard.count) == (0, 1)
    assert shard.num_pieces == 2
    assert ElasticInputShard(1, 3, None).num_pieces == 1
