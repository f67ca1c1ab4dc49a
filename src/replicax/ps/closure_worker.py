"""The worker's side of closures: runs them one at a time, on the main thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from replicax._util.types import JSON, JSONObject, PyTree
from replicax.cluster.failure import ExitCode
from replicax.errors import ClusterError
from replicax.ps.closure_errors import CANCELLED, error_from_json, error_to_json
from replicax.ps.metric_deltas import MetricDeltas
from replicax.ps.payloads import FunctionNames, decode, encode, require_size
from replicax.ps.script_sync import ScriptSync
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["ClosureWorker"]

_DEEPEST = 8


class ClosureWorker:
    """A worker that runs the chief's closures.

    Args:
        session: This worker's session.
        strategy: The `ParameterServerStrategy`.
        functions: All functions that the script has scheduled so far.
        meetings: How far this task's script is.
        sums: Its metrics.
        own: Gives this worker's per-worker value of a number.
        refresh: Gives variables the newest values.
    """

    def __init__(
        self,
        session: Session,
        strategy: "ParameterServerStrategy",
        functions: FunctionNames,
        meetings: ScriptSync,
        sums: MetricDeltas,
        own: Callable[[int], PyTree],
        refresh: Callable[[], None],
    ) -> None:
        self._session = session
        self._strategy = strategy
        self._functions = functions
        self._script_sync = meetings
        self._metric_deltas = sums
        self._own = own
        self._refresh = refresh
        self._held: JSONObject | None = None
        self._trained_last: str | None = None
        self._depth = 0

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
        if closure["payload"]["meetings"] > self._script_sync.passed:
            # The chief is past a meeting where this script still is, and what the
            # closure needs comes after it.
            self._held = closure
            return False
        self._depth += 1
        try:
            self._run(closure)
        finally:
            self._depth -= 1
        return True

    def _run(self, closure: JSONObject) -> None:
        name = closure["function"]
        answer: JSONObject

        def told_of(error: BaseException) -> dict[str, str]:
            return error_to_json(error, name, self._session.name, __file__)

        try:
            answer = {"value": self._value_of(name, closure["payload"]["call"])}
        except ClusterError:
            raise  # Of the cluster, not of the closure: another worker shall try.
        except SystemExit as error:
            if error.code != ExitCode.RETRY:  # Another worker would end, too.
                self._session.once("result", id=closure["id"], error=told_of(error))
            raise
        except Exception as error:  # noqa: BLE001  It is the chief's to raise.
            self._strategy.settle()
            self._trained_last = None
            answer = {"error": told_of(error)}
        self._session.once("result", id=closure["id"], **answer)

    def _value_of(self, name: str, call: JSON) -> JSONObject:
        args, kwargs = decode(call, self._resolve)
        if name != self._trained_last:
            self._refresh()
        steps = self._strategy.steps_applied
        self._metric_deltas.begin()
        value = self._functions[name](*args, **kwargs)
        # Its update has to be there when the chief hears that it is done.
        self._strategy.settle()
        # A training step brings the newest values with it.
        self._trained_last = name if self._strategy.steps_applied > steps else None
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
            {
                "type": CANCELLED,
                "message": "its argument, the result of another closure, was cancelled",
                "traceback": "",
            }
        )
