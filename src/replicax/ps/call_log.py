"""Calls to the board, one at a time, each done once however often it is repeated."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from replicax.ps.limits import StaleCallError, check_count
from replicax.ps.presence import Presence

__all__ = ["Released", "Turns"]


class Released(Protocol):
    """Is told of a worker that has lost what it held."""

    def __call__(self, worker: str, *, died: bool, now: float) -> None:
        """`died`: it may have been its work that killed it."""
        ...


class Turns:
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

    def once(self, worker: str, method: str, call: int, do: Callable[[], Any]) -> Any:
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
