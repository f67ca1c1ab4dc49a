"""The work queues of a job by name, and each worker's progress in them."""

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from replicax._util.types import JSONObject
from replicax.ps.limits import (
    BoardError,
    LimitError,
    UnknownStreamError,
    check_count,
    check_text,
    family_of,
    remember,
)
from replicax.ps.tickets import PartTickets, StepTickets, Tickets

__all__ = ["MAX_CLAIM", "Streams"]

_logger = logging.getLogger("replicax")

_MAX_STREAMS = 256
_MAX_FAMILIES = 1024
MAX_CLAIM = 64
_MAX_FINISH = 256
_MAX_PARTS = 65536
_PACE_SECONDS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """What a stream was opened with; the same for all workers."""

    limit: int | None
    start: int
    max_staleness: int | None
    num_parts: int | None
    backups: int

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_count(self.limit, "limit")
        check_count(self.start, "start")
        check_count(self.backups, "backups", most=_MAX_PARTS)
        if self.max_staleness is not None:
            check_count(self.max_staleness, "max_staleness")
        if self.num_parts is not None:
            check_count(self.num_parts, "num_parts", least=1, most=_MAX_PARTS)
        if self.num_parts is not None and self.max_staleness is not None:
            raise BoardError(
                f"A stream with num_parts={self.num_parts} is synchronous, so nothing "
                f"is stale; got max_staleness={self.max_staleness}. Leave one out."
            )
        if self.num_parts is None and self.backups:
            raise BoardError(
                f"backups={self.backups} needs num_parts: only parts of a synchronous "
                f"step are given twice."
            )

    def tickets(self) -> Tickets:
        """A new stream of this kind."""
        if self.num_parts is None:
            return StepTickets(
                limit=self.limit, start=self.start, max_staleness=self.max_staleness
            )
        return PartTickets(
            num_parts=self.num_parts,
            limit=self.limit,
            start=self.start,
            backups=self.backups,
        )


