"""How the chief sends closures and workers run them; how their scripts stay in step.

All tasks run the same script. Each call of the coordinator's `join`, `done` and `fetch`
is a synchronization point, and so is a `schedule` that raises: the chief decides the
call's outcome, and the call returns or raises the same in the other tasks.
"""

import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from replicax._private import keras as internals
from replicax._util.listing import listed
from replicax._util.random_state import RandomStream
from replicax._util.types import JSON, JSONObject, PyTree
from replicax.cluster.failure import ExitCode
from replicax.errors import ClusterError, ClusterMismatchError
from replicax.ps.closure_variables import ClosureVariables
from replicax.ps.closures import Outcome, Pending, Taken
from replicax.ps.connection import ServerRefused
from replicax.ps.limits import Disowned
from replicax.ps.payloads import (
    FunctionNames,
    PerWorkerSources,
    PerWorkerValues,
    RemoteValue,
    because_of,
    decode,
    encode,
    error_from_json,
    error_of,
    error_to_json,
    require_size,
)
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["NOT_DONE", "ClosureOwner", "ClosureWorker", "ScriptSync"]

_FETCHED_AT_ONCE = 256
_POSITION = "coordinator: now"
_MOST_RECORD_BYTES = 16 * 2**20
_FAMILY = 64  # The board keeps the 64 newest keys of a family.

NOT_DONE: JSONObject = {"done": False}
"""The outcome of a `done` that is false; not published, because scripts poll `done`."""

_Result = TypeVar("_Result")
_logger = logging.getLogger("replicax")


def _is_disowned(error: BaseException) -> bool:
    """Whether a server refused an update because the closure's chief was replaced."""
    return isinstance(error, ServerRefused) and error.kind == Disowned.__name__


def _as_seen_by_user(
    outcome: Outcome, why_cancelled: str, failed: dict[str, str] | None = None
) -> Outcome:
    """A final outcome without metric deltas; a cancelled closure gets an error.

    `failed` is the error that cancelled the closure.
    """
    if outcome.status == "done":
        return Outcome("done", outcome.value["value"])
    if outcome.error is not None:
        return outcome
    error = error_of("ClosureCancelledError", why_cancelled)
    if failed is not None:
        error = because_of(error, why_cancelled, failed)
    return Outcome("cancelled", error=error)


