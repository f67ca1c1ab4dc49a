"""The chief's side of closures: schedules them and collects their results."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from replicax._util.types import JSON, JSONObject, PyTree
from replicax.errors import ClusterError
from replicax.ps.closure_errors import CANCELLED
from replicax.ps.payloads import encode, require_size
from replicax.ps.session import Session

__all__ = ["ClosureOutcome", "ClosureOwner"]

_AT_ONCE = 256


class ClosureOutcome:
    """What became of a closure.

    Attributes:
        id: The closure's; None in tasks that did not schedule it.
        value: Its result as JSON values, when it is done.
        error: What it raised, or that it was cancelled; None: nothing, or not yet.
        is_known: Whether it is done, or has failed, or was cancelled.
    """

    def __init__(self, id: str | None) -> None:
        self.id = id
        self.value: JSON = None
        self.error: dict[str, str] | None = None
        self.is_known = False


@dataclasses.dataclass
class _Scheduled:
    """A closure, and the results that it waits for."""

    outcome: weakref.ref[ClosureOutcome]
    needs: list[ClosureOutcome]


class ClosureOwner:
    """What the chief has scheduled.

    Args:
        session: The chief's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0
        self._unknown: dict[str, _Scheduled] = {}
        self._needed: Counter[str] = Counter()
        self._to_forget: list[str] = []

    @property
    def knows_all(self) -> bool:
        """Whether it knows what became of all closures."""
        return not self._unknown

    def pack(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[JSON, list[ClosureOutcome]]:
        """Arguments as JSON values, and the results among them that are not known yet.

        Raises:
            TypeError: For an argument that cannot be sent.
            ValueError: If they are too large.
        """
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
        self._unknown[outcome.id] = _Scheduled(weakref.ref(outcome), needs)
        self._needed.update(need.id for need in needs if need.id is not None)

    def collect(self) -> list[JSON]:
        """Ask the board what became of closures.

        Returns:
            By how much those that are done have changed metrics.

        Raises:
            ClusterError: If the board has forgotten some.
        """
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
        scheduled = self._unknown.pop(id)
        outcome = scheduled.outcome()
        if outcome is not None:
            _tell(outcome, said)
        for need in scheduled.needs:
            assert need.id is not None
            self._needed[need.id] -= 1
            if not self._needed[need.id]:
                del self._needed[need.id]
                if need.is_known:
                    self._to_forget.append(need.id)
        if id not in self._needed:
            self._to_forget.append(id)


def _tell(outcome: ClosureOutcome, said: JSONObject) -> None:
    outcome.is_known = True
    match said["status"]:
        case "done":
            outcome.value = said["value"]["value"]
        case "error":
            outcome.error = said["error"]
        case _:
            outcome.error = {
                "type": CANCELLED,
                "message": "the closure was cancelled, since another one has failed",
                "traceback": "",
            }
