"""The queue of closures: scheduled by the chief, run by whichever worker is free.

The state behind `ClusterCoordinator`. (TF: `tf.distribute.experimental.coordinator.
ClusterCoordinator`.) No clock and no I/O: times come in as arguments, in seconds.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence

from replicax._util.types import JSON, JSONObject
from replicax.ps.limits import (
    BoardError,
    LimitError,
    check_size,
    check_text,
    check_texts,
)

__all__ = ["Closures"]

_logger = logging.getLogger("replicax")

_MAX_BYTES = 256 * 2**20
_MAX_VALUE = 16 * 2**20
_MAX_RUNNING = 16
_MAX_FUNCTIONS = 1024
_MAX_FETCH = 256
_MAX_ERROR_TEXT = 64 * 1024


@dataclasses.dataclass(kw_only=True)
class _Closure:
    """`status` is `queued`, `running`, `done`, `error` or `cancelled`."""

    id: str
    function: str | None
    payload: JSON
    owner: str
    generation: int
    size: int
    since: float
    status: str = "queued"
    worker: str | None = None
    value: JSON = None
    error: dict[str, str] | None = None
    died_with: list[str] = dataclasses.field(default_factory=list)
    unwanted: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status not in ("queued", "running")


class Closures:
    """The closures of a job: queued, running, and finished but not yet forgotten.

    A closure whose worker dies goes back to the front of the queue, until it was tried
    `1 + max_retries` times. After an error, a worker's or this one, what is queued is
    cancelled; the error is told once, and then closures may be scheduled again.

    Args:
        max_retries: How often a closure whose worker died is tried again.
        max_closures: How many are kept, those included that are finished and were not
            yet forgotten.
    """

    def __init__(self, *, max_retries: int = 3, max_closures: int = 4096) -> None:
        self._max_retries = max_retries
        self._max_closures = max_closures
        self._known: dict[str, _Closure] = {}
        self._queue: deque[str] = deque()
        self._running: dict[str, str] = {}  # Id -> worker.
        self._functions: dict[str, list[str]] = {}
        self._bytes = 0
        self._error: dict[str, str] | None = None
        self._error_owner: str | None = None
        # Counts errors: closures of an earlier generation do not raise one again.
        self._generation = 0

    def schedule(
        self, id: str, payload: JSON, function: str | None, owner: str, now: float
    ) -> JSONObject:
        """Queues a closure: see `Board.schedule`."""
        check_text(id, "id")
        if function is not None:
            check_text(function, "function")
        size = check_size(payload, f"closure {id}: payload", most=_MAX_VALUE)
        if self._error is not None:
            return {"failed": self.raise_if_failed()}
        if id in self._known:
            raise BoardError(
                f"The closure {id!r} was scheduled already and is "
                f"{self._known[id].status}. Each needs an id of its own."
            )
        num_known = len(self._known)
        if num_known >= self._max_closures or self._bytes + size > _MAX_BYTES:
            unfetched = sum(closure.is_finished for closure in self._known.values())
            return {"full": True, "known": num_known, "finished": unfetched}
        self._known[id] = _Closure(
            id=id,
            function=function,
            payload=payload,
            owner=owner,
            generation=self._generation,
            size=size,
            since=now,
        )
        self._bytes += size
        self._queue.append(id)
        return {"scheduled": True}

    def take(self, worker: str, functions: Sequence[str]) -> JSONObject | None:
        """The first closure that the worker has the function for: see `Board.take`."""
        self._functions[worker] = check_texts(
            functions, "functions", most=_MAX_FUNCTIONS
        )
        running = sum(holder == worker for holder in self._running.values())
        if running >= _MAX_RUNNING:
            raise LimitError(
                f"{worker} has {running} closures without a result. Send some first."
            )
        able = {None, *self._functions[worker]}
        for id in self._queue:
            closure = self._known[id]
            if closure.function in able:
                self._queue.remove(id)
                self._running[id] = closure.worker = worker
                closure.status = "running"
                return {
                    "id": id,
                    "function": closure.function,
                    "payload": closure.payload,
                }
        return None

    def result(
        self, id: str, worker: str, value: JSON, error: dict[str, str] | None
    ) -> JSONObject:
        """Notes what became of a closure: see `Board.result`."""
        check_text(id, "id")
        size = check_size(value, f"closure {id}: value", most=_MAX_VALUE)
        if error is not None:
            error = _checked_error(error)
        if self._running.get(id) != worker:
            return {"late": True}
        closure = self._known[id]
        if error is not None:
            self._fail(closure, error)
        else:
            self._finish(closure, "done")
            closure.value, closure.size = value, size
            self._bytes += size
        if closure.unwanted:
            self._forget(id)
        return {"late": False}

    def _finish(self, closure: _Closure, status: str) -> None:
        self._running.pop(closure.id, None)
        self._bytes -= closure.size
        closure.payload, closure.size = None, 0
        closure.status, closure.worker = status, None

    def _fail(self, closure: _Closure, error: dict[str, str]) -> None:
        """Keeps the error; the first one of a generation cancels what is queued."""
        self._finish(closure, "error")
        closure.error = error
        if closure.generation < self._generation:
            return
        self._error, self._error_owner = error, closure.owner
        self._generation += 1
        for id in self._queue:
            self._cancel(self._known[id])
        self._queue.clear()

    def _cancel(self, closure: _Closure) -> None:
        self._finish(closure, "cancelled")
        if closure.unwanted:
            self._forget(closure.id)

    def _forget(self, id: str) -> None:
        self._bytes -= self._known.pop(id).size

    def release(self, worker: str, *, died: bool, now: float) -> None:
        """Gives what the worker was running to others; `died`: it counts as a try."""
        self._functions.pop(worker, None)
        mine = [id for id, holder in self._running.items() if holder == worker]
        # From the last one: each goes to the front, so they keep their order.
        for id in reversed(mine):
            closure = self._known[id]
            if died:
                closure.died_with.append(worker)
            if len(closure.died_with) > self._max_retries:
                self._fail(closure, self._given_up(closure))
                if closure.unwanted:
                    self._forget(id)
            elif closure.generation < self._generation:
                self._cancel(closure)
            else:
                del self._running[id]
                _logger.warning(
                    "%s is gone while it ran %s (%s), which runs again: what it had "
                    "updated already is updated twice.",
                    worker,
                    closure.function or "a closure",
                    id,
                )
                closure.status, closure.worker, closure.since = "queued", None, now
                self._queue.appendleft(id)

    def _given_up(self, closure: _Closure) -> dict[str, str]:
        name = "a closure" if closure.function is None else repr(closure.function)
        return {
            "type": "ClusterError",
            "message": (
                f"{name} ({closure.id}) was tried {len(closure.died_with)} times and "
                f"its worker died each time: {', '.join(closure.died_with)}"
            ),
            "traceback": "",
        }

    def disown(self, owner: str) -> None:
        """Drops what a process scheduled that is gone for good; running ones too."""
        self._queue = deque(i for i in self._queue if self._known[i].owner != owner)
        for id in [i for i, c in self._known.items() if c.owner == owner]:
            self._running.pop(id, None)
            self._forget(id)
        if self._error_owner == owner:
            self._error = None

    def raise_if_failed(self) -> dict[str, str] | None:
        """The error that nobody was told of yet; None the next time."""
        error, self._error = self._error, None
        return error

    def is_done(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._queue and not self._running

    def fetch(
        self, ids: Sequence[str] | None, forget: Sequence[str]
    ) -> dict[str, JSONObject]:
        """What became of closures: see `Board.fetch`."""
        forget = check_texts(forget, "forget", most=self._max_closures)
        if ids is not None:
            ids = check_texts(ids, "ids", most=_MAX_FETCH)
        for id in forget:
            if id in self._known:
                self._known[id].unwanted = True
                if self._known[id].is_finished:
                    self._forget(id)
        if ids is None:
            ids = [i for i, c in self._known.items() if c.is_finished]
        answer: dict[str, JSONObject] = {}
        room = _MAX_VALUE
        for id in ids[:_MAX_FETCH]:
            room -= self._known[id].size if id in self._known else 0
            if room < 0 and answer:
                break
            answer[id] = self._outcome(id)
        return answer

    def _outcome(self, id: str) -> JSONObject:
        closure = self._known.get(id)
        if closure is None:
            return {"status": "unknown"}
        outcome: JSONObject = {"status": closure.status}
        if closure.status == "done":
            outcome["value"] = closure.value
        elif closure.status == "error":
            outcome["error"] = closure.error
        return outcome

    def pending(self, alive: Sequence[str], now: float) -> JSONObject:
        """How many are where: see `Board.pending`."""
        able: set[str | None] = set()
        for worker in alive:
            if worker in self._functions:
                able |= {None, *self._functions[worker]}
        unserved: dict[str, float] = {}
        for id in self._queue:
            closure = self._known[id]
            if closure.function not in able:
                name = closure.function or ""
                waited = now - closure.since
                unserved[name] = max(waited, unserved.get(name, 0.0))
        return {
            "queued": len(self._queue),
            "running": dict(self._running),
            "finished": len(self._known) - len(self._queue) - len(self._running),
            "failed": self._error is not None,
            "unserved": unserved,
        }

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        return {
            "known": [
                # Not asdict: it would copy payloads, which nobody changes.
                {f.name: getattr(c, f.name) for f in dataclasses.fields(c)}
                | {"died_with": list(c.died_with)}
                for c in self._known.values()
            ],
            "queue": list(self._queue),
            "error": self._error,
            "error_owner": self._error_owner,
            "generation": self._generation,
        }

    def load_state(self, state: JSONObject, now: float) -> None:
        """Takes over a state; what was running stays with its workers."""
        self._known = {
            saved["id"]: _Closure(**saved | {"since": now}) for saved in state["known"]
        }
        self._queue = deque(state["queue"])
        self._running = {
            c.id: c.worker for c in self._known.values() if c.worker is not None
        }
        self._functions = {}
        self._bytes = sum(closure.size for closure in self._known.values())
        self._error, self._error_owner = state["error"], state["error_owner"]
        self._generation = state["generation"]


def _checked_error(error: object) -> dict[str, str]:
    """The texts of an error, shortened; a traceback's end says most."""
    if not isinstance(error, dict):
        raise BoardError(
            f"error must have type, message and traceback; got {repr(error)[:80]}."
        )
    return {
        "type": str(error.get("type", "Exception"))[:256],
        "message": str(error.get("message", ""))[:_MAX_ERROR_TEXT],
        "traceback": str(error.get("traceback", ""))[-_MAX_ERROR_TEXT:],
    }
