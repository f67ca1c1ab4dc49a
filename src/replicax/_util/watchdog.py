"""A watchdog that cancels a call blocking in C++ after a time without progress."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Watchdog"]


class Watchdog:
    """A thread that cancels a call blocking in C++ without progress."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._cancel: Callable[[], None] | None = None
        self._deadline = 0.0
        self._fired = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watch(
        self, seconds: float, cancel: Callable[[], None]
    ) -> Iterator[Callable[[], None]]:
        """Watch a `with` block, one at a time; yield a function to call on progress.

        A cancelled block raises `TimeoutError`, not the error of the cancellation.
        """

        def progress() -> None:
            self._deadline = time.monotonic() + seconds

        with self._changed:
            self._fired, self._cancel = False, cancel
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
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _end(self) -> bool:
        with self._changed:
            self._cancel = None
            return self._fired

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = None  # Nothing is watched.
                if self._cancel is not None and not self._fired:
                    left = self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._fired = True
                assert self._cancel is not None
                self._cancel()
