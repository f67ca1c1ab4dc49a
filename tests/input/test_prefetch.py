import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from typing import Any

import jax
import pytest

from replicax.input.prefetch import MappedAhead, prefetch

DEPTHS = [0, 1, 2, 10]


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.002)


def producers():
    names = ("replicax-prefetch", "replicax-ahead")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if producers():
        gc.collect()  # An abandoned iterator may be a part of a cycle.
    wait_until(lambda: not producers())


class Source:
    """An iterator that counts the calls of its methods."""

    def __init__(self, size=None, fail_at=None):
        self.size, self.fail_at = size, fail_at
        self.position, self.num_closed = 0, 0

    def __iter__(self):
        return self

    def __next__(self) -> Any:
        if self.position == self.size:
            raise StopIteration
        if self.position == self.fail_at:
            raise OSError("the disk is gone")
        self.position += 1
        return self.position - 1

    def close(self):
        self.num_closed += 1


class Cycle:
    """Refers to itself, so that only the garbage collector frees its iterator."""

    def __init__(self, iterator):
        self.itself, self.iterator = self, iterator


@pytest.mark.parametrize("size", [0, 50])
@pytest.mark.parametrize("depth", DEPTHS)
def test_yields_all_items_in_order_and_closes_the_source(depth, size):
    source = Source(size)
    iterator = prefetch(lambda: source, depth)
    assert list(iterator) == list(range(size))
    assert list(iterator) == []
    assert source.num_closed == 1
    wait_until(lambda: not producers())


@pytest.mark.parametrize("depth", [1, 2, 10])
def test_runs_at_most_depth_items_ahead(depth):
    source = Source()
    iterator = prefetch(lambda: source, depth)
    wait_until(lambda: source.position == depth)
    for num_read in range(1, 6):
        next(iterator)
        wait_until(lambda expected=num_read + depth: source.position == expected)
        time.sleep(0.02)
        assert source.position == num_read + depth


def test_depth_zero_uses_no_thread():
    thread = next(prefetch(lambda: iter(threading.current_thread, None), 0))
    assert thread is threading.current_thread()
    thread = next(prefetch(lambda: iter(threading.current_thread, None), 1))
    assert thread.name == "replicax-prefetch"


@pytest.mark.parametrize("depth", DEPTHS)
def test_error_arrives_at_its_position_with_its_traceback(depth):
    source = Source(fail_at=3)
    iterator = prefetch(lambda: source, depth)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(iterator)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].line == 'raise OSError("the disk is gone")'
    assert list(iterator) == []
    assert source.num_closed == 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_base_exceptions_arrive_too(depth, error):
    def source():
        yield 0
        raise error("now")

    iterator = prefetch(source, depth)
    assert next(iterator) == 0
    with pytest.raises(error, match="now"):
        next(iterator)


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_iteration_while_making_the_iterator_is_an_error(depth):
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(prefetch(lambda: next(iter(())), depth))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_read_before", [0, 1, 5])
def test_close_ends_the_stream_and_closes_the_source(depth, num_read_before):
    source = Source()
    iterator = prefetch(lambda: source, depth)
    for _ in range(num_read_before):
        next(iterator)
    iterator.close()
    assert list(iterator) == []
    # A generator that never ran has nothing to close.
    wait_until(lambda: source.num_closed or depth == num_read_before == 0)


def test_collection_in_the_producer_thread_does_not_deadlock():
    # Each item collects garbage, with the consumers in it.
    def source():
        while True:
            gc.collect()
            yield 0

    gc.freeze()  # Exclude the objects of other tests, to save time.
    for _ in range(30):
        owner = Cycle(prefetch(source, 2))
        next(owner.iterator)
        del owner
    # While a thread is collecting, `collect` returns at once and does nothing.
    wait_until(lambda: gc.collect() >= 0 and not producers())


def test_items_are_freed_when_the_consumer_drops_them():
    class Item:
        pass

    refs: list[weakref.ref[Item]] = []

    class Items(Source):
        def __next__(self):
            item = Item()
            refs.append(weakref.ref(item))
            return item

    iterator = prefetch(Items, 2)
    for _ in range(10):
        next(iterator)
    wait_until(lambda: len(refs) == 12)
    wait_until(lambda: sum(ref() is not None for ref in refs) == 2)
    iterator.close()
    wait_until(lambda: not any(ref() for ref in refs))


