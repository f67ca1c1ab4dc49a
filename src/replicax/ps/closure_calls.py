"""Closures: the chief packs and schedules them, workers run them, errors return."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from replicax._private import keras as internals
from replicax._util.types import JSON, JSONObject, PyTree
from replicax.cluster.failure import ExitCode
from replicax.errors import ClusterError
from replicax.ps.closure_variables import AssignedVariables, MetricDeltas
from replicax.ps.payloads import (
    FunctionNames,
    PerWorkerSources,
    because_of,
    cancelled,
    decode,
    encode,
    error_from_json,
    error_to_json,
    require_size,
)
from replicax.ps.script_sync import ScriptSync
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["ClosureOwner", "ClosureWorker", "RemoteValue"]

_AT_ONCE = 256
_DEEPEST = 8


class RemoteValue:
    """The result of a scheduled function. `ClusterCoordinator.schedule` returns it.

    As an argument of another `schedule` it becomes the result itself. (TF:
    `tf.distribute.experimental.coordinator.RemoteValue`.)

    Example:
        >>> import replicax as rx
        >>> strategy = rx.ParameterServerStrategy()  # doctest: +SKIP
        >>> coordinator = rx.ClusterCoordinator(strategy)  # doctest: +SKIP
        >>> three = coordinator.schedule(sum, ([1, 2],))  # doctest: +SKIP
        >>> coordinator.schedule(pow, (three, 2)).fetch()  # doctest: +SKIP
        9
    """

    def __init__(
        self, fetch: Callable[["RemoteValue"], PyTree], id: str | None = None
    ) -> None:
        self.id = id  # None in tasks that did not schedule it.
        self.is_known = False
        self.value: JSON = None
        self.error: dict[str, str] | None = None
        self.num_users = 0  # Closures with this argument whose outcome is not known.
        self._fetch = fetch

    def fetch(self) -> PyTree:
        """Wait for the result and return it, like `coordinator.fetch(self)`.

        Raises:
            Exception: That of the function, if it has raised one.
            ClosureCancelledError: If another function's error has cancelled it.
        """
        return self._fetch(self)

    def get(self) -> PyTree:
        """The same as `fetch`."""
        return self._fetch(self)

    def tell(self, said: JSONObject, failed: dict[str, str] | None) -> None:
        """Set the result from the board's answer, when the closure is finished.

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
                self.error = cancelled(why)
                if failed is not None:
                    self.error = because_of(self.error, why, failed)


