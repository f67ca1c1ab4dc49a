"""Prefetching iterators, and epoch iterators whose position can be saved."""

import atexit
import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, Generic, TypeVar

import jax

from replicax._util.types import PyTree
from replicax._util.waiting import Announced
from replicax.errors import ContextError

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
    """Whether JAX has integers of 64 bits in this thread: each thread has its own."""
    return jax.dtypes.canonicalize_dtype("int64") == "int64"


class _End:
    """The last item of a stream, with the exception that ended it, or None."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Producer(threading.Thread, Generic[T]):
    """The producer thread of a prefetched stream. It never keeps the consumer alive.

    Both queues are `SimpleQueue`s, whose `put` is reentrant: the garbage collector can
    call `stop` at any point of any thread, where taking a lock or a condition could
    deadlock.

    Attributes:
        items: The items produced, in order, then one `_End`.
        slots: One token for each item that may still be produced (back-pressure).
        stopped: Whether the consumer has stopped.
    """

    LOOK_SECONDS: ClassVar = 5.0
    """How often a thread that waits looks whether the consumer is still there."""

    def __init__(
        self, consumer: object, make_iterator: Callable[[], Iterable[T]], depth: int
    ) -> None:
        super().__init__(name="replicax-prefetch", daemon=True)
        self._consumer = weakref.ref(consumer)
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
            # This object may outlive the stream, and must not keep the source alive.
            del self._make_iterator
            with jax.enable_x64(self._has_x64):
                self._produce(iter(make_iterator()))
        except StopIteration as error:
            # Raised by `__next__` it would end the stream as if nothing had happened.
            end.error = RuntimeError("prefetch: make_iterator() raised StopIteration")
            end.error.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            end.error = error
        if self.stopped:
            # Items that nobody will take must not occupy the devices.
            with contextlib.suppress(queue.Empty):
                while True:
                    self.items.get_nowait()
        self.items.put(end)
        del end  # The error's traceback refers to this frame.

    def _may_produce(self) -> bool:
        """Wait for a slot; False if nobody will take the item."""
        while True:
            try:
                self.slots.get(timeout=self.LOOK_SECONDS)
            except queue.Empty:
                # An interrupt in a finalizer can end `stop` before it has begun.
                if self._consumer() is not None:
                    continue
                self.stopped = True
            return not self.stopped

    def _produce(self, iterator: Iterator[T]) -> None:
        try:
            while self._may_produce():
                try:
                    # No variable for the item: it would keep a batch alive on the
                    # device while this thread waits for the next slot.
                    self.items.put(next(iterator))
                except StopIteration:
                    return
        finally:
            close_iterator(iterator)


class Prefetched(Iterator[T]):
    """An iterator over prefetched items; `prefetch` makes it.

    Attributes:
        producer: The producer thread.
    """

    def __init__(self, make_iterator: Callable[[], Iterable[T]], depth: int) -> None:
        producer = self.producer = Producer(self, make_iterator, depth)
        # Not `zip`, which keeps its last item alive.
        self._taken = map(
            lambda item, _: item,
            itertools.starmap(producer.items.get, itertools.repeat(())),
            itertools.starmap(producer.slots.put, itertools.repeat((None,))),
        )
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
        # Item and slot in one call of C: an interrupt in between would lose the slot.
        item = next(self._taken)
        if not isinstance(item, _End):
            return item
        producer.stopped = True
        # Wakes another thread that waits for an item of the same iterator.
        producer.items.put(_End())
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            # The error's traceback refers to this frame, which must not refer back.
            del item

    def close(self) -> None:
        """Stop the iteration; the thread ends after its current item."""
        self.producer.stop()


def prefetch(
    make_iterator: Callable[[], Iterable[T]], depth: int = 2
) -> Prefetched[T] | Generator[T]:
    """Iterate over `make_iterator()` with a thread that runs up to `depth` items ahead.

    That thread calls `make_iterator`, each `next`, and the source iterator's `close()`,
    if it has one. It ends with the stream, or soon after the returned iterator is
    closed or garbage-collected. An exception of the source is raised in the consumer at
    its place in the stream, with its traceback.

    Args:
        make_iterator: Makes the source. Must not refer to the returned iterator.
        depth: Number of items that may exist before the consumer asks for them; 0 uses
            no thread.

    Returns:
        An iterator with a `close()` method.

    Raises:
        ValueError: If `depth` is negative.

    Example:
        >>> items = prefetch(lambda: (n * n for n in range(4)))
        >>> list(items)
        [0, 1, 4, 9]
    """
    if depth < 0:
        raise ValueError(
            f"prefetch: got depth={depth!r}, expected 0 (no thread) or more items."
        )
    return Prefetched(make_iterator, depth) if depth else _in_place(make_iterator)


def is_abandoned() -> bool:
    """Whether this thread produces items for a consumer that has stopped."""
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
    process. Registered late, so that the threads end before JAX cleans up.
    """
    atexit.register(_join_producers)


