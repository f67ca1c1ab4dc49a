"""Makes repeated calls of the board safe: each is done once, and may be replayed.

The board logs the last answers to each session: a call that is repeated gets the same
one. A worker logs its last calls: a board that was restarted from a snapshot, which is
somewhat older than its end, gets them again.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from replicax._util.types import JSONObject
from replicax.ps.limits import StaleCallError, family_of

__all__ = ["JOB", "Answers", "ReplayLog", "Told", "once"]

_Answer = TypeVar("_Answer")


class Told(msgspec.Struct):
    """What a session of a worker was told: by method, the last call's number, and that.

    It makes repeated calls safe: the same call gets the same answer again.
    """

    worker: str
    answers: dict[str, tuple[int, Any]]


Answers = dict[str, Told]
"""By session: what a journal or an older snapshot tells may be of an earlier one."""


def once(
    answers: Answers, method: str, arguments: JSONObject, do: Callable[[], _Answer]
) -> _Answer:
    """What `do` answers, or has answered to this call before.

    Raises:
        StaleCallError: If a later call of the method was answered.
    """
    worker, call = str(arguments["worker"]), arguments["call"]
    told = answers.setdefault(arguments["session"], Told(worker, {})).answers
    last, answer = told.get(method, (-1, None))
    if call < last:
        raise StaleCallError(
            f"{worker}: call {call} of {method} came after call {last} of the same "
            "session. Numbers must increase."
        )
    if call > last:
        answer = do()
        told[method] = call, answer
    return cast(_Answer, answer)


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
