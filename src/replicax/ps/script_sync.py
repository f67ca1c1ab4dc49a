"""Where the chief's script is, for the workers whose scripts follow it.

Each `join`, `done` and `fetch` of a script is a meeting, and so is a `schedule` that
raises. The chief decides how it ends, and the others' scripts go the same way.
"""

import json
from collections import deque
from typing import Any

from replicax.ps.session import Session

__all__ = ["Meetings"]

_NOW = "coordinator: now"
_KEPT_BYTES = 16 * 2**20
# The board keeps the newest 64 values of a family.
_FAMILY = 64


class Meetings:
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

    def end(self, record: dict[str, Any]) -> None:
        """The chief: the next meeting ends like this."""
        if record:
            key = self._key(self._session.starts)
            self._put(key, record)
            self._kept.append((key, len(json.dumps(record))))
            while sum(size for _, size in self._kept) > _KEPT_BYTES:
                self._put(self._kept.popleft()[0], {"gone": True})
        self.passed += 1
        self._say()

    def ended(self) -> dict[str, Any] | None:
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

    def _put(self, key: str, value: Any) -> None:
        self._session.board("put", key=key, value=value, first=False)