class _Pace:
    """Steps of one worker: all, and per second in the last few seconds."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._seconds: deque[list[int]] = deque(maxlen=_PACE_SECONDS)

    def add(self, count: int, now: float) -> None:
        """Notes steps that were done just now."""
        self.total += count
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append([int(now), 0])
        self._seconds[-1][1] += count

    def per_second(self, now: float) -> float:
        """Steps per second over the last ten seconds."""
        recent = [s for s in self._seconds if s[0] > now - _PACE_SECONDS]
        if not recent:
            return 0.0
        return sum(n for _, n in recent) / max(now - recent[0][0], 1.0)


class Streams:
    """All streams of a job.

    A stream's name ends in a number that increases all through the job, such as
    `"fit 0/epoch/12"`. When it is complete, the complete ones of its family with lower
    numbers are forgotten: they stay over and cannot be opened again. So a name must
    never be used for something new.
    """

    def __init__(self) -> None:
        self._streams: dict[str, tuple[_Settings, Tickets]] = {}
        self._forgotten: dict[str, int] = {}  # Family -> the newest forgotten number.
        self._lengths: dict[str, int | None] = {}  # Of those forgotten last.
        self._paces: dict[str, _Pace] = {}
        self._past = {"given_up": 0, "twice": 0}  # Of forgotten streams.

    def open(self, stream: str, **settings: Any) -> JSONObject:
        """Makes a stream, if it is not there: see `Board.open`."""
        check_text(stream, "stream")
        wanted = _Settings(**settings)
        if self._is_forgotten(stream):
            return {"over": True, "length": self._lengths.get(stream)}
        if stream not in self._streams:
            self._make_room()
            self._streams[stream] = (wanted, wanted.tickets())
            self._forget_before(stream)
        known, tickets = self._streams[stream]
        if known != wanted:
            raise BoardError(
                f"The stream {stream!r} is open with {dataclasses.asdict(known)}; got "
                f"{dataclasses.asdict(wanted)}. All workers must open it alike."
            )
        return {"over": tickets.is_over, "length": tickets.length}

    def _is_forgotten(self, stream: str) -> bool:
        family, number = family_of(stream)
        return stream not in self._streams and self._forgotten.get(family, -1) >= (
            number or 0
        )

    def _tickets(self, stream: str) -> Tickets | None:
        """The stream; None if it was complete and is forgotten."""
        if stream in self._streams:
            return self._streams[stream][1]
        check_text(stream, "stream")
        if self._is_forgotten(stream):
            return None
        raise UnknownStreamError(
            f"There is no stream {stream!r}: open it first, and again if the server "
            f"was restarted. There are {', '.join(self._streams) or 'none'}."
        )

    def claim(self, stream: str, worker: str, count: int) -> JSONObject:
        """Tickets, or that it is over, or why to wait: see `Board.claim`."""
        tickets = self._tickets(stream)
        if tickets is None:
            return {"over": self._lengths.get(stream), "lost": 0, "complete": True}
        if tickets.is_over:
            return {
                "over": tickets.length,
                "lost": tickets.lost,
                "complete": tickets.is_complete,
            }
        given = tickets.claim(worker, count)
        if isinstance(given, str):
            return {"wait": given}
        return {"indices": given}

    def finish(
        self, stream: str, worker: str, indices: Sequence[Any], now: float
    ) -> JSONObject:
        """Notes steps as done: see `Board.finish`."""
        tickets = self._tickets(stream)
        if not isinstance(indices, Sequence) or isinstance(indices, str):
            raise BoardError(f"indices must be a list; got {repr(indices)[:80]}.")
        if len(indices) > _MAX_FINISH:
            raise LimitError(
                f"indices: at most {_MAX_FINISH} steps are finished at a time; got "
                f"{len(indices)}."
            )
        if tickets is None:
            return {"late": bool(indices), "late_indices": list(indices)}
        twice = tickets.twice
        late = tickets.finish(worker, indices)
        if tickets.twice > twice:
            _logger.warning(
                "%s: %s trained on steps %s, which others have too.",
                stream,
                worker,
                late,
            )
        if len(late) < len(indices):
            pace = self._paces.setdefault(worker, _Pace())
            pace.add(len(indices) - len(late), now)
            self._forget_before(stream)
        return {"late": bool(late), "late_indices": late}

    def end(self, stream: str, length: int | None) -> JSONObject:
        """Shortens a stream: see `Board.end`."""
        tickets = self._tickets(stream)
        if length is not None:
            check_count(length, "length")
        if tickets is None:
            return {"length": self._lengths.get(stream)}
        tickets.end(length)
        self._forget_before(stream)
        return {"length": tickets.length}

    def release(self, worker: str) -> int:
        """Takes all tickets away from a worker; returns how many are given up by it."""
        given_up = 0
        for stream in list(self._streams):
            if stream in self._streams:
                is_lost = self._is_asynchronous(stream)
                number = self._streams[stream][1].release(worker)
                given_up += number * is_lost
                self._forget_before(stream)
        return given_up

    def _forget_before(self, stream: str) -> None:
        """Forgets what is complete and older than this stream, if it is complete."""
        if not self._streams[stream][1].is_complete:
            return
        family, number = family_of(stream)
        for other, (_, tickets) in list(self._streams.items()):
            theirs, older = family_of(other)
            is_older = theirs == family and (older or 0) < (number or 0)
            if is_older and tickets.is_complete:
                self._forget(other)

    def _forget(self, stream: str) -> None:
        family, number = family_of(stream)
        _, tickets = self._streams.pop(stream)
        newest = max(self._forgotten.get(family, 0), number or 0)
        remember(self._forgotten, family, newest, most=_MAX_FAMILIES)
        remember(self._lengths, stream, tickets.length, most=_MAX_FAMILIES)
        self._past = _with(self._past, tickets)

    def _make_room(self) -> None:
        if len(self._streams) < _MAX_STREAMS:
            return
        complete = [n for n, (_, t) in self._streams.items() if t.is_complete]
        if not complete:
            raise LimitError(
                f"{_MAX_STREAMS} streams are open and none is complete. End those that "
                f"nobody takes from any more."
            )
        self._forget(complete[0])

    def steps(self, worker: str) -> int:
        """Steps the worker has finished, of all streams."""
        return self._paces[worker].total if worker in self._paces else 0

    def steps_per_second(self, worker: str, now: float) -> float:
        """Its pace over the last ten seconds."""
        return self._paces[worker].per_second(now) if worker in self._paces else 0.0

    def totals(self) -> dict[str, int]:
        """Of the whole job: asynchronous steps that were given up, or done twice."""
        totals = self._past
        for _, tickets in self._streams.values():
            totals = _with(totals, tickets)
        return totals

    def _is_asynchronous(self, stream: str) -> bool:
        found = self._streams.get(stream)
        return found is not None and isinstance(found[1], StepTickets)

    @property
    def names(self) -> list[str]:
        """The streams that are known."""
        return list(self._streams)

    def entry(self, stream: str) -> JSONObject | None:
        """What a restarted server has to know of an asynchronous stream.

        A synchronous one needs none: workers pass over the steps that are done, and the
        servers know which these are.
        """
        if not self._is_asynchronous(stream):
            return None
        settings, tickets = self._streams[stream]
        return {
            "stream": [stream, dataclasses.asdict(settings), tickets.state()],
            "steps": {worker: pace.total for worker, pace in self._paces.items()},
            "past": self._past,
        }

    def status(self) -> JSONObject:
        """Every stream's counts, for people."""
        return {name: tickets.status() for name, (_, tickets) in self._streams.items()}

    def state(self) -> JSONObject:
        """All of it, as JSON values."""
        return {
            "streams": [
                [name, dataclasses.asdict(settings), tickets.state()]
                for name, (settings, tickets) in self._streams.items()
            ],
            "forgotten": dict(self._forgotten),
            "lengths": dict(self._lengths),
            "steps": {worker: pace.total for worker, pace in self._paces.items()},
            "past": self._past,
        }

    def load_state(self, state: JSONObject) -> None:
        """Takes over a state."""
        self._streams = {}
        for stream in state["streams"]:
            self._load(*stream)
        self._forgotten = dict(state["forgotten"])
        self._lengths = dict(state["lengths"])
        self._load_counts(state)

    def load_journal(self, entry: JSONObject) -> None:
        """Takes over an `entry`, which is later than the state."""
        name = entry["stream"][0]
        family, number = family_of(name)
        for other in list(self._streams):
            theirs, older = family_of(other)
            if theirs == family and (older or 0) < (number or 0):
                self._forget(other)  # All workers had come to the end of it.
        self._load(*entry["stream"])
        self._load_counts(entry)

    def _load(self, name: str, settings: JSONObject, saved: JSONObject) -> None:
        opened = _Settings(**settings)
        tickets = opened.tickets()
        tickets.load_state(saved)
        self._streams[name] = (opened, tickets)

    def _load_counts(self, state: JSONObject) -> None:
        self._paces = {worker: _Pace(total) for worker, total in state["steps"].items()}
        self._past = state["past"]


def _with(totals: dict[str, int], tickets: Tickets) -> dict[str, int]:
    # Synchronous parts are given again, so none is given up.
    lost = tickets.lost if isinstance(tickets, StepTickets) else 0
    return {
        "given_up": totals["given_up"] + lost,
        "twice": totals["twice"] + tickets.twice,
    }
