"""Where an iterator of a distributed dataset is, and going there again."""

import numpy as np
import pytest

import replicax as rx


@pytest.mark.parametrize("num_taken", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_rest_of_an_epoch(num_taken: int, prefetch: int) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    data = strategy.experimental_distribute_dataset(
        np.arange(28), batch_size=4, prefetch=prefetch
    )
    iterator = iter(data)
    for _ in range(num_taken):
        next(iterator)
    state = iterator.get_state()
    rest = [np.asarray(batch).tolist() for batch in iterator]
    other = iter(data)
    other.set_state(state)
    assert [np.asarray(batch).tolist() for batch in other] == rest
    assert len(rest) == 7 - num_taken
    assert other.get_state() == {"num_batches": 7}


def test_a_state_of_something_else_is_refused() -> None:
    data = rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(
        np.arange(4), batch_size=2
    )
    iterator = iter(data)
    with pytest.raises(ValueError, match=r"num_batches.*got \{'next_index': 3\}"):
        iterator.set_state({"next_index": 3})
    iterator.close()
