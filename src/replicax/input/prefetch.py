"""Iterators that prefetch, and the iterator of an epoch, which saves its position."""

import atexit
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import jax

from replicax._util.arguments import require_count
from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.errors import ContextError

if TYPE_CHECKING:
    from replicax.input.distributed import DistributedInput
    from replicax.input.sharding import InputShard

__all__ = [
    "DistributedIterator",
    "MappedAhead",
    "Prefetched",
    "Producer",
    "close_iterator",
    "is_abandoned",
    "prefetch",
]

T = TypeVar("T")
S = TypeVar("S")


def _has_x64() -> bool:
    """Whether this thread has enabled JAX's 64-bit types; threads may differ."""
    return jax.dtypes.canonicalize_dtype("int64") == "int64"


class _End:
    """The last item of a stream, with the exception that ended it, or None."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Producer(threading.Thread, Generic[T]):
    """The producer thread of a prefetched stream; it does not keep the consumer alive.

    Both queues are `SimpleQueue`s, whose `put` is reentrant: the garbage collector can
    call `stop` at any point of any thread, where acquiring a lock could deadlock.

    Attributes:
        items: The produced items, in order, then one `_End`.
        slots: One token for each item that may still be produced (back-pressure).
        stopped: Whether the consumer has stopped.
    """

    def __init__(self, make_iterator: Callable[[], Iterable[T]], depth: int) -> None:
        super().__init__(name="replicax-prefetch", daemon=True)
        self.items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self.slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stopped = False
        self._make_iterator = make_iterator
        self._has_x64 = _has_x64()
        for _ in range(depth):
            self.slots.put(None)

    def stop(self) -> None:
        """Stop the thread after its current item, without blocking."""
        self.stopped = True
        self.slots.put(None)

    def run(self) -> None:
        """Produce until the source ends, fails, or `stop` is called."""
        end = _End()
        try:
            make_iterator = self._make_iterator
            # This thread object may outlive the stream: it must not keep the source.
            del self._make_iterator
            with jax.enable_x64(self._has_x64):
                self._produce(iter(make_iterator()))
        except StopIteration as error:
            # If `__next__` raised this error, the stream would end without an error.
            end.error = RuntimeError("prefetch: make_iterator() raised StopIteration")
            end.error.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            end.error = error
        if self.stopped:
            # The consumer will not read these items: free their device memory.
            with contextlib.suppress(queue.Empty):
                while True:
                    self.items.get_nowait()
        self.items.put(end)
        del end  # The error's traceback refers to this frame: break the cycle.

    def _produce(self, iterator: Iterator[T]) -> None:
        try:
            while True:
                self.slots.get()
                if self.stopped:
                    return
                try:
                    # A variable would keep the batch on the device while this thread
                    # waits for the next slot.
                    self.items.put(next(iterator))
                except StopIteration:
                    return
        finally:
            close_iterator(iterator)


class Prefetched(Iterator[T]):
    """An iterator over prefetched items, from `prefetch`.

    Attributes:
        producer: The producer thread.
    """

    def __init__(self, make_iterator: Callable[[], Iterable[T]], depth: int) -> None:
        self.producer = Producer(make_iterator, depth)
        weakref.finalize(self, self.producer.stop).atexit = False
        _join_producers_at_exit()
        self.producer.start()

    def __next__(self) -> T:
        """Return the next item; block until it is ready.

        Raises:
            StopIteration: At the end, after an error, and after `close`.
            BaseException: Whatever the source raised at this position.
        """
        producer = self.producer
        if producer.stopped:
            raise StopIteration
        # First the slot: an interrupt while this thread waits must not lose it.
        producer.slots.put(None)
        item = producer.items.get()
        if not isinstance(item, _End):
            return item
        producer.stopped = True
        # Another thread may wait for an item of the same iterator.
        producer.items.put(_End())
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            # The error's traceback refers to this frame: break the cycle.
            del item

    def close(self) -> None:
        """Stop the iteration; the thread ends after its current item."""
        self.producer.stop()


def prefetch(
    make_iterator: Callable[[], Iterable[T]], depth: int = 2
) -> Prefetched[T] | Generator[T]:
    """Iterate over `make_iterator()` with a thread that runs up to `depth` items ahead.

    The thread calls `make_iterator`, `next`, and `close()` of the source iterator if
    that method exists. The thread ends with the stream, or soon after the returned
    iterator is closed or garbage-collected. `next` raises an exception of the source
    after the items before it, with its traceback.

    Args:
        make_iterator: Makes the source. Must not refer to the returned iterator.
        depth: Number of items to prefetch; 0 uses no thread.

    Returns:
        An iterator with a `close()` method.

    Raises:
        ValueError: If `depth` is negative.

    Example:
        >>> items = prefetch(lambda: (n * n for n in range(4)))
        >>> list(items)
        [0, 1, 4, 9]
    """
    require_count(depth, "prefetch: depth", 0, otherwise=" (no thread)")
    return Prefetched(make_iterator, depth) if depth else _in_place(make_iterator)


def is_abandoned() -> bool:
    """Whether this thread is the producer for a consumer that has stopped."""
    thread = threading.current_thread()
    return isinstance(thread, Producer) and thread.stopped


def close_iterator(iterator: object) -> None:
    """Call `iterator.close()` if that method exists."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


