"""The queue of closures: the chief schedules them, and free workers run them.

A closure is a function with its arguments, as scheduled by `ClusterCoordinator`. This
is the coordinator's state on the board, without clock and I/O.
"""

import json
import logging
from typing import Any

import msgspec

from replicax._util.types import JSON
from replicax.ps.limits import Name

__all__ = ["Closures", "Outcome", "Pending", "Scheduled", "Taken"]

_logger = logging.getLogger("replicax")

_MAX_BYTES = 256 * 2**20
_MAX_FETCHED = 16 * 2**20
_MAX_ERROR_TEXT = 64 * 1024


class Outcome(msgspec.Struct, omit_defaults=True):
    """The state of a closure, and its `value` if it is done, or its `error`.

    `status` is `queued`, `running`, `done`, `error`, `cancelled`; `unknown` if the
    board has no such closure.
    """

    status: str
    value: Any = None
    error: dict[str, str] | None = None

    @property
    def is_final(self) -> bool:
        """Whether the closure will not run any more."""
        return self.status not in ("queued", "running")


class Scheduled(msgspec.Struct):
    """Answer of `schedule`: whether the closure was queued.

    If not, the queue `is_full`, or an earlier closure `failed` with this error.
    """

    is_full: bool = False
    failed: dict[str, str] | None = None


class Taken(msgspec.Struct):
    """A closure for a worker to run."""

    id: str
    function: str
    payload: Any


class Pending(msgspec.Struct):
    """The number of `queued` closures, and the workers of `running` closures by id."""

    queued: int = 0
    running: dict[str, str] = {}


class _Closure(msgspec.Struct, kw_only=True):
    """A closure; `worker` runs it, or ran it before the server was restarted.

    `owner` scheduled it, in `generation`. `needs` are the closures whose results are
    among its arguments. `died_with` are workers that died while they ran it.
    """

    id: str
    function: str
    payload: Any
    owner: str
    generation: int
    size: int
    needs: list[str] = []
    outcome: Outcome = msgspec.field(default_factory=lambda: Outcome("queued"))
    worker: str | None = None
    died_with: list[str] = []


