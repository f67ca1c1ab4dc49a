"""Closures: the chief packs and schedules them, workers run them, errors return."""

import builtins
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from replicax import errors
from replicax._util.types import JSON, JSONObject, PyTree
from replicax.cluster.failure import ExitCode
from replicax.errors import ClusterError
from replicax.ps.payloads import (
    FunctionNames,
    MetricDeltas,
    decode,
    encode,
    require_size,
)
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = [
    "ClosureCancelledError",
    "ClosureError",
    "ClosureOutcome",
    "ClosureOwner",
    "ClosureWorker",
    "error_from_json",
    "error_to_json",
]

_CANCELLED = "ClosureCancelledError"
_AT_ONCE = 256
_DEEPEST = 8


class ClosureError(RuntimeError):
    """A closure has raised an error that is no builtin exception."""


class ClosureCancelledError(ClosureError):
    """A closure was not run, since one before it has raised an error."""


def error_to_json(
    error: BaseException, function: str, worker: str, caller: str
) -> dict[str, str]:
    """What a worker tells of an error: its type, message and traceback.

    The first frames, of the file `caller` that called the closure, say nothing.
    """
    shown = traceback.TracebackException.from_exception(error)
    while shown.stack and shown.stack[0].filename == caller:
        del shown.stack[0]
    return {
        "type": type(error).__qualname__,
        "message": str(error),
        "traceback": f"In {function} on {worker}:\n{''.join(shown.format())}",
    }


def error_from_json(error: dict[str, str]) -> Exception:
    """The error to raise: of the original type, if that is builtin or of replicax.

    Example:
        >>> error_from_json({"type": "KeyError", "message": "7", "traceback": "At 1."})
        KeyError('7')
    """
    made = _error(error)
    if error["traceback"]:
        made.add_note(error["traceback"].rstrip())
    return made


def _error(error: dict[str, str]) -> Exception:
    name, message = error["type"], error["message"]
    if name == _CANCELLED:
        return ClosureCancelledError(message)
    if name == "StopIteration":
        # As itself it would end loops and generators that it passes.
        return ClosureError(
            f"StopIteration: {message or 'an iterator is at its end'}. Let datasets of "
            "closures repeat, and decide by the number of steps when to stop."
        )
    kind = getattr(builtins, name, None) or getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # Such as UnicodeDecodeError, which wants five arguments.
            pass
    return ClosureError(f"{name}: {message}")


def _cancelled(message: str) -> dict[str, str]:
    return {"type": _CANCELLED, "message": message, "traceback": ""}


def _because_of(
    error: dict[str, str], message: str, cause: dict[str, str]
) -> dict[str, str]:
    """An error that is only what comes of another one, which its message names."""
    return error | {
        "message": f"{message}: {cause['type']}: {cause['message']}",
        "traceback": f"{error['traceback']}\n{cause['traceback']}".lstrip(),
    }


class ClosureOutcome:
    """What became of a closure, when `is_known`: its `value`, or its `error`.

    `value` is JSON. `id` is None in tasks that did not schedule it. `num_users`
    closures whose outcome is not known have it as an argument.
    """

    def __init__(self, id: str | None) -> None:
        self.id = id
        self.value: JSON = None
        self.error: dict[str, str] | None = None
        self.is_known = False
        self.num_users = 0

    def tell(self, said: JSONObject, failed: dict[str, str] | None) -> None:
        """Take over what the board says, when the closure is finished.

        `failed` is the last error of any closure, for one that was cancelled.
        """
        self.is_known = True
        match said["status"]:
            case "done":
                self.value = said["value"]["value"]
            case "error":
                self.error = said["error"]
            case _:
                why = "the closure was cancelled, since another one has failed"
                self.error = _cancelled(why)
                if failed is not None:
                    self.error = _because_of(self.error, why, failed)


