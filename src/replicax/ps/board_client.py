"""A worker's calls of the board, which a board that was restarted is told again.

- A call is in the log before it is sent. So one that a lost board has not answered is
  repeated as well.
- The incarnation of server 0 tells that its board is another one. Then one thread joins
  it again and replays the log, and the others wait, before anybody calls it.
- A board of another job is an error for a worker that has values on servers: they are
  lost. To another one it is the same job, which has not begun.
"""

import threading
from collections.abc import Callable
from typing import Any

from replicax._util.types import JSONObject
from replicax.ps.connection import Connection, ServerRefused, ValuesLostError
from replicax.ps.limits import family_of, remember

__all__ = ["JOB", "BoardClient", "ReplayLog"]

JOB = "job"
"""The key under which a board says which job it is of."""

_MOST_REPLAYED = 64
_NAMED_BY = {
    "put": "key",
    "arrive": "barrier",
    "report": "topic",
    "open": "stream",
    "end": "stream",
}


class BoardClient:
    """A client of the board; `join` makes this worker known to it. Thread safe.

    `has_values` says whether this worker has values on servers.
    """

    def __init__(
        self,
        connection: Connection,
        join: Callable[[], object],
        *,
        is_chief: bool,
        has_values: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._join = join
        self._is_chief = is_chief
        self._has_values = has_values
        self._log = ReplayLog()
        self._incarnation = ""  # Of the board that has the log's calls.
        self._replaying = threading.Lock()
        self._job: object = None

    def begin(self) -> None:
        """Note which board it is, before this worker joins."""
        self._job = self._connection.call("board.get", key=JOB)
        self._incarnation = self._connection.incarnation

    @property
    def is_known(self) -> bool:
        """Whether the board is the one that has been told of all calls."""
        return self._incarnation == self._connection.incarnation

    def call(self, method: str, arguments: JSONObject) -> Any:
        """Call a method; replay the log first if the board was restarted."""
        self._log.note(method, arguments)
        try:
            answer = self._connection.call(f"board.{method}", **arguments)
        except ServerRefused:
            if self.is_known:
                raise
        else:
            if self.is_known:
                if method == "put":  # Another's value may stand.
                    self._log.note("put", arguments | {"value": answer})
                return answer
        self.replay()
        return self._connection.call(f"board.{method}", **arguments)

    def replay(self) -> None:
        """Tell another board what the one before was told."""
        with self._replaying:
            if self.is_known:
                return  # Another thread has.
            server, incarnation = self._connection, self._connection.incarnation
            job = server.call("board.get", key=JOB)
            if not self._has_values():
                self._job = job
            is_same_job = job == self._job
            if is_same_job or self._is_chief:
                self._join()
            if not is_same_job:
                raise ValuesLostError(
                    f"{server.task} at {server.address} was restarted without a "
                    "snapshot, and what it held is lost. Start the job again; with "
                    "snapshot_dir=... a restarted server goes on.",
                    culprit=server.task,
                )
            for method, arguments in self._log.again():
                server.call(f"board.{method}", **arguments)
            self._incarnation = incarnation


class ReplayLog:
    """The last calls that a restarted board needs again, in order.

    Example:
        >>> log = ReplayLog()
        >>> log.note("put", {"key": "epoch", "value": 1})
        >>> log.note("put", {"key": "epoch", "value": 2})
        >>> log.note("alive", {})
        >>> log.again()
        [('put', {'key': 'epoch', 'value': 2})]
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], JSONObject] = {}
        self._lock = threading.Lock()

    def note(self, method: str, arguments: JSONObject) -> None:
        """Record a call, if it is to be replayed."""
        if method not in _NAMED_BY:
            return
        name = str(arguments[_NAMED_BY[method]])
        with self._lock:
            if _NAMED_BY[method] == "stream":
                name = family_of(name)[0]  # Streams before the newest are over.
                self._calls.pop(("end", name), None)
            call = dict(arguments)
            remember(self._calls, (method, name), call, most=_MOST_REPLAYED)

    def again(self) -> list[tuple[str, JSONObject]]:
        """The calls to replay, as method and arguments."""
        with self._lock:
            return [(method, dict(a)) for (method, _), a in self._calls.items()]
