"""A worker's input: its shard in custom loops, and the batches of an epoch of `fit`."""

import random

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.keras.adapters import adapter_of
from replicax.ps.worker_input import ElasticInputShard, EpochBatches


@given(st.integers(1, 9), st.integers(0, 40))
def test_workers_take_turns_at_whole_batches(num_workers, num_batches):
    shards = [ElasticInputShard(i, num_workers) for i in range(num_workers)]
    taken = [list(shard.in_step(iter(range(num_batches)))) for shard in shards]
    assert sorted(i for each in taken for i in each) == list(range(num_batches))
    assert [shard.num_steps(num_batches) for shard in shards] == list(map(len, taken))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_a_workers_own_data_is_not_sharded():
    shard = ElasticInputShard(1, 3)
    assert list(shard.in_step(iter([1, 2, 3]), same_data=False, name="x")) == [1, 2, 3]


def test_files_are_divided_between_all_workers():
    shard = ElasticInputShard(1, 3)
    assert (shard.worker, shard.num_workers) == (1, 3)
    # Each batch is whole: rows are not sharded any further.
    assert (shard.index, shard.count) == (0, 1)
    assert shard.num_pieces == 1


@pytest.mark.parametrize("worker", range(3))
def test_each_worker_evaluates_all_of_the_data(worker):
    shard = ElasticInputShard(worker, 3).of_evaluation
    assert list(shard.in_step(iter([1, 2, 3]))) == [1, 2, 3]
    assert (shard.worker, shard.num_workers, shard.num_pieces) == (0, 1, 1)


def test_closures_read_all_batches_and_files_are_divided_between_those_that_run_them():
    shards = [ElasticInputShard(worker, 3) for worker in range(3)]
    for shard in shards:
        assert shard.of_loop is shard
        shard.read_in_closures()
        assert list(shard.of_loop.in_step(iter([1, 2, 3]))) == [1, 2, 3]
        assert shard.of_loop.num_steps(3) == 3
    own = [(shard.of_loop.worker, shard.of_loop.num_workers) for shard in shards]
    assert own == [(0, 1), (0, 2), (1, 2)]  # The chief runs none.
    # `fit` still shards the data over all workers.
    assert list(shards[0].in_step(iter([1, 2, 3, 4]))) == [1, 4]


def test_a_single_worker_reads_all_data():
    shard = ElasticInputShard(0, 1)
    shard.read_in_closures()
    assert (shard.of_loop.worker, shard.of_loop.num_workers) == (0, 1)


class Numbers(keras.utils.PyDataset):
    """Eleven batches of two numbers."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return np.full((2, 1), index)


def numbers_by_epoch(read, *, steps_per_epoch=None):
    """The batches that a worker reads at some indices, epoch by epoch.

    As in `fit`, building the model has read the first batch before.
    """
    random.seed(4)
    adapter = adapter_of(Numbers(workers=2, max_queue_size=3), shuffle=True)
    adapter.on_epoch_begin()
    next(iter(adapter.get_jax_iterator()))
    adapter.on_epoch_end()
    batches = EpochBatches(adapter, steps_per_epoch)
    found = []
    for epoch in range(2):
        random.seed(epoch)
        batches.begin(None)
        found.append({i: int(batches.at(i)[0][0, 0]) for i in read})
        batches.finish()
        batches.end(steps_per_epoch or 11)
    adapter.on_epoch_end()
    return found


def test_threads_of_a_py_dataset_give_each_batch_once_an_epoch():
    for epoch in numbers_by_epoch(range(11)):
        assert sorted(epoch.values()) == list(range(11))


@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_an_index_means_the_same_batch_on_all_workers(steps_per_epoch):
    size = steps_per_epoch or 11
    every = numbers_by_epoch(range(size), steps_per_epoch=steps_per_epoch)
    # A worker reads only some batches, and other ones in each run.
    for read in ([0, 3], [1], [size - 1]):
        some = numbers_by_epoch(read, steps_per_epoch=steps_per_epoch)
        assert some == [{i: epoch[i] for i in read} for epoch in every]
    if steps_per_epoch:  # The second epoch continues in the data.
        both = [*every[0].values(), *every[1].values()]
        assert len(set(both)) == 10
