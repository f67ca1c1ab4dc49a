"""A deadline for calls that block in C++; each sign of progress restarts it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Watchdog"]


class Watchdog:
    """Cancels what makes no progress, from a thread of its own.

    Args:
        name: The thread's name. It starts with the first `watch`.

    Example:
        >>> cancelled = threading.Event()
        >>> with Watchdog("replicax-example") as watchdog:
        ...     with watchdog.watch(0.05, cancelled.set):
        ...         _ = cancelled.wait(10)
        Traceback (most recent call last):
        TimeoutError: nothing came for 0.05 s
    """

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
        """Watch what is done in a `with` block; one at a time.

        Args:
            seconds: How long there may be no progress.
            cancel: Makes what is done fail; called from the watchdog's thread.

        Yields:
            A function to call at each progress.

        Raises:
            TimeoutError: If it was cancelled, instead of the error that this caused.
        """

        def progress() -> None:
            self._deadline = time.monotonic() + seconds

        with self._changed:
            self._fired = False
            self._cancel = cancel
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
        """Cancel what is watched, if anything is."""
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

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self) -> bool:
        with self._changed:
            self._cancel = None
            return self._fired

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if self._cancel is None or self._fired:
                    self._changed.wait()
                    continue
                left = self._deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._fired = True
                self._cancel()