class ClosureOwner:
    """The closures that the chief has scheduled."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0
        # By id, with the results that each waits for. Nobody may want its own.
        self._unknown: dict[
            str, tuple[weakref.ref[ClosureOutcome], list[ClosureOutcome]]
        ] = {}
        self._to_forget: list[str] = []
        self._failed: dict[str, str] | None = None  # The last error.

    @property
    def knows_all(self) -> bool:
        """Whether it knows what became of all closures."""
        return not self._unknown

    def pack(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[JSON, list[ClosureOutcome]]:
        """Arguments as JSON values, and the results among them that are not known."""
        needs: list[ClosureOutcome] = []

        def mark(value: PyTree) -> JSONObject | None:
            number = getattr(value, "per_worker_number", None)
            if number is not None:
                return {"kind": "worker", "number": number}
            outcome = getattr(value, "closure_outcome", None)
            if not isinstance(outcome, ClosureOutcome):
                return None
            if outcome.error is not None:
                return {"kind": "failed", "error": outcome.error}
            if outcome.is_known:
                return {"kind": "value", "value": outcome.value}
            needs.append(outcome)
            return {"kind": "remote", "id": outcome.id}

        items = [encode(x, f"args[{i}]", mark) for i, x in enumerate(args)]
        named = [[k, encode(x, f"kwargs[{k!r}]", mark)] for k, x in kwargs.items()]
        call = [{"$": "tuple", "v": items}, {"$": "dict", "v": named}]
        require_size(call, "the arguments of a closure")
        return call, needs

    def new_outcome(self) -> ClosureOutcome:
        """Of the next closure."""
        self._number += 1
        return ClosureOutcome(f"{self._session.id} {self._number}")

    def add(self, outcome: ClosureOutcome, needs: list[ClosureOutcome]) -> None:
        """A closure is scheduled."""
        assert outcome.id is not None
        self._unknown[outcome.id] = weakref.ref(outcome), needs
        for need in needs:
            need.num_users += 1

    def collect(self) -> list[JSON]:
        """Ask the board for outcomes; how those that are done have changed metrics."""
        ids = list(islice(self._unknown, _AT_ONCE))
        if not ids and not self._to_forget:
            return []
        found = self._session.board("fetch", ids=ids, forget=self._to_forget)
        self._to_forget = []
        changes: list[JSON] = []
        for id, said in found.items():
            if said["status"] in ("queued", "running"):
                continue
            if said["status"] == "unknown":
                raise ClusterError(
                    f"{self._session.name}: ps:0 was restarted and has lost closures "
                    "that were scheduled. Start the job again."
                )
            self._settle(id, said)
            if said["status"] == "done":
                changes += said["value"]["sums"]
        return changes

    def _settle(self, id: str, said: JSONObject) -> None:
        found, needs = self._unknown.pop(id)
        outcome = found()
        self._failed = said.get("error", self._failed)
        if outcome is not None:
            outcome.tell(said, self._failed)
        if outcome is None or not outcome.num_users:
            self._to_forget.append(id)
        for need in needs:
            need.num_users -= 1
            if need.is_known and not need.num_users and need.id is not None:
                self._to_forget.append(need.id)


class ClosureWorker:
    """A worker that runs the chief's closures, one at a time, on the main thread.

    `functions` are all that the script has scheduled so far. `passed` says how many
    meetings with the chief this task's script has passed, `own` gives this worker's
    per-worker value of a number, `refresh` gives variables the newest values.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        functions: FunctionNames,
        deltas: MetricDeltas,
        passed: Callable[[], int],
        own: Callable[[int], PyTree],
        refresh: Callable[[], None],
    ) -> None:
        assert strategy.session is not None
        self._session = strategy.session
        self._home = strategy.servers
        self._functions = functions
        self._metric_deltas = deltas
        self._passed = passed
        self._own = own
        self._refresh = refresh
        self._held: JSONObject | None = None
        self._trained_last: str | None = None
        self._depth = 0
        self._own_used: list[int] = []  # Per-worker values of the closure that runs.
        self._broken: dict[int, dict[str, str]] = {}  # By these: what closures raised.

    @property
    def is_running(self) -> bool:
        """Whether this is inside a closure."""
        return self._depth > 0

    def run_one(self) -> bool:
        """Run a closure, if there is one for this worker; whether there was."""
        closure = self._held or self._session.once(
            "take", functions=self._functions.names
        )
        self._held = None
        if closure is None:
            self._trained_last = None  # Others may have gone on in the meantime.
            return False
        if closure["payload"]["meetings"] > self._passed():
            # The chief is past a meeting where this script still is, and what the
            # closure needs comes after it.
            self._held = closure
            return False
        self._depth += 1
        outer, self._own_used = self._own_used, []
        try:
            self._run(closure)
        finally:
            self._depth -= 1
            self._own_used = outer
        return True

    def _run(self, closure: JSONObject) -> None:
        name = closure["function"]
        answer: JSONObject

        def told_of(error: BaseException) -> dict[str, str]:
            return self._told(error, name)

        try:
            answer = {"value": self._value_of(name, closure["payload"]["call"])}
        except ClusterError:
            raise  # Of the cluster, not of the closure: another worker shall try.
        except SystemExit as error:
            if error.code != ExitCode.RETRY:  # Another worker would end, too.
                self._session.once("result", id=closure["id"], error=told_of(error))
            raise
        except Exception as error:  # noqa: BLE001  It is the chief's to raise.
            self._home.settle()
            self._trained_last = None
            answer = {"error": told_of(error)}
        self._session.once("result", id=closure["id"], **answer)

    def _told(self, error: BaseException, name: str) -> dict[str, str]:
        """What the chief is told of an error.

        A generator that has raised an error is at its end: so an iterator's end names
        what was raised with it before.
        """
        told = error_to_json(error, name, self._session.name, __file__)
        for number in self._own_used:
            before = self._broken.setdefault(number, told)
            if isinstance(error, StopIteration) and before["type"] != told["type"]:
                why = "an iterator is at its end, after a function that has it raised"
                return _because_of(told, why, before)
        return told

    def _value_of(self, name: str, call: JSON) -> JSONObject:
        args, kwargs = decode(call, self._resolve)
        if name != self._trained_last:
            self._refresh()
        steps = self._home.steps_applied
        self._metric_deltas.begin()
        value = self._functions[name](*args, **kwargs)
        # Its update has to be there when the chief hears that it is done.
        self._home.settle()
        # A training step brings the newest values with it.
        self._trained_last = name if self._home.steps_applied > steps else None
        is_own = self._session.is_chief  # Its metrics are there already.
        answer = {
            "value": encode(value, f"the result of {name}"),
            "sums": [] if is_own else self._metric_deltas.changes(),
        }
        require_size(answer, f"the result of {name}")
        return answer

    def _resolve(self, marked: JSONObject) -> PyTree:
        match marked["kind"]:
            case "worker":
                self._own_used.append(marked["number"])
                return self._own(marked["number"])
            case "value":
                return decode(marked["value"])
            case "failed":
                raise error_from_json(marked["error"])
            case "remote":
                return self._result_of(marked["id"])
        raise ValueError(f"no argument of a closure: {repr(marked)[:80]}")

    def _result_of(self, id: str) -> PyTree:
        """The result of a closure that this one depends on."""

        def poll() -> JSONObject | None:
            outcome = self._session.board("fetch", ids=[id])[id]
            if outcome["status"] not in ("queued", "running"):
                return outcome
            if self._depth < _DEEPEST and outcome["status"] == "queued":
                # Its worker has died. It is first in the queue; perhaps all others wait
                # for it as this one does.
                self.run_one()
            return None

        outcome = self._session.wait(
            poll, "the result that a closure needs", lambda: "the worker that has it"
        )
        if outcome["status"] == "done":
            return decode(outcome["value"]["value"])
        if outcome["status"] == "error":
            raise error_from_json(outcome["error"])
        raise error_from_json(
            _cancelled("its argument, the result of another closure, was cancelled")
        )
