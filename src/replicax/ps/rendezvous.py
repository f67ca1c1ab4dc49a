"""Values by key, barriers, reports and the stop flag that workers share."""

from collections.abc import Callable, Sequence

from replicax._util.types import JSON, JSONObject
from replicax.ps.limits import (
    BoardError,
    LimitError,
    check_size,
    check_text,
    family_of,
    remember,
)

__all__ = ["Rendezvous"]

_MAX_KEYS = 4096
_MAX_KEY_BYTES = 64 * 2**20
_MAX_FAMILIES = 1024
_NEWEST_KEPT = 64
_MAX_REPORT = 64 * 1024
_REPORTS_KEPT = 64
_MAX_BARRIERS = 256
_COMPLETE_KEPT = 1024


class Rendezvous:
    """Keys, barriers, reports and the reason to stop.

    Keys that end in a number, such as `"fit 0/verdict/12"`, are kept for the newest 64
    of their family; other keys for the whole job. Of reports the newest 64 topics
    are kept. A barrier's name is used once: who comes later, such as a worker that was
    restarted, finds it complete.
    """

    def __init__(self) -> None:
        self.stop: str | None = None
        self._values: dict[str, tuple[JSON, int]] = {}
        self._families: dict[str, dict[str, None]] = {}
        self._bytes = 0
        self._barriers: dict[str, list[str]] = {}
        self._complete: dict[str, None] = {}
        self._reports: dict[str, JSONObject] = {}

    def put(self, key: str, value: JSON, *, first: bool) -> JSON:
        """Stores a value and returns the one that stands: see `Board.put`."""
        check_text(key, "key")
        if value is None:
            raise BoardError(f"put: the value of {key!r} must not be null.")
        if first and key in self._values:
            return self._values[key][0]
        size = check_size(value, f"the value of {key!r}", most=_MAX_KEY_BYTES)
        grown = size - self._values.get(key, (None, 0))[1]
        if self._bytes + grown > _MAX_KEY_BYTES:
            raise LimitError(
                f"put: {key!r} has {size} bytes and all keys have {self._bytes}; at "
                f"most {_MAX_KEY_BYTES} are kept."
            )
        if key not in self._values:
            self._make_room(key)
        self._bytes += size - self._values.get(key, (None, 0))[1]
        self._values[key] = (value, size)
        return value

    def _make_room(self, key: str) -> None:
        """Drops what is old of a numbered key's family; bounds the other keys."""
        family, number = family_of(key)
        if number is None:
            lasting = len(self._values) - sum(map(len, self._families.values()))
            if lasting >= _MAX_KEYS:
                raise LimitError(
                    f"put: {lasting} keys are kept, no more are taken; got {key!r}. "
                    f"End keys that come again and again in a number: 'verdict/12'."
                )
            return
        members = self._families.get(family, {})
        dropped = remember(members, key, None, most=_NEWEST_KEPT)
        before = dict(self._families)
        for old in remember(self._families, family, members, most=_MAX_FAMILIES):
            dropped.extend(before[old])
        for old in dropped:
            self._bytes -= self._values.pop(old)[1]

    def get(self, key: str) -> JSON:
        """The value of a key; None: it has none, or no longer."""
        return self._values.get(check_text(key, "key"), (None, 0))[0]

    def arrive(
        self, barrier: str, worker: str, missing: Callable[[Sequence[str]], list[str]]
    ) -> JSONObject:
        """Notes that a worker is there: see `Board.arrive`.

        Args:
            barrier: Its name.
            worker: Who comes, or asks again.
            missing: Gives the workers that are alive and not among those here.
        """
        check_text(barrier, "barrier")
        if barrier in self._complete:
            return {"complete": True, "missing": []}
        if barrier not in self._barriers and len(self._barriers) >= _MAX_BARRIERS:
            raise LimitError(
                f"arrive: workers wait at {_MAX_BARRIERS} barriers already; got "
                f"{barrier!r}."
            )
        arrived = self._barriers.setdefault(barrier, [])
        if worker not in arrived:
            arrived.append(worker)
        absent = missing(arrived)
        if absent:
            return {"complete": False, "missing": absent}
        del self._barriers[barrier]
        remember(self._complete, barrier, None, most=_COMPLETE_KEPT)
        return {"complete": True, "missing": []}

    def report(self, topic: str, worker: str, values: JSON) -> None:
        """Keeps a worker's values under a topic: see `Board.report`."""
        check_text(topic, "topic")
        check_size(values, f"report {topic!r}: values", most=_MAX_REPORT)
        reported = self._reports.get(topic, {}) | {worker: values}
        remember(self._reports, topic, reported, most=_REPORTS_KEPT)

    def reports(self, topic: str) -> JSONObject:
        """The values under a topic, by worker."""
        return dict(self._reports.get(check_text(topic, "topic"), {}))

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        return {
            "stop": self.stop,
            "values": {key: value for key, (value, _) in self._values.items()},
            "barriers": {name: list(who) for name, who in self._barriers.items()},
            "complete": list(self._complete),
            "reports": {name: dict(who) for name, who in self._reports.items()},
        }

    def load_state(self, state: JSONObject) -> None:
        """Takes over a state."""
        self.stop = state["stop"]
        self._values, self._families, self._bytes = {}, {}, 0
        for key, value in state["values"].items():
            self.put(key, value, first=True)
        self._barriers = {name: list(who) for name, who in state["barriers"].items()}
        self._complete = dict.fromkeys(state["complete"])
        self._reports = {name: dict(who) for name, who in state["reports"].items()}
