"""The work queues of a job by name, and each worker's progress in them."""

import logging
from collections.abc import Iterable, Sequence

import msgspec

from replicax._util.types import JSONObject
from replicax.ps.limits import (
    Backups,
    Count,
    Few,
    Name,
    NumParts,
    RequestError,
    Ticket,
    Tickets256,
    family_of,
    remember,
)
from replicax.ps.tickets import PartTickets, StepTickets, Tickets

__all__ = ["Settings", "Streams"]

_logger = logging.getLogger("replicax")

_MAX_STREAMS = 256
_MAX_FAMILIES = 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a stream, equal on all workers."""

    limit: int | None = None
    max_staleness: int | None = None
    num_parts: int | None = None
    backups: int = 0

    def tickets(self) -> Tickets:
        """Make the tickets of a stream; raise for contradictory settings."""
        if self.num_parts is None:
            if self.backups:
                raise RequestError(
                    f"backups={self.backups} needs num_parts: only parts of a "
                    "synchronous step are given twice."
                )
            return StepTickets(length=self.limit, max_staleness=self.max_staleness)
        if self.max_staleness is not None:
            raise RequestError(
                f"A stream with num_parts={self.num_parts} is synchronous, so nothing "
                f"is stale; got max_staleness={self.max_staleness}. Leave one out."
            )
        return PartTickets(
            num_parts=self.num_parts, length=self.limit, backups=self.backups
        )


class _Entry(msgspec.Struct):
    """The write-ahead log's entry of an asynchronous stream and one worker.

    It is written down in each call, and so has nothing of the other workers. `past` are
    the totals of all streams that have a newer one in their family: a restarted server
    forgets these.
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

    def open(
        self,
        stream: Name,
        limit: Count | None = None,
        max_staleness: Count | None = None,
        num_parts: NumParts | None = None,
        backups: Backups = 0,
    ) -> JSONObject:
        """Open a stream of step tickets, with equal settings on all workers.

        `limit` is the number of steps; None: until somebody finds the end. At most
        `max_staleness` other steps may be finished between the moment when a step is
        given and its own end. `num_parts` of a synchronous step; None: steps are
        asynchronous. `backups` parts of a step may be given to a second worker too. The
        answer says whether it is `over`, and its `length` if that is known.
        """
        wanted = Settings(
            limit=limit,
            max_staleness=max_staleness,
            num_parts=num_parts,
            backups=backups,
        )
        if self._is_forgotten(stream):
            return {"over": True, "length": self.lengths.get(stream)}
        if stream not in self.streams:
            tickets = wanted.tickets()
            self._make_room()
            self.streams[stream] = (wanted, tickets)
            self._forget_before(stream)
        known, tickets = self.streams[stream]
        if known != wanted:
            raise RequestError(
                f"The stream {stream!r} is open with {msgspec.to_builtins(known)}; got "
                f"{msgspec.to_builtins(wanted)}. All workers must open it alike."
            )
        return {"over": tickets.is_over, "length": tickets.length}

    def claim(
        self,
        stream: Name,
        worker: Name,
        count: Few = 1,
        finished: Tickets256 = (),  # type: ignore[assignment]
    ) -> JSONObject:
        """Lease up to `count` tickets for the next steps, after finishing others.

        `{"indices": [...]}` are steps, or `[step, part]` in a synchronous stream. Or
        `{"wait": reason}`: ask again soon. Or `{"over": length, "lost": n, "complete":
        ...}`: no tickets are left; `lost` were taken from workers that died (and given
        again, if synchronous); `complete` when none is in progress. With `finished`
        also what `finish` answers.
        """
        done = self._finish(stream, worker, finished) if finished else {}
        tickets = self._tickets(stream)
        if tickets is None:
            over = {"over": self.lengths.get(stream), "lost": 0, "complete": True}
            return over | done
        if tickets.is_over:
            is_complete = tickets.is_complete
            over = {"over": tickets.length, "lost": tickets.lost}
            return over | {"complete": is_complete} | done
        given = tickets.claim(worker, count)
        return {"wait" if isinstance(given, str) else "indices": given} | done

    def finish(
        self,
        stream: Name,
        worker: Name,
        indices: Tickets256,
        given_up: Tickets256 = (),  # type: ignore[assignment]
    ) -> JSONObject:
        """Record that the updates of leased steps are applied.

        `given_up` are others of an asynchronous stream, which the worker will not do.
        `late`: the worker did not hold some of them (it was dead for a while, or a
        backup was faster); `late_indices`: those.
        """
        tickets = self._tickets(stream)
        if given_up and isinstance(tickets, PartTickets):
            raise RequestError(
                f"Parts of the synchronous stream {stream!r} cannot be given up; got "
                f"{given_up[:10]}."
            )
        if given_up and isinstance(tickets, StepTickets):
            tickets.give_up(worker, given_up)
            self._forget_before(stream)
        return self._finish(stream, worker, indices)

    def _finish(
        self, stream: str, worker: str, indices: Sequence[Ticket]
    ) -> JSONObject:
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

    def end(self, stream: Name, length: Count | None = None) -> JSONObject:
        """Truncate a stream: its input has only `length` steps, or it is to stop.

        Tickets from there on are void. None: no further steps than those given already.
        The answer's `length` is the one that holds, the least that anybody gave.
        """
        tickets = self._tickets(stream)
        if tickets is None:
            return {"length": self.lengths.get(stream)}
        tickets.end(length)
        self._forget_before(stream)
        return {"length": tickets.length}

    def release(self, worker: str) -> int:
        """Revoke all leases of a worker; return the number of steps that are lost."""
        given_up = 0
        for stream, (_, tickets) in list(self.streams.items()):
            if stream in self.streams:  # Else it is forgotten by now.
                number = tickets.release(worker)
                given_up += number * isinstance(tickets, StepTickets)
                self._forget_before(stream)
        return given_up

    def _is_forgotten(self, stream: str) -> bool:
        family, number = family_of(stream)
        newest = self.forgotten.get(family, -1)
        return stream not in self.streams and newest >= (number or 0)

    def _tickets(self, stream: str) -> Tickets | None:
        """The stream; None if it was complete and evicted."""
        if stream in self.streams:
            return self.streams[stream][1]
        if self._is_forgotten(stream):
            return None
        raise RequestError(
            f"There is no stream {stream!r}: open it first, and again if the server "
            f"was restarted. There are {', '.join(self.streams) or 'none'}."
        )

    def _forget_before(self, stream: str) -> None:
        """Evict streams that are complete and older than this complete one."""
        if self.streams[stream][1].is_complete:
            for other in self._older(stream):
                if self.streams[other][1].is_complete:
                    self._forget(other)

    def _superseded(self) -> list[str]:
        """The streams that have a newer one in their family."""
        newest: dict[str, tuple[int, str]] = {}
        for name in self.streams:
            family, number = family_of(name)
            newest[family] = max(newest.get(family, (-1, "")), (number or 0, name))
        return [n for n in self.streams if newest[family_of(n)[0]][1] != n]

    def _older(self, stream: str) -> list[str]:
        """The streams of its family with lower numbers."""
        family, number = family_of(stream)
        found = [(name, *family_of(name)) for name in self.streams]
        return [n for n, its, i in found if its == family and (i or 0) < (number or 0)]

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
            raise RequestError(
                f"{_MAX_STREAMS} streams are open and none is complete. End those that "
                f"nobody takes from any more."
            )
        self._forget(complete[0])

    def totals(self) -> dict[str, int]:
        """The job's numbers of asynchronous steps that were lost, or done twice."""
        return self._past_and(self.streams)

    def _past_and(self, streams: Iterable[str]) -> dict[str, int]:
        totals = self.past
        for name in streams:
            totals = _with(totals, self.streams[name][1])
        return totals

    def status(self) -> JSONObject:
        """Every stream's counts, for people."""
        return {name: tickets.status() for name, (_, tickets) in self.streams.items()}

    def entry(self, stream: str, worker: str) -> JSONObject | None:
        """The write-ahead log's entry of an asynchronous stream and a worker.

        A synchronous one needs none: workers pass over the steps that are done, and the
        servers know which these are.
        """
        settings, tickets = self.streams.get(stream, (None, None))
        if settings is None or not isinstance(tickets, StepTickets):
            return None
        entry = _Entry(
            name=stream,
            stream=(
                settings,
                msgspec.structs.replace(tickets, held={}, steps={}, waiting=[]),
            ),
            past=self._past_and(self._superseded()),
            worker=worker,
            held=tickets.held.get(worker, {}),
            steps=tickets.steps.get(worker, 0),
            total=self.steps.get(worker, 0),
        )
        return msgspec.to_builtins(entry, str_keys=True)

    def restart(self, saved: Sequence[JSONObject]) -> None:
        """Resume in a restarted server, where no worker waits yet.

        Takes over entries, in their order, which are later than the state.
        """
        entries = [msgspec.convert(entry, _Entry, str_keys=True) for entry in saved]
        newest: dict[str, list[_Entry]] = {}  # By family, of its newest stream.
        for entry in entries:
            family, number = family_of(entry.name)
            known = family_of(newest[family][0].name)[1] if family in newest else -1
            if (number or 0) > (known or 0) or family not in newest:
                newest[family] = [entry]
            elif number == known:
                newest[family].append(entry)
            total = max(entry.total, self.steps.get(entry.worker, 0))
            self.steps[entry.worker] = total
        for of_family in newest.values():
            last = of_family[-1]
            for other in self._older(last.name):
                self._forget(other)  # All workers had come to the end of it.
            for entry in of_family:
                last.stream[1].load_worker(entry.worker, entry.held, entry.steps)
            self.streams[last.name] = last.stream
        if entries:
            self.past = entries[-1].past
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
