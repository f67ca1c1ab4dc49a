"""Makes repeated calls of the board safe: each is done once, and may be replayed.

The board logs each worker's last answers: a call that is repeated gets the same one. A
worker logs its last calls: a board that was restarted from a snapshot, which is
somewhat older than its end, gets them again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from replicax._util.types import JSONObject
from replicax.ps.limits import StaleCallError, check_count, family_of
from replicax.ps.presence import Presence

__all__ = ["JOB", "CallLog", "Released", "ReplayLog"]

_Answer = TypeVar("_Answer")


class Released(Protocol):
    """Is told of a worker that has lost what it held."""

    def __call__(self, worker: str, *, died: bool, now: float) -> None:
        """`died`: it may have been its work that killed it."""
        ...


class CallLog:
    """The lock of a board, its clock, and the last answers of each worker.

    Args:
        presence: The workers; only changed within a turn.
        now: The clock, in seconds.
        released: Is called within a turn.
    """

    def __init__(
        self, presence: Presence, *, now: Callable[[], float], released: Released
    ) -> None:
        self.failure: str | None = None
        self._presence = presence
        self._now = now
        self._released = released
        self._lock = threading.Lock()
        # (worker, method) -> the last call's number and answer.
        self._answers: dict[tuple[str, str], tuple[int, Any]] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[float]:
        """Takes the lock, notices who died, and gives the time."""
        with self._lock:
            now = self._now()
            for worker in self._presence.newly_dead(now):
                self.release(worker, died=True, now=now)
            # Once it has failed, all must be told the same, whoever comes back.
            self.failure = self.failure or self._presence.failure(now)
            yield now

    @contextlib.contextmanager
    def turn_of(self, worker: str, session: str) -> Iterator[float]:
        """A turn of a session, which shows that it is alive."""
        with self.turn() as now:
            self._presence.sign(worker, session, now)
            yield now

    def release(self, worker: str, *, died: bool, now: float) -> None:
        """Takes away what a worker holds, and what a repeated call would give it."""
        self._released(worker, died=died, now=now)
        self._answers.pop((worker, "claim"), None)
        self._answers.pop((worker, "take"), None)

    def forget(self, worker: str) -> None:
        """Forgets all calls of a worker, as a new session counts from the start."""
        for answered in [key for key in self._answers if key[0] == worker]:
            del self._answers[answered]

    def once(
        self, worker: str, method: str, call: int, do: Callable[[], _Answer]
    ) -> _Answer:
        """What `do` answers, or has answered to this call before."""
        check_count(call, "call")
        last, answer = self._answers.get((worker, method), (-1, None))
        if call == last:
            return answer
        if call < last:
            raise StaleCallError(
                f"{worker}: call {call} of {method} came after call {last} of the same "
                f"session. Numbers must increase."
            )
        answer = do()
        self._answers[worker, method] = (call, answer)
        return answer

    def state(self, methods: Sequence[str] | None = None) -> list[list[Any]]:
        """The last answers, as JSON values; of these methods, or of all."""
        return [
            [*key, *last]
            for key, last in self._answers.items()
            if methods is None or key[1] in methods
        ]

    @contextlib.contextmanager
    def loading(self, state: list[list[Any]]) -> Iterator[float]:
        """Takes the lock for taking over a state, and gives the time."""
        with self._lock:
            yield self._now()
            self._answers = {}
            self.add_state(state)
            self.failure = None

    def add_state(self, state: list[list[Any]]) -> None:
        """Take over answers; within `loading`."""
        for worker, method, call, answer in state:
            self._answers[worker, method] = call, answer


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