def test_close_from_another_thread_wakes_a_waiting_consumer():
    may_end, items = threading.Event(), []

    def source():
        yield 1
        may_end.wait(10)

    iterator = prefetch(source, 2)
    consumer = threading.Thread(target=lambda: items.extend(iterator))
    consumer.start()
    wait_until(lambda: items == [1])
    iterator.close()
    may_end.set()
    consumer.join(10)
    assert not consumer.is_alive()


@pytest.mark.parametrize("is_wide", [False, True])
def test_integers_have_the_width_that_they_have_in_the_consumers_thread(is_wide):
    def width(_=None):
        return jax.dtypes.canonicalize_dtype("int64").name

    with jax.enable_x64(is_wide):
        here = width()
        prefetched = prefetch(lambda: map(width, range(3)), 2)
        mapped = MappedAhead(width, range(3))
    assert here == ("int64" if is_wide else "int32")
    assert [*prefetched] == [*mapped] == [here] * 3


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_mapped_ahead_is_a_map(size):
    threads = set()

    def doubled(x):
        threads.add(threading.current_thread().name)
        return 2 * x

    mapped = MappedAhead(doubled, range(size))
    assert list(mapped) == [2 * x for x in range(size)]
    assert next(mapped, None) is None
    assert not mapped.has_next()
    assert all(name.startswith("replicax-ahead") for name in threads)


def test_mapped_ahead_reads_an_item_after_mapping_the_item_before():
    buffer, slow = [0], threading.Event()

    def refilled():
        for i in range(5):
            buffer[0] = i
            yield buffer

    def copied(items):
        slow.wait(0.02)  # A source that reads ahead would overwrite the buffer.
        return list(items)

    mapped = MappedAhead(copied, refilled())
    assert next(mapped) == [0]
    assert buffer == [1]
    assert mapped.has_next()
    assert list(mapped) == [[1], [2], [3], [4]]


def test_mapped_ahead_maps_while_the_consumer_works():
    began = threading.Event()

    def mapped_slowly(x):
        if x:
            began.set()
        return x

    mapped = MappedAhead(mapped_slowly, range(3))
    assert next(mapped) == 0
    assert began.wait(10)
    mapped.close()


@pytest.mark.parametrize("fail_at", [0, 2])
def test_mapped_ahead_raises_errors_of_the_function_and_the_source(fail_at):
    def failing(x):
        if x == fail_at:
            raise OSError("the device is gone")
        return x

    mapped = MappedAhead(failing, range(5))
    assert [next(mapped) for _ in range(fail_at)] == list(range(fail_at))
    with pytest.raises(OSError, match="the device is gone"):
        next(mapped)
    mapped.close()
    mapped = MappedAhead(str, Source(fail_at=2))
    assert next(mapped) == "0"
    with pytest.raises(OSError, match="the disk is gone"):
        next(mapped)
    mapped.close()
    assert next(mapped, None) is None


def test_results_of_mapped_ahead_are_freed_when_the_consumer_drops_them():
    class Result:
        pass

    refs: list[weakref.ref[Result]] = []

    def make(_):
        result = Result()
        refs.append(weakref.ref(result))
        return result

    mapped = MappedAhead(make, range(10))
    for _ in range(5):
        next(mapped)
    wait_until(lambda: len(refs) == 6)
    wait_until(lambda: sum(ref() is not None for ref in refs) == 1)
    mapped.close()
    wait_until(lambda: not any(ref() for ref in refs))


@pytest.mark.slow
def test_program_may_end_in_the_middle_of_an_iteration():
    code = """
        import itertools
        import numpy as np
        import jax
        from jax.sharding import Mesh
        from replicax.input import DistributedDataset
        mesh = Mesh(np.array(jax.devices()[:1]), ("replica",))
        x = np.zeros((64, 1024), np.float32)
        iterator = iter(DistributedDataset(itertools.repeat(x), mesh))
        for _ in range(20):
            next(iterator)
    """
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
