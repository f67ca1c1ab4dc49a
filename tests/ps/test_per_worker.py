"""Per-worker values: numbered alike, made when they are needed, forgotten in time."""

import functools
import gc

import pytest

import replicax as rx
from replicax.ps.payloads import PerWorkerSources, PerWorkerValues, dataset_maker


def test_a_value_is_made_once_when_it_is_needed():
    sources = PerWorkerSources()
    made = []
    value = PerWorkerValues(sources, lambda: made.append(1) or [1, 2], "dataset f")
    iterator = iter(value)
    assert made == []
    assert next(sources.own(iterator.per_worker_number)) == 1
    assert next(sources.own(iterator.per_worker_number)) == 2
    assert sources.own(value.per_worker_number) == [1, 2]
    assert made == [1]
    assert iter(iterator) is iterator
    assert repr(iterator) == "PerWorkerValues(iter of dataset f)"
    with pytest.raises(TypeError, match="call next in fn"):
        next(iterator)


def test_only_the_newest_and_those_in_use_are_kept():
    sources = PerWorkerSources()
    kept = PerWorkerValues(sources, lambda: [7], "dataset")
    for _ in range(40):
        iter(kept)
    gc.collect()
    assert sources.own(kept.per_worker_number) == [7]
    assert next(sources.own(40)) == 7
    with pytest.raises(rx.ClusterMismatchError, match="value 1; this task's scri"):
        sources.own(1)
    with pytest.raises(rx.ClusterMismatchError, match="value 41"):
        sources.own(41)


def test_datasets_and_functions_with_and_without_a_context():
    context = rx.InputContext(num_input_pipelines=3, input_pipeline_id=2)
    assert dataset_maker([1], lambda: context)() == [1]
    assert dataset_maker(lambda: [2], lambda: context)() == [2]
    assert dataset_maker(lambda x=5: [x], lambda: context)() == [5]
    assert dataset_maker(lambda c: [c.input_pipeline_id], lambda: context)() == [2]

    @functools.wraps(lambda c: None)
    def wrapper(*args):
        return [args[0].num_input_pipelines]

    assert dataset_maker(wrapper, lambda: context)() == [3]
    assert dataset_maker(lambda *args: [*args], lambda: context)() == []
