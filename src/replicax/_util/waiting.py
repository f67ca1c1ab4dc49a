"""Polls with a timeout and reminders, and announces work that takes long."""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["Announced", "announce_first", "back_off", "wait_for"]

FIRST_SECONDS = 3.0
EVERY_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_logger = logging.getLogger("replicax")
_of_thread = threading.local()
_Result = TypeVar("_Result")


class _Nested:
    """A block of this thread that may log; of nested blocks only the innermost does.

    The stack has weak references: an interrupt may prevent the call of `__exit__`.
    """

    def __init__(self) -> None:
        self._stack: list[weakref.ref[Any]] = []

    def __enter__(self) -> Any:
        self._stack = _of_thread.__dict__.setdefault("stack", [])
        self._stack.append(weakref.ref(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.remove(weakref.ref(self))

    @property
    def is_innermost(self) -> bool:
        alive = [x for x in self._stack if x() is not None]
        return alive[-1:] == [weakref.ref(self)]


def back_off(first: float, longest: float, factor: float = 1.25) -> Iterator[float]:
    """Yield pauses between polls, which grow by a factor up to the longest.

    With the default factor, the delay of a poll is at most a quarter of the total wait.
    """
    pause = first
    while True:
        yield pause
        pause = min(factor * pause, longest)


def wait_for(
    poll: Callable[[], _Result | None],
    timeout: float,
    *,
    late: Callable[[], _Result],
    reminder: Callable[[float], str] | None = None,
    is_early: bool = False,
    pauses: tuple[float, float] = (0.001, 0.05),
    sleep: Callable[[float], object] = time.sleep,
) -> _Result:
    """Poll until `poll` returns a result other than None, or until the timeout.

    At the timeout `late` raises an error that names the missing party, or returns a
    substitute for the result. Every 10 s `reminder` gets the seconds waited, and its
    text is logged; with `is_early` first after 3 s. `pauses` are the first and the
    longest pause between two polls (see `back_off`). `sleep` may return sooner, as
    `threading.Thread.join` does.
    """
    began, pause = time.monotonic(), back_off(*pauses)
    due = min(FIRST_SECONDS, EVERY_SECONDS) if is_early else EVERY_SECONDS
    with contextlib.nullcontext() if reminder is None else _Nested():
        while (result := poll()) is None:
            waited = time.monotonic() - began
            if waited >= timeout:
                return late()
            if reminder is not None and waited >= due:
                due = EVERY_SECONDS if due < EVERY_SECONDS else due + EVERY_SECONDS
                text = reminder(waited)
                waited = time.monotonic() - began
                _logger.warning(
                    "%s; at most %.0f s more", text, max(0.0, timeout - waited)
                )
            sleep(min(next(pause), max(0.0, timeout - waited)))
    return result


class Announced(_Nested):
    """Context manager that logs a message once if its block takes longer than 3 s.

    `what` is the work of the block, such as `"compiling run(step)"`. It starts a
    thread, so do not use it in every step.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.began = 0.0
        self._ended = threading.Event()

    def __enter__(self) -> "Announced":
        self.began = time.monotonic()
        super().__enter__()
        thread = threading.Thread(
            target=_log_if_long,
            args=(weakref.ref(self), self._ended),
            name="replicax-announced",
            daemon=True,
        )
        try:
            thread.start()
        except BaseException:  # `start` waits, so an interrupt is likely here.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        super().__exit__()


def _log_if_long(reference: "weakref.ref[Announced]", ended: threading.Event) -> None:
    seconds = FIRST_SECONDS
    while not ended.wait(seconds):
        announced = reference()
        if announced is None:
            return
        if announced.is_innermost:
            waited = time.monotonic() - announced.began
            _logger.warning("%s (%.0f s so far)", announced.what, waited)
            return
        del announced  # This thread must not keep it alive.
        seconds = _LOOK_SECONDS


def announce_first(items: Callable[[], Iterator[Any]], what: str) -> Iterator[Any]:
    """Iterate over `items()`, and announce the wait for its first item."""
    with Announced(what):
        source = items()
        first = [*itertools.islice(source, 1)]
    while first:
        yield first.pop()  # No variable keeps the item alive.
    yield from source