def _join_producers() -> None:
    producers = [t for t in threading.enumerate() if isinstance(t, Producer)]
    for producer in producers:
        producer.stop()
    for producer in producers:
        # A deadline: a source that hangs must not block the exit.
        producer.join(timeout=5.0)


def _in_place(make_iterator: Callable[[], Iterable[T]]) -> Generator[T]:
    iterator = iter(make_iterator())
    try:
        yield from iterator
    finally:
        close_iterator(iterator)


class MappedAhead(Iterator[T], Generic[S, T]):
    """`map(fn, items)`, one item ahead: a thread calls `fn` while others do their work.

    The thread that asks for results takes the items, an item only after `fn` has
    returned for the one before it. So the source may fill arrays again, and has no
    other threads than without.
    """

    def __init__(self, fn: Callable[[S], T], items: Iterable[S]) -> None:
        self._fn = fn
        self._items = iter(items)
        self._has_x64 = _has_x64()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicax-ahead")
        self._next: Future[T] | None = None
        self._is_begun = False

    def has_next(self) -> bool:
        """Whether the next item was taken."""
        return self._next is not None

    def close(self) -> None:
        """End the thread, after the item that it is at."""
        self._next, self._items = None, iter(())
        self._thread.shutdown()

    def __next__(self) -> T:
        """Return the next result.

        Raises:
            BaseException: What `fn` raised for this item, or the source after it.
        """
        if not self._is_begun:
            self._is_begun = True
            self._take()
        if self._next is None:
            raise StopIteration
        result = self._next.result()
        self._take()
        return result

    def _take(self) -> None:
        self._next = None
        for item in self._items:
            self._next = self._thread.submit(self._call, item)
            return
        self.close()

    def _call(self, item: S) -> T:
        with jax.enable_x64(self._has_x64):
            return self._fn(item)


class DistributedIterator(Iterator[PyTree]):
    """An iterator over one epoch of a distributed dataset; `iter(dataset)` makes it.

    `rx.Checkpoint(iterator=iterator)` saves its position. An iterator over the same
    data that is restored to it yields exactly the batches that this one had left, on
    any number of workers, and later iterations have the same orders.
    """

    # `start(iteration, num_batches)` starts an iteration after that many batches;
    # `taking` is called before each batch.

    def __init__(
        self,
        start: Callable[[int, int], Iterator[PyTree]],
        iteration: int,
        taking: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = start
        self._taking = taking
        self._go_to(iteration, 0)

    def _go_to(self, iteration: int, num_batches: int) -> None:
        self._iteration = iteration
        self._num_taken = num_batches
        self._source = self._start(iteration, num_batches)
        self._is_new = True

    def __next__(self) -> PyTree:
        """Return the next batch; block until it is ready.

        Raises:
            ContextError: Inside a replica function, which would keep that batch.
        """
        # A late import, of Keras, which reading data does not need.
        from replicax.engine.scope import current_context

        if current_context() is not None:
            raise ContextError(
                "DistributedIterator: next(iterator) is called inside a replica "
                "function, whose Python code runs only when it is traced. Pass it the "
                "batch: strategy.run(fn, args=(next(iterator),))."
            )
        self._taking()
        if self._is_new:
            with Announced("waiting for the first batch"):
                batch = next(self._source)
            self._is_new = False
        else:
            batch = next(self._source)
        self._num_taken += 1
        return batch

    def close(self) -> None:
        """Stop the iteration."""
        close_iterator(self._source)

    def get_state(self) -> dict[str, int]:
        """Return the position: the iteration's index, and the batches taken."""
        return {"iteration": self._iteration, "num_batches": self._num_taken}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to a position from `get_state`, in an epoch over the same data.

        Raises:
            ValueError: If `state` is no such position.
        """
        number = state.get("num_batches")
        iteration = state.get("iteration", self._iteration)
        if not all(isinstance(n, int) and n >= 0 for n in (number, iteration)):
            raise ValueError(
                "DistributedIterator.set_state: expected {'iteration': k, "
                f"'num_batches': n}} as get_state returns it; got {state!r}."
            )
        assert number is not None
        if (iteration, number) == (self._iteration, self._num_taken):
            return
        self.close()
        self._go_to(iteration, number)
