"""The work queues of a job by name, and each worker's progress in them."""

import logging
from collections.abc import Sequence

import msgspec

from replicax._util.types import JSONObject
from replicax.ps.limits import (
    BoardError,
    LimitError,
    UnknownStreamError,
    family_of,
    remember,
)
from replicax.ps.tickets import PartTickets, StepTickets, Ticket, Tickets

__all__ = ["Settings", "Streams"]

_logger = logging.getLogger("replicax")

_MAX_STREAMS = 256
_MAX_FAMILIES = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream was opened with; the same for all workers."""

    limit: int | None = None
    max_staleness: int | None = None
    num_parts: int | None = None
    backups: int = 0

    def tickets(self) -> Tickets:
        """A new stream of this kind.

        Raises:
            BoardError: The settings contradict each other.
        """
        if self.num_parts is None:
            if self.backups:
                raise BoardError(
                    f"backups={self.backups} needs num_parts: only parts of a "
                    "synchronous step are given twice."
                )
            return StepTickets(length=self.limit, max_staleness=self.max_staleness)
        if self.max_staleness is not None:
            raise BoardError(
                f"A stream with num_parts={self.num_parts} is synchronous, so nothing "
                f"is stale; got max_staleness={self.max_staleness}. Leave one out."
            )
        return PartTickets(
            num_parts=self.num_parts,
            length=self.limit,
            backups=self.backups,
        )


class _Entry(msgspec.Struct):
    """What a restarted server has to know of an asynchronous stream, and of a worker.

    It is written down in each call, and so has nothing of the other workers.
    """

    name: str
    stream: tuple[Settings, StepTickets]
    past: dict[str, int]
    worker: str
    held: dict[int, int]
    steps: int
    total: int


class Streams(msgspec.Struct):
    """All streams of a job, by name.

    A stream's name ends in a number that increases all through the job, such as `"fit
    0/epoch/12"`. When it is complete, the complete ones of its family with lower
    numbers are forgotten: they stay over and cannot be opened again. So a name must
    never be used for something new.

    `forgotten` has by family the newest forgotten number, `lengths` those of the last
    ones, `steps` how many each worker has finished, of all streams, `past` the totals
    of the forgotten ones.
    """

    streams: dict[str, tuple[Settings, Tickets]] = {}
    forgotten: dict[str, int] = {}
    lengths: dict[str, int | None] = {}
    steps: dict[str, int] = {}
    past: dict[str, int] = msgspec.field(
        default_factory=lambda: {"given_up": 0, "twice": 0}
    )

    def open(self, stream: str, wanted: Settings) -> JSONObject:
        """Makes a stream, if it is not there: see `Board.open`."""
        if self._is_forgotten(stream):
            return {"over": True, "length": self.lengths.get(stream)}
        if stream not in self.streams:
            tickets = wanted.tickets()
            self._make_room()
            self.streams[stream] = (wanted, tickets)
            self._forget_before(stream)
        known, tickets = self.streams[stream]
        if known != wanted:
            raise BoardError(
                f"The stream {stream!r} is open with {msgspec.to_builtins(known)}; got "
                f"{msgspec.to_builtins(wanted)}. All workers must open it alike."
            )
        return {"over": tickets.is_over, "length": tickets.length}

    def _is_forgotten(self, stream: str) -> bool:
        family, number = family_of(stream)
        return stream not in self.streams and self.forgotten.get(family, -1) >= (
            number or 0
        )

    def _tickets(self, stream: str) -> Tickets | None:
        """The stream; None if it was complete and is forgotten."""
        if stream in self.streams:
            return self.streams[stream][1]
        if self._is_forgotten(stream):
            return None
        raise UnknownStreamError(
            f"There is no stream {stream!r}: open it first, and again if the server "
            f"was restarted. There are {', '.join(self.streams) or 'none'}."
        )

    def claim(self, stream: str, worker: str, count: int) -> JSONObject:
        """Tickets, or that it is over, or why to wait: see `Board.claim`."""
        tickets = self._tickets(stream)
        if tickets is None:
            return {"over": self.lengths.get(stream), "lost": 0, "complete": True}
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

    def finish(self, stream: str, worker: str, indices: Sequence[Ticket]) -> JSONObject:
        """Notes steps as done: see `Board.finish`."""
        tickets = self._tickets(stream)
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
            done = len(indices) - len(late)
            self.steps[worker] = self.steps.get(worker, 0) + done
            self._forget_before(stream)
        return {"late": bool(late), "late_indices": late}

    def give_up(self, stream: str, worker: str, steps: Sequence[Ticket]) -> None:
        """Takes away some steps that a worker will not do: see `Board.finish`."""
        tickets = self._tickets(stream)
        if isinstance(tickets, PartTickets):
            raise BoardError(
                f"Parts of the synchronous stream {stream!r} cannot be given up; got "
                f"{list(steps)[:10]}."
            )
        if tickets is not None:
            tickets.give_up(worker, steps)
            self._forget_before(stream)

    def end(self, stream: str, length: int | None) -> JSONObject:
        """Shortens a stream: see `Board.end`."""
        tickets = self._tickets(stream)
        if tickets is None:
            return {"length": self.lengths.get(stream)}
        tickets.end(length)
        self._forget_before(stream)
        return {"length": tickets.length}

    def release(self, worker: str) -> int:
        """Takes all tickets away from a worker; returns how many are given up by it."""
        given_up = 0
        for stream in list(self.streams):
            if stream in self.streams:
                is_lost = self._is_asynchronous(stream)
                number = self.streams[stream][1].release(worker)
                given_up += number * is_lost
                self._forget_before(stream)
        return given_up

    def _forget_before(self, stream: str) -> None:
        """Forgets what is complete and older than this stream, if it is complete."""
        if not self.streams[stream][1].is_complete:
            return
        family, number = family_of(stream)
        for other, (_, tickets) in list(self.streams.items()):
            theirs, older = family_of(other)
            is_older = theirs == family and (older or 0) < (number or 0)
            if is_older and tickets.is_complete:
                self._forget(other)

    def _forget(self, stream: str) -> None:
        family, number = family_of(stream)
        _, tickets = self.streams.pop(stream)
        newest = max(self.forgotten.get(family, 0), number or 0)
        remember(self.forgotten, family, newest, most=_MAX_FAMILIES)
        remember(self.lengths, stream, tickets.length, most=_MAX_FAMILIES)
        self.past = _with(self.past, tickets)

    def _make_room(self) -> None:
        if len(self.streams) < _MAX_STREAMS:
            return
        complete = [n for n, (_, t) in self.streams.items() if t.is_complete]
        if not complete:
            raise LimitError(
                f"{_MAX_STREAMS} streams are open and none is complete. End those that "
                f"nobody takes from any more."
            )
        self._forget(complete[0])

    def totals(self) -> dict[str, int]:
        """Of the whole job: asynchronous steps that were given up, or done twice."""
        totals = self.past
        for _, tickets in self.streams.values():
            totals = _with(totals, tickets)
        return totals

    def _is_asynchronous(self, stream: str) -> bool:
        found = self.streams.get(stream)
        return found is not None and isinstance(found[1], StepTickets)

    def entry(self, stream: str, worker: str) -> JSONObject | None:
        """What a restarted server has to know of an asynchronous stream and a worker.

        A synchronous one needs none: workers pass over the steps that are done, and the
        servers know which these are.
        """
        settings, tickets = self.streams.get(stream, (None, None))
        if settings is None or not isinstance(tickets, StepTickets):
            return None
        entry = _Entry(
            name=stream,
            stream=(settings, tickets.without_workers()),
            past=self.past,
            worker=worker,
            held=tickets.held.get(worker, {}),
            steps=tickets.steps.get(worker, 0),
            total=self.steps.get(worker, 0),
        )
        return msgspec.to_builtins(entry, str_keys=True)

    def status(self) -> JSONObject:
        """Every stream's counts, for people."""
        return {name: tickets.status() for name, (_, tickets) in self.streams.items()}

    def load_entries(self, saved: Sequence[JSONObject]) -> None:
        """Takes over entries, in their order, which are later than the state."""
        entries = [msgspec.convert(entry, _Entry, str_keys=True) for entry in saved]
        newest: dict[str, list[_Entry]] = {}  # By family, of its newest stream.
        for entry in entries:
            family, number = family_of(entry.name)
            of_family = newest.setdefault(family, [entry])
            known = family_of(of_family[0].name)[1]
            if (number or 0) > (known or 0):
                newest[family] = [entry]
            elif number == known and of_family[0] is not entry:
                of_family.append(entry)
            total = max(entry.total, self.steps.get(entry.worker, 0))
            self.steps[entry.worker] = total
        for family, of_family in newest.items():
            last = of_family[-1]
            for other in list(self.streams):
                theirs, older = family_of(other)
                if theirs == family and (older or 0) < (family_of(last.name)[1] or 0):
                    self._forget(other)  # All workers had come to the end of it.
            settings, tickets = last.stream
            for entry in of_family:
                tickets.load_worker(entry.worker, entry.held, entry.steps)
            self.streams[last.name] = settings, tickets
        if entries:
            self.past = entries[-1].past

    def restart(self) -> None:
        """Goes on in another server, where nobody waits yet."""
        for _, tickets in self.streams.values():
            if isinstance(tickets, StepTickets):
                tickets.waiting = []


def _with(totals: dict[str, int], tickets: Tickets) -> dict[str, int]:
    # Synchronous parts are given again, so none is given up.
    lost = tickets.lost if isinstance(tickets, StepTickets) else 0
    return {
        "given_up": totals["given_up"] + lost,
        "twice": totals["twice"] + tickets.twice,
    }