class ClosureOwner:
    """The closures that the chief has scheduled.

    `unknown` has the closures without a known outcome: by id, a closure's result and
    the results of other closures among its arguments.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.numbers = itertools.count(1)
        self.unknown: dict[str, tuple[RemoteValue, list[RemoteValue]]] = {}
        self._to_forget: list[str] = []
        self._failed: dict[str, str] | None = None  # The last closure's error.

    def pack(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[JSON, list[RemoteValue]]:
        """Serialize arguments as JSON; also return the unknown results among them."""
        needs: list[RemoteValue] = []

        def mark(value: PyTree) -> JSONObject | None:
            if isinstance(value, PerWorkerValues):
                return {"number": value.per_worker_number}
            if not isinstance(value, RemoteValue):
                return None
            if value.outcome is not None:
                return {"outcome": msgspec.to_builtins(value.outcome)}
            needs.append(value)
            return {"id": value.id}

        call = [
            encode(tuple(args), "args", mark),
            encode(dict(kwargs), "kwargs", mark),
        ]
        require_size(call, "the arguments of a closure")
        return call, needs

    def add(self, result: RemoteValue, needs: list[RemoteValue]) -> None:
        """Track a closure that was scheduled."""
        assert result.id is not None
        self.unknown[result.id] = result, needs
        for need in needs:
            need.num_users += 1

    def collect(self) -> list[JSON]:
        """Poll the board for outcomes; return changes of metrics by the closures."""
        ids = list(itertools.islice(self.unknown, _FETCHED_AT_ONCE))
        if not ids and not self._to_forget:
            return []
        forget, self._to_forget = self._to_forget, []
        outcomes = self._session.board("fetch", ids=ids, forget=forget)
        changes: list[JSON] = []
        for id, outcome in outcomes.items():
            if not outcome.is_final:
                continue
            if outcome.status == "unknown":
                raise ClusterError(
                    f"{self._session.name}: ps:0 was restarted and has lost closures "
                    "that were scheduled. Start the job again."
                )
            self._record_outcome(id, outcome)
            if outcome.status == "done":
                changes += outcome.value["sums"]
        return changes

    def _record_outcome(self, id: str, outcome: Outcome) -> None:
        result, needs = self.unknown.pop(id)
        self._failed = outcome.error or self._failed
        why = "the closure was cancelled, because another closure has failed"
        result.outcome = _as_seen_by_user(outcome, why, self._failed)
        for need in needs:
            need.num_users -= 1
        finished = [x for x in (result, *needs) if x.outcome and not x.num_users]
        self._to_forget += [x.id for x in finished if x.id is not None]


class ScriptSync:
    """The synchronization points of a script, and the progress of closures.

    The chief publishes an outcome for each point, at most 16 MiB of them together.
    `passed` counts the points that this task's script has passed. `has_moved` becomes
    true when a closure makes progress.
    """

    def __init__(self, session: Session) -> None:
        self.passed = 0
        self.has_moved = False
        self._session = session
        self._chief = {"starts": 0, "points": 0}  # The last known position.
        self._records: deque[tuple[str, int]] = deque()
        self._pending = Pending()
        if session.is_chief:
            self._publish_position()

    def publish(self, record: JSONObject) -> None:
        """On the chief, publish the outcome of the next synchronization point."""
        if record != NOT_DONE:
            key = self._key(self._session.starts)
            self._put(key, record)
            self._records.append((key, len(json.dumps(record))))
            while sum(size for _, size in self._records) > _MOST_RECORD_BYTES:
                self._put(self._records.popleft()[0], {"gone": True})
        self.passed += 1
        self._publish_position()

    def pass_next(self) -> JSONObject | None:
        """In other tasks, pass the next point, and return its outcome.

        Returns None, and passes no point, until the chief has passed it.
        """
        if self._chief["points"] <= self.passed:
            self._chief = self._session.board("get", key=_POSITION) or self._chief
        if self._chief["points"] <= self.passed:
            return None
        record = self._session.board("get", key=self._key(self._chief["starts"]))
        self.passed += 1
        return record or NOT_DONE

    def _key(self, starts: int) -> str:
        # A restarted chief numbers its points from 0 again.
        block, number = divmod(self.passed, _FAMILY)
        return f"coordinator {starts}.{block}/{number}"

    def _publish_position(self) -> None:
        self._put(_POSITION, {"starts": self._session.starts, "points": self.passed})

    def _put(self, key: str, value: JSON) -> None:
        self._session.board("put", key=key, value=value, overwrite=True)

    # Closures.

    def poll_pending(self) -> None:
        """Poll the board's unfinished closures: a change of them is progress."""
        before = self._pending
        self._pending = self._session.board("pending")
        self.has_moved |= self._pending != before

    def require_workers(self) -> None:
        """Raise if closures wait for workers whose scripts have all ended."""
        session = self._session
        others = session.workers[1:]
        if not others or not session.begin_rare_check():
            return
        if session.board("have_left", workers=others):
            raise ClusterMismatchError(
                f"{session.name}: the scripts of {listed(others)} have ended, but "
                "functions of the ClusterCoordinator wait for a worker. All tasks must "
                "make the same calls of the coordinator, none of them under "
                "`if strategy.is_chief`: workers run functions in join, done and fetch."
            )

    def until(self, poll: Callable[[], _Result | None], what: str) -> _Result:
        """Poll until the result is true; progress of a closure restarts the timeout.

        Raises `ClusterError` after the step timeout without progress.
        """

        def result_or_progress() -> _Result | ScriptSync | None:
            self.has_moved = False
            return poll() or (self if self.has_moved else None)

        while True:
            result = self._session.wait(result_or_progress, what, self._missing)
            if not isinstance(result, ScriptSync):
                return result

    def _missing(self) -> str:
        session = self._session
        if not session.is_chief:
            return f"{session.workers[0]} (the chief)"
        running = sorted(set(self._pending.running.values()))
        if running:
            return f"{listed(running)} (in a function)"
        others = session.workers[1:]
        alive = [name for name in session.board("alive") if name in others]
        if alive:
            return f"{listed(alive)} (without a function)"
        return f"any of {listed(others)} (none is alive)"


