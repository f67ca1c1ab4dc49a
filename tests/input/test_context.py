import dataclasses

import pytest

from replicax.input.context import InputContext


def test_defaults_are_one_pipeline_and_one_replica():
    context = InputContext()
    assert dataclasses.astuple(context) == (1, 0, 1)
    assert context.get_per_replica_batch_size(7) == 7


@pytest.mark.parametrize(("size", "expected"), [(8, 2), (4, 1), (64, 16)])
def test_per_replica_batch_size(size, expected):
    assert InputContext(1, 0, 4).get_per_replica_batch_size(size) == expected


@pytest.mark.parametrize(("size", "suggestion"), [(10, 12), (3, 4), (0, 4), (-1, 4)])
def test_batch_size_that_does_not_divide(size, suggestion):
    with pytest.raises(ValueError, match=f"={size}, .* 4 replicas. Use {suggestion},"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)
