"""Waiting for closures, for as long as any of them gets on."""

import time
from collections.abc import Callable
from typing import Any

from replicax._util.listing import listed
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session

__all__ = ["AGAIN", "Progress"]

_LOOK_SECONDS = 1.0
AGAIN = object()
"""What a poll returns when there was progress: the deadline begins anew."""


class Progress:
    """How the closures of a job get on, as this worker has seen it last.

    Args:
        session: This worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looked = 0.0
        self._pending: dict[str, Any] = {"queued": 0, "running": {}}

    @property
    def is_over(self) -> bool:
        """Whether nothing was queued or running."""
        return not self._pending["queued"] and not self._pending["running"]

    def look(self) -> bool:
        """Ask the board; whether anything is different."""
        before = self._pending
        self._pending = self._session.board("pending")
        self._pending.pop("unserved")  # Seconds, which always change.
        return self._pending != before

    def require_workers(self) -> None:
        """Raise if no worker will ever run what waits, as their scripts have ended.

        Raises:
            ClusterMismatchError: All have, with success.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or self.is_over:
            return
        self._looked = now
        session = self._session
        about = session.board("status")["workers"]
        others = session.workers[1:]
        if others and all(about[name]["ok"] for name in others):
            raise ClusterMismatchError(
                f"{session.name}: the scripts of {listed(others)} have ended, but "
                "functions of the ClusterCoordinator wait for a worker. All tasks must "
                "make the same calls of the coordinator, none of them under "
                "`if strategy.is_chief`: workers run functions in join, done and fetch."
            )

    def until(self, poll: Callable[[], Any], what: str) -> Any:
        """Poll until there is a result.

        Args:
            poll: Returns it; or `AGAIN`, or None if nothing has happened.
            what: What is waited for, for messages.

        Raises:
            ClusterError: If nothing has happened for the step deadline.
        """
        while True:
            result = self._session.wait(poll, what, self._missing)
            if result is not AGAIN:
                return result

    def _missing(self) -> str:
        session = self._session
        if not session.is_chief:
            return f"{session.workers[0]} (the chief)"
        running = sorted(set(self._pending["running"].values()))
        if running:
            return f"{listed(running)} (in a function)"
        others = session.workers[1:]
        alive = [name for name in session.board("alive") if name in others]
        if alive:
            return f"{listed(alive)} (which did not take any)"
        return f"any of {listed(others)} (none is alive)"
