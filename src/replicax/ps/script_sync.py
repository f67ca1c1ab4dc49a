"""Keeps the scripts of all tasks in step with the chief's, and waits for closures.

Each `join`, `done` and `fetch` of a script is a meeting, and so is a `schedule` that
raises. The chief decides how it ends, and the others' scripts go the same way. A wait
lasts while any closure makes progress.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import keras

from replicax._util.hashes import digest
from replicax._util.listing import listed
from replicax._util.types import JSON, JSONObject
from replicax.engine.consistency import Labels
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session
from replicax.ps.variable_slices import VariableGroup

if TYPE_CHECKING:
    from replicax.ps.variables import RemoteVariables

__all__ = ["AGAIN", "Again", "GroupRequests", "ScriptSync"]

_LOOK_SECONDS = 1.0
_NOW = "coordinator: now"
_KEPT_BYTES = 16 * 2**20
# The board keeps the newest 64 values of a family.
_FAMILY = 64

_Result = TypeVar("_Result")


class Again:
    """What a poll returns when there was progress: the deadline begins anew."""


AGAIN = Again()


class ScriptSync:
    """The meetings of a script, in their order, and the progress of closures meanwhile.

    `passed` says how many meetings this task's script has passed.
    """

    def __init__(self, session: Session) -> None:
        self.passed = 0
        self._session = session
        self._known: dict[str, int] | None = None
        self._kept: deque[tuple[str, int]] = deque()
        self._looked = 0.0
        self._pending: JSONObject = {"queued": 0, "running": {}}
        if session.is_chief:
            self._say()

    def end(self, record: JSONObject) -> None:
        """The chief: the next meeting ends like this."""
        if record:
            key = self._key(self._session.starts)
            self._put(key, record)
            self._kept.append((key, len(json.dumps(record))))
            while sum(size for _, size in self._kept) > _KEPT_BYTES:
                self._put(self._kept.popleft()[0], {"gone": True})
        self.passed += 1
        self._say()

    def ended(self) -> JSONObject | None:
        """The others: how the next meeting ended; None: the chief is not there yet."""
        if self._known is None or self._known["meetings"] <= self.passed:
            self._known = self._session.board("get", key=_NOW)
        if self._known is None or self._known["meetings"] <= self.passed:
            return None
        record = self._session.board("get", key=self._key(self._known["starts"]))
        self.passed += 1
        return record or {}

    def _key(self, starts: int) -> str:
        # A restarted chief begins anew, and its meetings with it.
        block, number = divmod(self.passed, _FAMILY)
        return f"coordinator {starts}.{block}/{number}"

    def _say(self) -> None:
        now = {"starts": self._session.starts, "meetings": self.passed}
        self._put(_NOW, now)

    def _put(self, key: str, value: JSON) -> None:
        self._session.board("put", key=key, value=value, first=False)

    # Closures.

    @property
    def is_over(self) -> bool:
        """Whether nothing was queued or running."""
        return not self._pending["queued"] and not self._pending["running"]

    def look(self) -> bool:
        """Ask the board; whether anything is different."""
        before = self._pending
        self._pending = self._session.board("pending")
        return self._pending != before

    def require_workers(self) -> None:
        """Raise if no worker will ever run what waits: their scripts have ended."""
        if self.is_over or not self.is_time():
            return
        session = self._session
        about = session.board("status")["workers"]
        others = session.workers[1:]
        if others and all(about[name]["ok"] for name in others):
            raise ClusterMismatchError(
                f"{session.name}: the scripts of {listed(others)} have ended, but "
                "functions of the ClusterCoordinator wait for a worker. All tasks must "
                "make the same calls of the coordinator, none of them under "
                "`if strategy.is_chief`: workers run functions in join, done and fetch."
            )

    def is_time(self) -> bool:
        """Whether to ask something that need not be asked always; once a second."""
        now = time.monotonic()
        is_due = now - self._looked >= _LOOK_SECONDS
        if is_due:
            self._looked = now
        return is_due

    def until(self, poll: Callable[[], _Result | Again | None], what: str) -> _Result:
        """Poll until there is a result; it begins anew when `poll` returns `AGAIN`.

        A `ClusterError` says that nothing has happened for the step deadline.
        """
        while True:
            result = self._session.wait(poll, what, self._missing)
            if not isinstance(result, Again):
                return result

    def _missing(self) -> str:
        session = self._session
        if not session.is_chief:
            return f"{session.workers[0]} (the chief)"
        running = sorted(set(self._pending["running"].values()))
        if running:
            return f"{listed(running)} (in a function)"
        others = session.workers[1:]
        alive = [name for name in session.board("alive") if name in others]
        if alive:
            return f"{listed(alive)} (which did not take any)"
        return f"any of {listed(others)} (none is alive)"


class GroupRequests:
    """What workers ask for, in the order of the asking."""

    def __init__(self, session: Session, labels: Labels) -> None:
        self._session = session
        self._labels = labels
        self._next = 0

    def name_of(
        self,
        label: str,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
    ) -> str:
        """A group's name, which is the same whoever needs which group first."""
        named = variables if count is None else [*variables, count]
        return f"{label} {digest(repr([self._labels.of(v) for v in named]), 4)}"

    def ask(
        self,
        group: VariableGroup,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
        rate: keras.Variable | None,
    ) -> None:
        """Have the chief create a group, unless it has or somebody has asked.

        `count` is the number of steps of the optimizer that trains it, `rate` its
        learning rate, where these are variables.
        """
        want = {
            "group": group.to_json(),
            "by": self._session.name,
            "variables": [self._labels.of(v) for v in variables],
            "count": None if count is None else self._labels.of(count),
            "rate": None if rate is None else self._labels.of(rate),
        }
        number = self._next
        while True:
            stands = self._session.board("put", key=_request_key(number), value=want)
            if stands["group"]["name"] == group.name:
                return
            number += 1

    def adopt(self, remote: "RemoteVariables") -> None:
        """Take over what was asked for; the chief creates it first."""
        while (
            want := self._session.board("get", key=_request_key(self._next))
        ) is not None:
            variables = [self._labels.find((p, n)) for p, n in want["variables"]]
            if any(v is None for v in variables):
                if self._session.is_chief:
                    raise _unknown(want, want["variables"][variables.index(None)][0])
                return  # This script is not there yet.
            group = remote.adopt(VariableGroup.from_json(want["group"]), variables)
            if group is None:
                return
            self._next += 1
            group.train(self._find(want["count"]), self._find(want["rate"]))

    def _find(self, label: tuple[str, int] | None) -> keras.Variable | None:
        return None if label is None else self._labels.find((label[0], label[1]))


def _unknown(want: JSONObject, path: str) -> ClusterMismatchError:
    return ClusterMismatchError(
        f"ClusterCoordinator: a closure on {want['by']} trains {path!r}, which "
        "the chief does not have. Create models under strategy.scope() and build "
        "them (a keras.Input, or model.build) before the first "
        "coordinator.schedule, in every task."
    )


def _request_key(number: int) -> str:
    return f"wanted group: {number}"
