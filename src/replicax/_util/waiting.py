"""Waits with a timeout and reminders, and announcements of work that takes long."""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["Announced", "announce_first", "wait_for"]

FIRST_SECONDS = 3.0
EVERY_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_logger = logging.getLogger("replicax")
_of_thread = threading.local()
_Result = TypeVar("_Result")


class _Nested:
    """What this thread waits for or works on; only the innermost speaks.

    Others know it weakly: an interrupt may come before `__exit__` does anything.
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
        there = [x for x in self._stack if x() is not None]
        return there[-1:] == [weakref.ref(self)]


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
    """Poll until there is a result or the timeout is over.

    Args:
        poll: Returns the result; None: not yet. May raise.
        timeout: How many seconds to wait at most.
        late: Called at the timeout. Raises an error that names who is missing, or
            returns what stands for the result.
        reminder: Who is waited for and for what, as a sentence for the log, every 10 s.
            Called with the seconds waited. None: nothing is logged.
        is_early: Whether no step was made yet: the first reminder comes after 3 s.
        pauses: The first pause between two polls, and the longest; each is twice the
            one before.
        sleep: Pauses; may end sooner, as `threading.Thread.join` does.

    Returns:
        What `poll` or `late` returned.

    Example:
        >>> answers = iter([None, None, 42])
        >>> wait_for(lambda: next(answers), timeout=60, late=lambda: 0)
        42
    """
    began, (pause, longest) = time.monotonic(), pauses
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
            sleep(min(pause, max(0.0, timeout - waited)))
            pause = min(2 * pause, longest)
    return result


class Announced(_Nested):
    """Logs once that work is under way, if it takes longer than 3 s.

    A context manager, for work that blocks. It starts a thread: not for what every step
    does.

    Args:
        what: What is under way, such as `"compiling run(step)"`.

    Example:
        >>> with Announced("compiling run(step)"):
        ...     pass
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._began = 0.0
        self._over = threading.Event()

    def __enter__(self) -> "Announced":
        self._began = time.monotonic()
        super().__enter__()
        thread = threading.Thread(
            target=_speak,
            args=(weakref.ref(self), self._over),
            name="replicax-announced",
            daemon=True,
        )
        try:
            thread.start()
        except BaseException:  # An interrupt: Python waits for the thread there.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()

    def text(self) -> str:
        """What to say now."""
        return f"{self._what} ({time.monotonic() - self._began:.0f} s so far)"


def _speak(of: "weakref.ref[Announced]", over: threading.Event) -> None:
    seconds = FIRST_SECONDS
    while not over.wait(seconds):
        announced = of()
        if announced is None:
            return
        if announced.is_innermost:
            _logger.warning("%s", announced.text())
            return
        del announced  # Not alive for it.
        seconds = _LOOK_SECONDS


def announce_first(items: Callable[[], Iterator[Any]], what: str) -> Iterator[Any]:
    """The iterator that `items` makes; its first item may take long and is announced.

    Example:
        >>> list(announce_first(lambda: iter([1, 2]), "waiting for the first number"))
        [1, 2]
    """

    def parts() -> Iterator[Iterator[Any]]:
        with Announced(what):
            source = items()
            first = [*itertools.islice(source, 1)]
        yield map(list.pop, itertools.repeat(first, len(first)))
        yield source

    # Behind the first one, items come straight from the source. The first one has no
    # name here: it would stay alive.
    return itertools.chain.from_iterable(parts())
