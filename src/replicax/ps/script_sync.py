"""Keeps the scripts of all tasks in step with the chief's, and waits for closures.

Each `join`, `done` and `fetch` of a script is a meeting, and so is a `schedule` that
raises. The chief decides how it ends, and the others' scripts go the same way. A wait
lasts while any closure makes progress.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from replicax._util.listing import listed
from replicax._util.types import JSON, JSONObject
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session

__all__ = ["AGAIN", "ClosureProgress", "ScriptSync"]


_NOW = "coordinator: now"
_KEPT_BYTES = 16 * 2**20
# The board keeps the newest 64 values of a family.
_FAMILY = 64


class ScriptSync:
    """The meetings of a script, in their order.

    Args:
        session: This worker's session.

    Attributes:
        passed: How many this task's script has passed.
    """

    def __init__(self, session: Session) -> None:
        self.passed = 0
        self._session = session
        self._known: dict[str, int] | None = None
        self._kept: deque[tuple[str, int]] = deque()
        if session.is_chief:
            self._say()

    def end(self, record: JSONObject) -> None:
        """The chief: the next meeting ends like this."""
        if record:
            key = self._key(self._session.starts)
            self._put(key, record)
            self._kept.append((key, len(json.dumps(record))))
            while sum(size for _, size in self._kept) > _KEPT_BYTES:
                self._put(self._kept.popleft()[0], {"gone": True})
        self.passed += 1
        self._say()

    def ended(self) -> JSONObject | None:
        """The others: how the next meeting ended; None: the chief is not there yet."""
        if self._known is None or self._known["meetings"] <= self.passed:
            self._known = self._session.board("get", key=_NOW)
        if self._known is None or self._known["meetings"] <= self.passed:
            return None
        record = self._session.board("get", key=self._key(self._known["starts"]))
        self.passed += 1
        return record or {}

    def _key(self, starts: int) -> str:
        # A restarted chief begins anew, and its meetings with it.
        block, number = divmod(self.passed, _FAMILY)
        return f"coordinator {starts}.{block}/{number}"

    def _say(self) -> None:
        now = {"starts": self._session.starts, "meetings": self.passed}
        self._put(_NOW, now)

    def _put(self, key: str, value: JSON) -> None:
        self._session.board("put", key=key, value=value, first=False)


_LOOK_SECONDS = 1.0
AGAIN = object()
"""What a poll returns when there was progress: the deadline begins anew."""


class ClosureProgress:
    """How the closures of a job get on, as this worker has seen it last.

    Args:
        session: This worker's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looked = 0.0
        self._pending: JSONObject = {"queued": 0, "running": {}}

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