class ClosureOwner:
    """The closures that the chief has scheduled."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0
        # By id, with the results that each waits for. Nobody may want its own.
        self._unknown: dict[
            str, tuple[weakref.ref[RemoteValue], list[RemoteValue]]
        ] = {}
        self._to_forget: list[str] = []
        self._failed: dict[str, str] | None = None  # The last error.

    @property
    def knows_all(self) -> bool:
        """Whether the outcomes of all closures are known."""
        return not self._unknown

    def pack(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[JSON, list[RemoteValue]]:
        """Serialize arguments as JSON values; list the pending results among them."""
        needs: list[RemoteValue] = []

        def mark(value: PyTree) -> JSONObject | None:
            number = getattr(value, "per_worker_number", None)
            if number is not None:
                return {"kind": "worker", "number": number}
            if not isinstance(value, RemoteValue):
                return None
            if value.error is not None:
                return {"kind": "failed", "error": value.error}
            if value.is_known:
                return {"kind": "value", "value": value.value}
            needs.append(value)
            return {"kind": "remote", "id": value.id}

        items = [encode(x, f"args[{i}]", mark) for i, x in enumerate(args)]
        named = [[k, encode(x, f"kwargs[{k!r}]", mark)] for k, x in kwargs.items()]
        call = [{"$": "tuple", "v": items}, {"$": "dict", "v": named}]
        require_size(call, "the arguments of a closure")
        return call, needs

    def new_id(self) -> str:
        """Return the id of the next closure."""
        self._number += 1
        return f"{self._session.id} {self._number}"

    def add(self, outcome: RemoteValue, needs: list[RemoteValue]) -> None:
        """Track a closure that was scheduled."""
        assert outcome.id is not None
        self._unknown[outcome.id] = weakref.ref(outcome), needs
        for need in needs:
            need.num_users += 1

    def collect(self) -> list[JSON]:
        """Poll the board for outcomes; return the finished closures' metric deltas."""
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

    `functions` are all that the script has scheduled so far, `sources` has this
    worker's per-worker values.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        functions: FunctionNames,
        deltas: MetricDeltas,
        script_sync: ScriptSync,
        sources: PerWorkerSources,
    ) -> None:
        assert strategy.session is not None
        self._session = strategy.session
        self._home = strategy.servers
        self._functions = functions
        self._metric_deltas = deltas
        self._assigned = AssignedVariables(
            strategy.servers.remote, strategy.home.labels
        )
        self._script_sync = script_sync
        self._sources = sources
        self._held: JSONObject | None = None
        self._trained_last: str | None = None
        self._own_used: list[int] = []  # Per-worker values of the closure that runs.
        self._broken: dict[int, dict[str, str]] = {}  # By these: what closures raised.

    @property
    def is_running(self) -> bool:
        """Whether this thread runs a closure."""
        return self._home.num_closures > 0

    def run_one(self) -> bool:
        """Run one queued closure, if any; whether there was one."""
        closure = self._held or self._session.once(
            "take", functions=self._functions.names
        )
        self._held = None
        if closure is None:
            self._trained_last = None  # Others may have gone on in the meantime.
            return False
        if closure["payload"]["points"] > self._script_sync.passed:
            # The chief is past a point where this script still is, and what the closure
            # needs comes after it.
            self._held = closure
            return False
        self._home.num_closures += 1
        outer, self._own_used = self._own_used, []
        try:
            self._run(closure)
        finally:
            self._home.num_closures -= 1
            self._own_used = outer
        return True

    def _run(self, closure: JSONObject) -> None:
        name = closure["function"]
        answer: JSONObject
        try:
            # The names of what it makes do not count: the chief's script makes none.
            with internals.names_counted_apart():
                value = self._value_of(name, closure["payload"]["call"])
            answer = {"value": value}
        except ClusterError:
            raise  # Of the cluster, not of the closure: another worker shall try.
        except SystemExit as error:
            if error.code != ExitCode.RETRY:  # Another worker would end, too.
                told = self._told(error, name)
                self._session.once("result", id=closure["id"], error=told)
            raise
        except Exception as error:  # noqa: BLE001  It is the chief's to raise.
            self._home.settle()
            self._trained_last = None
            answer = {"error": self._told(error, name)}
        self._session.once("result", id=closure["id"], **answer)

    def _told(self, error: BaseException, name: str) -> dict[str, str]:
        """Describe an error for the chief.

        A generator that has raised an error is at its end: so an iterator's end names
        what was raised with it before.
        """
        told = error_to_json(error, name, self._session.name, __file__)
        for number in self._own_used:
            before = self._broken.setdefault(number, told)
            if isinstance(error, StopIteration) and before["type"] != told["type"]:
                why = "an iterator is at its end, after a function that has it raised"
                return because_of(told, why, before)
        return told

    def _value_of(self, name: str, call: JSON) -> JSONObject:
        args, kwargs = decode(call, self._resolve)
        is_new = name != self._trained_last
        if is_new:
            self._home.refresh()
        is_own = self._session.is_chief  # What it assigns is there already.
        if not is_own:
            self._assigned.begin(is_fresh=is_new)
        steps = self._session.steps
        self._metric_deltas.begin()
        value = self._functions[name](*args, **kwargs)
        # Its updates have to be there when the chief hears that it is done.
        self._home.settle()
        if not is_own:
            self._assigned.push()
        # A training step brings the newest values with it.
        self._trained_last = name if self._session.steps > steps else None
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
                return self._sources.own(marked["number"])
            case "value":
                return decode(marked["value"])
            case "failed":
                raise error_from_json(marked["error"])
            case "remote":
                return self._result_of(marked["id"])
        raise ValueError(f"no argument of a closure: {repr(marked)[:80]}")

    def _result_of(self, id: str) -> PyTree:
        """Fetch the result of a closure that this one depends on."""

        def poll() -> JSONObject | None:
            outcome = self._session.board("fetch", ids=[id])[id]
            if outcome["status"] not in ("queued", "running"):
                return outcome
            if self._home.num_closures < _DEEPEST and outcome["status"] == "queued":
                # Its worker has died. It is first in the queue; perhaps all others wait
                # for it as this one does.
                self.run_one()
            return None

        def holder() -> str:
            running = self._session.board("pending")["running"]
            return running.get(id, "a worker that is free")

        outcome = self._session.wait(poll, "the result that a closure needs", holder)
        if outcome["status"] == "done":
            return decode(outcome["value"]["value"])
        if outcome["status"] == "error":
            raise error_from_json(outcome["error"])
        raise error_from_json(
            cancelled("its argument, the result of another closure, was cancelled")
        )
