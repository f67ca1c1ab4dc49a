"""Synchronization points of a script, which keep all tasks' scripts in step.

Each `join`, `done` and `fetch` of the coordinator is one, and so is a `schedule` that
raises: the chief decides how it ends, and the others' scripts go the same way. A wait
lasts while any closure makes progress.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from replicax._util.listing import listed
from replicax._util.types import JSON, JSONObject
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session

__all__ = ["AGAIN", "Again", "ScriptSync"]

_LOOK_SECONDS = 1.0
_NOW = "coordinator: now"
_KEPT_BYTES = 16 * 2**20

# The board keeps the newest 64 values of a family.
_FAMILY = 64

_Result = TypeVar("_Result")


class Again:
    """The sentinel that a poll returns on progress: the deadline restarts."""


AGAIN = Again()


class ScriptSync:
    """Synchronization points of a script, in order, and progress of closures meanwhile.

    `passed` is the number of points that this task's script has passed.
    """

    def __init__(self, session: Session) -> None:
        self.passed = 0
        self._session = session
        self._known: dict[str, int] | None = None
        self._kept: deque[tuple[str, int]] = deque()
        self._looked = 0.0
        self._pending: JSONObject = {"queued": 0, "running": {}}
        if session.is_chief:
            self._say()

    def end(self, record: JSONObject) -> None:
        """On the chief: publish the outcome of the next synchronization point."""
        if record:
            key = self._key(self._session.starts)
            self._put(key, record)
            self._kept.append((key, len(json.dumps(record))))
            while sum(size for _, size in self._kept) > _KEPT_BYTES:
                self._put(self._kept.popleft()[0], {"gone": True})
        self.passed += 1
        self._say()

    def ended(self) -> JSONObject | None:
        """On the others: the next point's outcome; None: it is not reached yet."""
        if self._known is None or self._known["points"] <= self.passed:
            self._known = self._session.board("get", key=_NOW)
        if self._known is None or self._known["points"] <= self.passed:
            return None
        record = self._session.board("get", key=self._key(self._known["starts"]))
        self.passed += 1
        return record or {}

    def _key(self, starts: int) -> str:
        # A restarted chief begins anew, and so do the numbers of its points.
        block, number = divmod(self.passed, _FAMILY)
        return f"coordinator {starts}.{block}/{number}"

    def _say(self) -> None:
        now = {"starts": self._session.starts, "points": self.passed}
        self._put(_NOW, now)

    def _put(self, key: str, value: JSON) -> None:
        self._session.board("put", key=key, value=value, first=False)

    # Closures.

    @property
    def is_over(self) -> bool:
        """Whether no closure was queued or running."""
        return not self._pending["queued"] and not self._pending["running"]

    def look(self) -> bool:
        """Poll the board; whether its counts have changed."""
        before = self._pending
        self._pending = self._session.board("pending")
        return self._pending != before

    def require_workers(self) -> None:
        """Raise if closures are queued and all workers' scripts have ended."""
        if self.is_over or not self.is_time():
            return
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

    def is_time(self) -> bool:
        """Whether a second has passed since the last rare check."""
        now = time.monotonic()
        is_due = now - self._looked >= _LOOK_SECONDS
        if is_due:
            self._looked = now
        return is_due

    def until(self, poll: Callable[[], _Result | Again | None], what: str) -> _Result:
        """Poll until there is a result; `AGAIN` restarts the deadline.

        A `ClusterError` says that nothing has happened for the step deadline.
        """
        while True:
            result = self._session.wait(poll, what, self._missing)
            if not isinstance(result, Again):
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
