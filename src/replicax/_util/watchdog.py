"""A watchdog that cancels a call blocking in C++ after a time without progress."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Watchdog"]

_CLOSE_SECONDS = 1.0


class Watchdog:
    """A thread that cancels a call blocking in C++ without progress.

    From the first watched call on, also between calls, it calls `ping(seconds)` after
    each `idle_seconds` without progress. `ping` must return within `seconds`.
    """

    def __init__(
        self,
        name: str,
        *,
        ping: Callable[[float], None] = lambda seconds: None,
        idle_seconds: float = math.inf,
    ) -> None:
        self._name = name
        self._ping = ping
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._cancel: Callable[[], None] | None = None
        self._seconds = 0.0  # The time limit of the watched call.
        self._moved_at = self._pinged_at = 0.0
        self._fired = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(
        self, seconds: float, cancel: Callable[[], None]
    ) -> Iterator[Callable[[], None]]:
        """Watch a `with` block; yield a function that the block calls on progress.

        Only one block may be watched at a time. A cancelled block raises
        `TimeoutError`, not the error of the cancellation.
        """

        def progress() -> None:
            self._moved_at = time.monotonic()

        with self._changed:
            self._fired, self._cancel, self._seconds = False, cancel, seconds
            progress()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        try:
            yield progress
        except Exception as error:
            if self._end():
                raise TimeoutError(f"nothing came for {seconds:g} s") from error
            raise
        if self._end():
            raise TimeoutError(f"nothing came for {seconds:g} s")

    def fire(self) -> None:
        """Cancel the watched block, if there is one."""
        with self._changed:
            if self._cancel is not None:
                self._cancel()

    def close(self) -> None:
        """End the thread, after its current ping."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _end(self) -> bool:
        with self._changed:
            self._cancel = None
            return self._fired

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                ping_at = max(self._moved_at, self._pinged_at) + self._idle_seconds
                is_watched = self._cancel is not None and not self._fired
                cancel_at = self._moved_at + self._seconds if is_watched else math.inf
                left = min(ping_at, cancel_at) - now
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                elif cancel_at <= now:
                    self._fired = True
                    self.fire()
                else:
                    self._changed.release()  # The watched call may end meanwhile.
                    try:
                        self._ping(cancel_at - now)
                    finally:
                        self._changed.acquire()
                    self._pinged_at = time.monotonic()
