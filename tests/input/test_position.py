"""The position of an iterator, saved and restored."""

from typing import Any

import grain
import numpy as np
import pytest

import replicax as rx


@pytest.mark.parametrize("num_taken", [0, 1, 3, 6, 7])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_remaining_batches_of_an_epoch(num_taken: int, prefetch: int) -> None:
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
    assert other.get_state() == {"iteration": 0, "num_batches": 7}


def rows(batches) -> list[int]:
    return [int(x) for batch in batches for x in np.asarray(batch).ravel()]


def shuffled(seed: int = 5) -> Any:
    return grain.MapDataset.range(12).shuffle(seed=seed)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_each_iteration_has_its_order(prefetch: int, devices: int) -> None:
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(devices)])

    def made() -> Any:
        return strategy.experimental_distribute_dataset(
            shuffled().batch(4), prefetch=prefetch
        )

    data = made()
    orders = [rows(data) for _ in range(3)]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert orders == [list(x) for x in np.reshape(list(shuffled().repeat(3)), (3, 12))]
    # A restored iterator over a new dataset, as in another process.
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    rest, later = rows(iterator), rows(data)
    data = made()
    restored = iter(data)
    restored.set_state(state)
    assert rows(restored) == rest
    assert rows(data) == later
    assert state == {"iteration": 3, "num_batches": 1}


def test_one_order_and_datasets_that_a_function_makes() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    fixed = shuffled().batch(4).repeat(1, reseed_each_epoch=False)
    data = strategy.experimental_distribute_dataset(fixed)
    assert rows(data) == rows(data) == list(shuffled())
    data = strategy.distribute_datasets_from_function(lambda _: shuffled().batch(2))
    assert rows(data) == list(shuffled())
    assert rows(data) == list(shuffled().repeat()[12:24])


def test_an_invalid_state_is_refused() -> None:
    data = rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(
        np.arange(4), batch_size=2
    )
    iterator = iter(data)
    with pytest.raises(KeyError, match="num_batches"):
        iterator.set_state({"next_index": 3})
    iterator.close()


class CountsEpochs:
    """A loader whose order depends on how often it was iterated."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(12)
        yield from order.reshape(6, 2)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_taken", [0, 2])
def test_a_loader_with_a_state_of_its_own(prefetch, num_taken, tmp_path) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def distributed(loader: CountsEpochs) -> Any:
        return strategy.experimental_distribute_dataset(loader, prefetch=prefetch)

    loader = CountsEpochs()
    data = distributed(loader)
    rows(data)
    iterator, epoch = iter(data), loader.epoch
    for _ in range(num_taken):
        next(iterator)
    path = rx.Checkpoint(iterator=iterator).save(tmp_path / "saved")
    rest, later = rows(iterator), rows(data)
    # The user's own code restores the loader, as of the beginning of the epoch.
    data = distributed(CountsEpochs(epoch))
    restored = iter(data)
    rx.Checkpoint(iterator=restored).restore(path)
    assert rows(restored) == rest
    assert rows(data) == later


def test_an_iterator_starts_at_its_first_batch() -> None:
    loader = CountsEpochs()
    data = rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(loader)
    first, second = iter(data), iter(data)
    assert first.get_state() == second.get_state()
    first.close()
    assert rows(first) == []
    assert loader.epoch == 0
    assert sorted(rows(second)) == list(range(12))
    assert loader.epoch == 1
    assert second.get_state() == {"iteration": 0, "num_batches": 6}


def test_a_generator_is_restored_before_it_is_read() -> None:
    strategy = rx.OneDeviceStrategy("cpu:0")

    def made() -> Any:
        return iter(
            strategy.experimental_distribute_dataset(np.full(2, i) for i in range(5))
        )

    iterator = made()
    next(iterator)
    state, rest = iterator.get_state(), rows(iterator)
    restored = made()
    restored.set_state(state)
    assert rows(restored) == rest
