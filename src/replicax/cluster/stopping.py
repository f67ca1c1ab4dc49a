"""Stop requests: all workers stop after one step when one gets SIGTERM or Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from replicax._util.interrupts import postponing_interrupts

__all__ = ["StopRequest"]


class StopRequest:
    """A request to stop between two steps.

    A worker must not wait for the others between its steps, which may need it to
    finish theirs. So the threads that exchange heartbeats agree: each one freezes
    its worker's count of steps, tells it, and when all are told, all stop after the
    highest one plus 1. Frozen, a worker waits at its next step's end for that moment.
    One that is alone has nobody to agree with.

    Attributes:
        requested: Whether some worker is to stop.
        interrupted: Whether it is by Ctrl-C, after which nobody starts again.
    """

    def __init__(self, *, alone: bool) -> None:
        self.requested = False
        self.interrupted = False
        self._alone = alone
        self._changed = threading.Condition()
        self._step = 0
        self._frozen = False
        self._stop_at: int | None = None

    @property
    def is_settling(self) -> bool:
        """Whether the workers have yet to agree when to stop."""
        return self.requested and self._stop_at is None

    def reached(self, step: int) -> bool:
        """Whether to stop now, after `step`; asked after each. Under a microsecond."""
        if self._alone:
            self._step = step
            return self.requested
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen)
            self._step = step
            return self._stop_at is not None and step >= self._stop_at

    def freeze(self) -> int:
        """Hold the worker at the end of its next step; returns its last one."""
        with self._changed:
            self._frozen = self._stop_at is None
            return self._step

    def agree(self, step: int) -> None:
        """Let the worker go on, and stop after `step`."""
        with self._changed:
            self._stop_at = step
            self._frozen = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """While open, SIGTERM asks to stop; a second one ends the process at once.

        Does nothing outside the main thread, where signals cannot be caught.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)

        def request(number: int, frame: Any) -> None:
            self.requested = True
            signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is request:
                signal.signal(signal.SIGTERM, before)

    @contextlib.contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """While open, Ctrl-C asks to stop; a second one raises `KeyboardInterrupt`."""
        try:
            with postponing_interrupts(self._interrupt):
                yield
        finally:
            if self._alone and self.interrupted:
                self.requested = self.interrupted = False  # A notebook goes on.

    def _interrupt(self) -> None:
        self.requested = self.interrupted = True
