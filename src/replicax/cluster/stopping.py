"""Stop requests: after SIGTERM in one worker, all workers stop at the same step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["StopRequest"]


class StopRequest:
    """A request to stop all workers after the same step.

    A worker must not wait for the others between steps, since their step may need this
    worker. So the heartbeat threads agree: each thread freezes its worker's step count
    and sends it. When all counts are known, all workers stop after the highest count
    plus 1. Until then, a frozen worker waits at the end of its next step. A single
    worker stops at once. `requested` is true after a worker's request.
    """

    def __init__(self, *, alone: bool) -> None:
        self.requested = False
        self._alone = alone
        self._changed = threading.Condition()
        self._step = 0
        self._frozen = False
        self._stop_at: int | None = None

    @property
    def is_settling(self) -> bool:
        """Whether a stop is requested, and the workers have not agreed on its step."""
        return self.requested and self._stop_at is None

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`, which has ended; waits while frozen."""
        if self._alone:
            self._step = step
            return self.requested
        with self._changed:
            self._changed.wait_for(lambda: not self._frozen)
            self._step = step
            return self._stop_at is not None and step >= self._stop_at

    def freeze(self) -> int:
        """Make `reached` wait from the next step on; return the last step."""
        with self._changed:
            self._frozen = self._stop_at is None
            return self._step

    def agree(self, step: int) -> None:
        """Set the step to stop after, and let `reached` return."""
        with self._changed:
            self._stop_at = step
            self._frozen = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """While open, SIGTERM requests a stop; a second one ends the process at once.

        Does nothing outside the main thread, which alone may set signal handlers.
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
