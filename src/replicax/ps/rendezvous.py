"""Values by key, barriers and reports that workers share."""

from collections.abc import Callable, Container
from typing import Any

import msgspec

from replicax._util.types import JSON, JSONObject
from replicax.ps.limits import BoardError, LimitError, check_size, family_of, remember

__all__ = ["Rendezvous"]

_MAX_KEYS = 4096
_MAX_KEY_BYTES = 64 * 2**20
_MAX_FAMILIES = 1024
_NEWEST_KEPT = 64
_MAX_REPORT = 2**20
_REPORTS_KEPT = 4
_MAX_BARRIERS = 256
_COMPLETE_KEPT = 1024


class Rendezvous(msgspec.Struct):
    """Keys, barriers and reports.

    Keys that end in a number, such as `"fit 0/verdict/12"`, are kept for the newest 64
    of their family; other keys for the whole job. Of reports the newest 4 topics are
    kept. A barrier's name is used once: who comes later, such as a worker that was
    restarted, finds it complete.
    """

    values: dict[str, tuple[Any, int]] = {}
    families: dict[str, dict[str, None]] = {}
    num_bytes: int = 0
    barriers: dict[str, set[str]] = {}
    complete: dict[str, None] = {}
    topics: dict[str, dict[str, Any]] = {}

    def put(self, key: str, value: JSON, *, first: bool) -> JSON:
        """Stores a value and returns the one that stands: see `Board.put`."""
        if value is None:
            raise BoardError(f"put: the value of {key!r} must not be null.")
        known, old_size = self.values.get(key, (None, 0))
        if first and known is not None:
            return known
        size = check_size(value, f"the value of {key!r}", most=_MAX_KEY_BYTES)
        if self.num_bytes + size - old_size > _MAX_KEY_BYTES:
            raise LimitError(
                f"put: {key!r} has {size} bytes and all keys have {self.num_bytes}; at "
                f"most {_MAX_KEY_BYTES} are kept."
            )
        if known is None:
            self._make_room(key)
        self.num_bytes += size - old_size
        self.values[key] = (value, size)
        return value

    def _make_room(self, key: str) -> None:
        """Drops what is old of a numbered key's family; bounds the other keys."""
        family, number = family_of(key)
        if number is None:
            lasting = len(self.values) - sum(map(len, self.families.values()))
            if lasting >= _MAX_KEYS:
                raise LimitError(
                    f"put: {lasting} keys are kept, no more are taken; got {key!r}. "
                    f"End keys that come again and again in a number: 'verdict/12'."
                )
            return
        members = self.families.get(family, {})
        dropped = remember(members, key, None, most=_NEWEST_KEPT)
        before = dict(self.families)
        for old in remember(self.families, family, members, most=_MAX_FAMILIES):
            dropped.extend(before[old])
        for old in dropped:
            self.num_bytes -= self.values.pop(old)[1]

    def get(self, key: str) -> JSON:
        """The value of a key; None: it has none, or no longer."""
        return self.values.get(key, (None, 0))[0]

    def arrive(
        self, barrier: str, worker: str, missing: Callable[[Container[str]], list[str]]
    ) -> JSONObject:
        """Notes that a worker is there: see `Board.arrive`.

        `missing` gives the workers that are alive and not among those here.
        """
        if barrier in self.complete:
            return {"complete": True, "missing": []}
        if barrier not in self.barriers and len(self.barriers) >= _MAX_BARRIERS:
            raise LimitError(
                f"arrive: workers wait at {_MAX_BARRIERS} barriers already; got "
                f"{barrier!r}."
            )
        arrived = self.barriers.setdefault(barrier, set())
        arrived.add(worker)
        absent = missing(arrived)
        if absent:
            return {"complete": False, "missing": absent}
        del self.barriers[barrier]
        remember(self.complete, barrier, None, most=_COMPLETE_KEPT)
        return {"complete": True, "missing": []}

    def report(self, topic: str, worker: str, values: JSON) -> None:
        """Keeps a worker's values under a topic: see `Board.report`."""
        check_size(values, f"report {topic!r}: values", most=_MAX_REPORT)
        reported = self.topics.get(topic, {}) | {worker: values}
        remember(self.topics, topic, reported, most=_REPORTS_KEPT)