class Closures(msgspec.Struct, kw_only=True):
    """The closures of a job; finished closures are kept until the chief forgets them.

    If a worker dies, its closure returns to the front of the queue. After
    `1 + max_retries` attempts the closure fails. An error cancels the queued closures
    and is reported once; then closures may be scheduled again. `generation` counts
    these errors. Closures that were scheduled before such an error belong to an earlier
    generation: their errors are not reported.
    """

    max_retries: int = 3
    max_closures: int = 4096
    known: dict[str, _Closure] = {}
    queue: list[str] = []
    running: dict[str, str] = {}
    num_bytes: int = 0
    error: dict[str, str] | None = None
    error_owner: str | None = None
    generation: int = 0

    def schedule(
        self,
        id: Name,
        payload: JSON,
        function: Name,
        worker: Name,
        needs: list[Name] = [],  # noqa: B006 - never changed
    ) -> Scheduled:
        """Queue a closure, as TF's `ClusterCoordinator.schedule`.

        When the scheduling `worker` is replaced or leaves, the closure is dropped. Only
        workers that have registered the `function` get it, after the closures that it
        `needs` are finished.
        """
        size = len(json.dumps(payload))
        if self.error is not None:
            return Scheduled(failed=self.raise_if_failed())
        is_full = len(self.known) >= self.max_closures
        if is_full or self.num_bytes + size > _MAX_BYTES:
            return Scheduled(is_full=True)
        self.known[id] = _Closure(
            id=id,
            function=function,
            payload=payload,
            owner=worker,
            generation=self.generation,
            size=size,
            needs=needs,
        )
        self.num_bytes += size
        self.queue.append(id)
        return Scheduled()

    def take(
        self,
        worker: Name,
        functions: list[Name] = [],  # noqa: B006 - never changed
    ) -> Taken | None:
        """Assign a queued closure to a free worker; None if there is none for it.

        `functions` are all functions that the worker has registered.
        """
        for id in self.queue:
            closure = self.known[id]
            if closure.function in functions and self._is_ready(closure):
                self.queue.remove(id)
                self.running[id] = closure.worker = worker
                closure.outcome = Outcome("running")
                return Taken(id, closure.function, closure.payload)
        return None

    def _is_ready(self, closure: _Closure) -> bool:
        needs = (self.known.get(id) for id in closure.needs)
        return all(need is None or need.outcome.is_final for need in needs)

    def result(
        self,
        id: Name,
        worker: Name,
        value: JSON = None,
        error: dict[str, str] | None = None,
    ) -> bool:
        """Record a closure's outcome: its value, or the error that it raised.

        An error has `type`, `message` and `traceback`; the first error cancels all
        queued closures. Returns False, and ignores the outcome, if the closure is no
        longer this worker's.
        """
        size = len(json.dumps(value))
        if error is not None:
            error = _shortened(error)
        closure = self.known.get(id)
        if closure is None or closure.outcome.is_final or closure.worker != worker:
            return False
        if closure.outcome.status == "queued":  # The server was restarted meanwhile.
            self.queue.remove(id)
        if error is not None:
            self._fail(closure, error)
        else:
            self._set_outcome(closure, Outcome("done", value), size)
        return True

    def _set_outcome(self, closure: _Closure, outcome: Outcome, size: int = 0) -> None:
        """Set a final outcome, and drop the arguments."""
        self.running.pop(closure.id, None)
        self.num_bytes += size - closure.size
        closure.payload, closure.size = None, size
        closure.outcome, closure.worker = outcome, None

    def _fail(self, closure: _Closure, error: dict[str, str]) -> None:
        """Record an error; the first in a generation cancels the queued closures."""
        self._set_outcome(closure, Outcome("error", error=error))
        if closure.generation < self.generation:
            return
        self.error, self.error_owner = error, closure.owner
        self.generation += 1
        for id in self.queue:
            self._set_outcome(self.known[id], Outcome("cancelled"))
        self.queue.clear()

    def _forget(self, id: str) -> None:
        if id in self.queue:
            self.queue.remove(id)
        self.running.pop(id, None)
        self.num_bytes -= self.known.pop(id).size

    def release(self, worker: str, *, died: bool) -> None:
        """Requeue the closures that a worker runs; count an attempt if it `died`."""
        mine = [id for id, holder in self.running.items() if holder == worker]
        # In reverse: inserting each at the front keeps their order.
        for id in reversed(mine):
            closure = self.known[id]
            if died:
                closure.died_with.append(worker)
            if len(closure.died_with) > self.max_retries:
                self._fail(closure, _error_of_deaths(closure))
            elif closure.generation < self.generation:
                self._set_outcome(closure, Outcome("cancelled"))
            else:
                del self.running[id]
                _logger.warning(
                    "%s is gone while it ran %s (%s). The function is retried; servers "
                    "do not apply the updates of the first attempt again.",
                    worker,
                    closure.function,
                    id,
                )
                closure.outcome, closure.worker = Outcome("queued"), None
                self.queue.insert(0, id)

    def restart(self) -> None:
        """Resume in a restarted server: requeue closures that ran at the snapshot.

        A worker may have reported a result after the snapshot, and does not report it
        again, so the closure must be retried. A worker that still runs a closure may
        report the result until another worker takes the closure.
        """
        running = [id for id in self.known if id in self.running]
        for id in running:
            self.known[id].outcome = Outcome("queued")
        self.queue = running + self.queue
        self.running = {}

    def disown(self, owner: str) -> None:
        """Drop all closures, also running ones, of an owner whose process has ended."""
        for id in [i for i, c in self.known.items() if c.owner == owner]:
            self._forget(id)
        if self.error_owner == owner:
            self.error = None

    def raise_if_failed(self) -> dict[str, str] | None:
        """Return the error that was not reported yet, if any, and mark it reported."""
        error, self.error = self.error, None
        return error

    def fetch(
        self,
        ids: list[Name],
        forget: list[Name] = [],  # noqa: B006 - never changed
    ) -> dict[str, Outcome]:
        """Outcomes of closures by id, as TF's `ClusterCoordinator.fetch`.

        The answer has at most 16 MiB; call again for missing ids. `forget` lists
        closures to drop, since the chief has their outcomes. (After a restart, such a
        closure may be unfinished here.)
        """
        for id in forget:
            if id in self.known:
                self._forget(id)
        answer: dict[str, Outcome] = {}
        room = _MAX_FETCHED
        for id in ids:
            room -= self.known[id].size if id in self.known else 0
            if room < 0 and answer:
                break
            closure = self.known.get(id)
            answer[id] = Outcome("unknown") if closure is None else closure.outcome
        return answer

    def pending(self) -> Pending:
        """The unfinished closures."""
        return Pending(len(self.queue), dict(self.running))


def _error_of_deaths(closure: _Closure) -> dict[str, str]:
    return {
        "type": "ClusterError",
        "message": (
            f"{closure.function!r} ({closure.id}) was tried "
            f"{len(closure.died_with)} times, and each time its worker died: "
            f"{', '.join(closure.died_with)}"
        ),
        "traceback": "",
    }


def _shortened(error: dict[str, str]) -> dict[str, str]:
    """Shorten the texts of an error; the end of a traceback is the most useful."""
    return {
        "type": error.get("type", "Exception")[:256],
        "message": error.get("message", "")[:_MAX_ERROR_TEXT],
        "traceback": error.get("traceback", "")[-_MAX_ERROR_TEXT:],
    }
