"""What a worker tells a restarted board again.

A board that was restarted from a snapshot, which is somewhat older than its end, gets
each worker's last calls once more.
"""

import threading

from replicax._util.types import JSONObject
from replicax.ps.limits import family_of

__all__ = ["JOB", "ReplayLog"]

JOB = "job"
"""The key under which a board says which job it is of."""

_MOST = 64
_NAMED_BY = {
    "put": "key",
    "arrive": "barrier",
    "report": "topic",
    "open": "stream",
    "end": "stream",
}


class ReplayLog:
    """The last calls that the board must not forget, in their order.

    Example:
        >>> told = ReplayLog()
        >>> told.note("put", {"key": "epoch", "value": 1})
        >>> told.note("put", {"key": "epoch", "value": 2})
        >>> told.note("alive", {})
        >>> told.again()
        [('put', {'key': 'epoch', 'value': 2})]
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], JSONObject] = {}
        self._lock = threading.Lock()

    def note(self, method: str, arguments: JSONObject) -> None:
        """Keep a call, if it has to be repeated."""
        if method not in _NAMED_BY:
            return
        name = str(arguments[_NAMED_BY[method]])
        with self._lock:
            if _NAMED_BY[method] == "stream":
                name = family_of(name)[0]  # Streams before the newest are over.
                self._calls.pop(("end", name), None)
            self._calls.pop((method, name), None)
            self._calls[method, name] = dict(arguments)
            while len(self._calls) > _MOST:
                del self._calls[next(iter(self._calls))]

    def again(self) -> list[tuple[str, JSONObject]]:
        """The calls to repeat, as method and arguments."""
        with self._lock:
            return [(method, dict(a)) for (method, _), a in self._calls.items()]