@functools.cache
def _join_producers_at_exit() -> None:
    """Register, once, an exit handler that waits for the threads.

    A daemon thread that returns from JAX during the interpreter's shutdown aborts the
    process. Exit handlers run in reverse order, this one before those of JAX.
    """
    atexit.register(_join_producers)


def _join_producers() -> None:
    producers = [t for t in threading.enumerate() if isinstance(t, Producer)]
    for producer in producers:
        producer.stop()
    for producer in producers:
        # A source that hangs must not block the exit.
        producer.join(timeout=5.0)


def _in_place(make_iterator: Callable[[], Iterable[T]]) -> Generator[T]:
    iterator = iter(make_iterator())
    try:
        yield from iterator
    finally:
        close_iterator(iterator)


class MappedAhead(Iterator[T], Generic[S, T]):
    """`map(fn, items)`, in which a thread calls `fn` for one item ahead.

    The consumer's thread reads an item from the source only after `fn` has returned for
    the item before. So the source may reuse its buffers, and needs no thread safety.
    """

    def __init__(self, fn: Callable[[S], T], items: Iterable[S]) -> None:
        self._fn = fn
        self._items = iter(items)
        self._has_x64 = _has_x64()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicax-ahead")
        self._next: Future[T] | None = None
        self._has_begun = False

    def has_next(self) -> bool:
        """Whether another result is computed or in progress; False before `next`."""
        return self._next is not None

    def close(self) -> None:
        """End the thread after its current item."""
        self._next, self._items = None, iter(())
        self._thread.shutdown()

    def __next__(self) -> T:
        """Return the next result.

        Raises:
            BaseException: An error of `fn` for this item, or of reading the next item.
        """
        if not self._has_begun:
            self._has_begun = True
            self._submit_next()
        if self._next is None:
            raise StopIteration
        result = self._next.result()
        self._submit_next()
        return result

    def _submit_next(self) -> None:
        self._next = None
        for item in self._items:
            self._next = self._thread.submit(self._call, item)
            return
        self.close()

    def _call(self, item: S) -> T:
        with jax.enable_x64(self._has_x64):
            return self._fn(item)


class DistributedIterator(Iterator[PyTree]):
    """An iterator over one epoch of a distributed dataset, from `iter(dataset)`.

    `rx.Checkpoint(iterator=iterator)` saves its position. A restored iterator over the
    same data yields exactly the remaining batches, on any number of workers. Later
    iterations have the same orders as without the restart.
    """

    # The first `next` calls `start(iteration, num_batches)`, which starts an iteration
    # after its first `num_batches` batches. `iter` starts none: the iterator may be
    # restored to another iteration, and a loader may count its iterations.

    def __init__(
        self,
        dataset: "DistributedInput",
        start: Callable[[int, int], Iterator[PyTree]],
        shard: "InputShard",
        name: str,
    ) -> None:
        self._dataset = dataset
        self._start = start
        self._shard = shard
        self._record_read = shard.batch_recorder(name)
        self._iteration: int | None = None
        self._num_read = 0
        self._source: Iterator[PyTree] | None = None

    def __next__(self) -> PyTree:
        """Return the next batch; block until it is ready.

        Raises:
            ContextError: Inside a replica function, which would trace this batch as a
                constant.
        """
        # A late import: it imports Keras, which reading data does not need.
        from replicax.engine.scope import current_context

        if current_context() is not None:
            raise ContextError(
                "DistributedIterator: next(iterator) is called inside a replica "
                "function, whose Python code runs only when it is traced. Pass it the "
                "batch: strategy.run(fn, args=(next(iterator),))."
            )
        recorder = self._shard.recorder
        if recorder is None:
            return self._next()
        return recorder.read(self._dataset, self._next)

    def _next(self) -> PyTree:
        self._record_read()
        if self._source is None:
            self._iteration = self.get_state()["iteration"]
            self._dataset.iteration = self._iteration + 1
            self._source = self._start(self._iteration, self._num_read)
            with Announced("waiting for the first batch"):
                batch = next(self._source)
        else:
            batch = next(self._source)
        self._num_read += 1
        return batch

    def close(self) -> None:
        """Stop the iteration."""
        source, self._source = self._source, iter(())
        close_iterator(source)

    def get_state(self) -> dict[str, int]:
        """Return the position: the index of the iteration, and the batches read."""
        iteration = self._iteration
        if iteration is None:
            iteration = self._dataset.iteration
        return {"iteration": iteration, "num_batches": self._num_read}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to a position from `get_state`, in an epoch over the same data."""
        before = self.get_state()
        position = {**before, **state, "num_batches": state["num_batches"]}
        if min(position.values()) < 0:
            raise ValueError(
                f"set_state: got {dict(state)!r}, expected the result of get_state: "
                "'iteration' and 'num_batches', both >= 0."
            )
        if position != before:
            self.close()
            self._source = None
        self._iteration = position["iteration"]
        self._num_read = position["num_batches"]
        self._dataset.iteration = self._iteration + 1