class ClosureWorker:
    """A worker that runs the chief's closures, one at a time, on the main thread.

    `functions` are all functions that the script has scheduled so far. `sources` has
    this worker's per-worker values.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        functions: FunctionNames,
        variables: ClosureVariables,
        script_sync: ScriptSync,
        sources: PerWorkerSources,
        random_numbers: RandomStream,
    ) -> None:
        assert strategy.session is not None
        self._session = strategy.session
        self._home = strategy.servers
        self._functions = functions
        self._variables = variables
        self._script_sync = script_sync
        self._sources = sources
        self._postponed: Taken | None = None
        self._last_trained: str | None = None
        # The script's own random numbers are the same in all tasks.
        self.random_numbers = random_numbers

    def run_one(self) -> bool:
        """Run one queued closure, if there is one; return whether it ran."""
        closure = self._postponed or self._session.once(
            "take", functions=self._functions.names
        )
        self._postponed = None
        if closure is None:
            self._last_trained = None  # Other workers may have trained meanwhile.
            return False
        if closure.payload["passed"] > self._script_sync.passed:
            # The chief has passed a point that this script has not. The closure may
            # need objects that the script creates after that point.
            self._postponed = closure
            return False
        self._home.in_closure = True
        self._session.closure = closure.id, Counter()
        try:
            with self.random_numbers:
                self._run(closure)
        finally:
            self._home.in_closure = False
            self._session.closure = None
        return True

    def _run(self, closure: Taken) -> None:
        try:
            answer = self._answer_of(closure)
        except ServerRefused as refused:
            if not _is_disowned(refused):
                raise
            self._last_trained = None
            _logger.warning(
                "%s drops %s: the chief that scheduled it was killed or replaced. "
                "Servers ignore the function's further updates.",
                self._session.name,
                closure.function,
            )
            return
        self._session.once("result", id=closure.id, **answer)

    def _answer_of(self, closure: Taken) -> JSONObject:
        """Run a closure; return its value or the error that it raised."""
        name = closure.function
        try:
            # Only this task creates the closure's objects, so their names must not
            # change the names of the script's objects.
            with internals.names_counted_apart():
                return {"value": self._value_of(name, closure.payload["call"])}
        except ClusterError:
            raise  # Not the closure's own error: another worker retries the closure.
        except SystemExit as error:
            if error.code != ExitCode.RETRY:  # A retry would exit as well.
                description = self._describe(error, name)
                self._session.once("result", id=closure.id, error=description)
            raise
        except Exception as error:  # The chief raises it.
            self._home.settle()
            self._last_trained = None
            if _is_disowned(error):
                raise
            return {"error": self._describe(error, name)}

    def _describe(self, error: BaseException, name: str) -> dict[str, str]:
        return error_to_json(error, name, self._session.name, __file__)

    def _value_of(self, name: str, call: JSON) -> JSONObject:
        args, kwargs = decode(call, self._resolve)
        is_new = name != self._last_trained
        if is_new:
            self._home.refresh()
        is_own = self._session.is_chief  # The chief's metrics need no message.
        if not is_own:
            self._variables.record(is_fresh=is_new)
        steps = self._session.steps
        value = self._functions[name](*args, **kwargs)
        # Updates must be on the servers before the chief reads the result.
        self._home.settle()
        sums = [] if is_own else self._variables.send_changes()
        # After a training step this worker has the newest values.
        self._last_trained = name if self._session.steps > steps else None
        answer = {"value": encode(value, f"the result of {name}"), "sums": sums}
        require_size(answer, f"the result of {name}")
        return answer

    def _resolve(self, marked: JSONObject) -> PyTree:
        """Return the value for a mark of `ClosureOwner.pack`."""
        match marked:
            case {"number": number}:
                return self._sources.own(number)
            case {"id": id}:  # The board waits for this closure's end.
                outcome = self._session.board("fetch", ids=[id])[id]
                why = "its argument, the result of another closure, was cancelled"
                outcome = _as_seen_by_user(outcome, why)
            case _:
                outcome = msgspec.convert(marked["outcome"], Outcome)
        if outcome.error is not None:
            raise error_from_json(outcome.error)
        return decode(outcome.value)
