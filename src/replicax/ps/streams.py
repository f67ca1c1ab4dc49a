"""The work queues of a job, which are called streams: one for each epoch of `fit`.

A step is leased to one worker, and never again. It is then held, finished or lost; only
the same worker can finish a lost step. A stream that has ended never reopens, and still
answers calls. Callers hold the board's lock.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from replicax.ps.limits import (
    AtLeastOne,
    Count,
    Name,
    RequestError,
    family_of,
    remember,
)
from replicax.ps.tickets import StepTickets

__all__ = ["Claimed", "Opened", "Stream", "StreamEntry", "Streams"]

_logger = logging.getLogger("replicax")

_LENGTHS_KEPT = 1024


class Stream(msgspec.Struct):
    """A stream: its name, the settings that it was opened with, and its tickets."""

    name: str
    settings: dict[str, int | None]
    tickets: StepTickets


class StreamEntry(msgspec.Struct):
    """The write-ahead log's entry of a stream and one worker's session.

    `stream` is without leases, and `held` has the leases of this worker only: each call
    appends an entry, so entries must be small. `answers` are the session's last
    answers.
    """

    stream: Stream
    worker: str
    held: dict[int, int]
    session: str | None = None
    answers: dict[str, tuple[int, Any]] = {}


class Opened(msgspec.Struct):
    """Answer of `open`: whether all steps were leased, and their number if known."""

    is_over: bool
    length: int | None


class Claimed(msgspec.Struct, omit_defaults=True):
    """Answer of `claim`: the leased steps, a reason to claim again soon, or the end.

    With `is_over` no steps are left, and `length` is the number of steps.
    """

    indices: list[int] = []
    wait: str | None = None
    is_over: bool = False
    length: int | None = None


class Streams(msgspec.Struct):
    """The newest stream of each family in a job.

    A stream's name ends in a number that increases throughout the job, such as `"fit
    0/epoch/12"`; the text before the number names its family. A new stream ends the
    family's earlier stream, which all workers have completed.

    `newest` maps a family to its stream, `ended` to the greatest number of its ended
    streams. `lengths` has the lengths of the last ended streams.
    """

    newest: dict[str, Stream] = {}
    ended: dict[str, int] = {}
    lengths: dict[str, int | None] = {}

    def open(
        self,
        stream: Name,
        limit: Count | None = None,
        max_staleness: Count | None = None,
    ) -> Opened:
        """Open a stream of step tickets, with equal settings on all workers.

        `limit` is the number of steps; None: until a worker reaches the end of the
        data. Between the lease and the end of a step at most `max_staleness` other
        steps may be finished.
        """
        settings = {"limit": limit, "max_staleness": max_staleness}
        if self._has_ended(stream):
            return Opened(is_over=True, length=self.lengths.get(stream))
        existing = self._opened(stream)
        if existing is None:
            tickets = StepTickets(length=limit, max_staleness=max_staleness)
            existing = Stream(stream, settings, tickets)
            self._add(existing)
        if existing.settings != settings:
            raise RequestError(
                f"The stream {stream!r} is open with {existing.settings}; got "
                f"{settings}. All workers must open it alike."
            )
        return Opened(existing.tickets.is_over, existing.tickets.length)

    def claim(
        self,
        stream: Name,
        worker: Name,
        count: AtLeastOne = 1,
        finished: list[Count] = [],  # noqa: B006 - never changed
    ) -> Claimed:
        """Lease up to `count` next steps, after finishing the steps in `finished`."""
        self.finish(stream, worker, finished)
        tickets = self._open_tickets(stream)
        if tickets is None:
            return Claimed(is_over=True, length=self.lengths.get(stream))
        if tickets.is_over:
            return Claimed(is_over=True, length=tickets.length)
        leased = tickets.claim(worker, count)
        return Claimed(wait=leased) if isinstance(leased, str) else Claimed(leased)

    def finish(self, stream: Name, worker: Name, indices: list[Count]) -> list[int]:
        """Record that leased steps are finished: their updates are applied.

        Returns the steps that the worker no longer held, because it counted as dead for
        a while.
        """
        tickets = self._open_tickets(stream)
        if tickets is None:
            return indices
        late = tickets.finish(worker, indices)
        twice = [i for i in late if i < tickets.next and not tickets.is_beyond_end(i)]
        if twice:
            _logger.warning(
                "%s: %s trained on steps %s, as other workers did.",
                stream,
                worker,
                twice,
            )
        return late

    def end(self, stream: Name, length: Count | None = None) -> int | None:
        """Truncate a stream to `length` steps; None: to the steps leased so far.

        Drops the leases of later steps. Returns the least length of all calls.
        """
        tickets = self._open_tickets(stream)
        if tickets is None:
            return self.lengths.get(stream)
        tickets.end(length)
        return tickets.length

    def release(self, worker: str) -> int:
        """Revoke all leases of a worker; return the number of steps that are lost."""
        return sum(x.tickets.release(worker) for x in self.newest.values())

    def _opened(self, stream: str) -> Stream | None:
        newest = self.newest.get(family_of(stream)[0])
        return newest if newest is not None and newest.name == stream else None

    def _has_ended(self, stream: str) -> bool:
        """Whether a newer stream of its family was opened."""
        family, number = family_of(stream)
        return self.ended.get(family, -1) >= (number or 0)

    def _open_tickets(self, stream: str) -> StepTickets | None:
        """The tickets of a stream; None if a newer one of its family is open."""
        existing = self._opened(stream)
        if existing is not None:
            return existing.tickets
        if self._has_ended(stream):
            return None
        names = [newest.name for newest in self.newest.values()]
        raise RequestError(
            f"There is no stream {stream!r}: open it first, and again if the server "
            f"was restarted. There are {', '.join(names) or 'none'}."
        )

    def _add(self, stream: Stream) -> None:
        """Make a stream the newest of its family, and end the previous one."""
        family, number = family_of(stream.name)
        previous = self.newest.get(family)
        if previous is not None and previous.name != stream.name:
            length = previous.tickets.length
            remember(self.lengths, previous.name, length, most=_LENGTHS_KEPT)
        self.newest[family] = stream
        remember(self.ended, family, (number or 0) - 1, most=_LENGTHS_KEPT)

    def entry(self, stream: str, worker: str) -> StreamEntry | None:
        """The write-ahead log's entry of a stream and a worker; None once it ended."""
        newest = self._opened(stream)
        if newest is None:
            return None
        shared = msgspec.structs.replace(newest.tickets, held={}, waiting=[])
        return StreamEntry(
            stream=msgspec.structs.replace(newest, tickets=shared),
            worker=worker,
            held=newest.tickets.held.get(worker, {}),
        )

    def restart(self, entries: Sequence[StreamEntry]) -> None:
        """Resume in a restarted server, with the log entries since the snapshot."""
        held: dict[str, dict[str, dict[int, int]]] = {}  # By stream and worker.
        for entry in entries:
            held.setdefault(entry.stream.name, {})[entry.worker] = entry.held
            if not self._has_ended(entry.stream.name):
                self._add(entry.stream)
        for stream in self.newest.values():
            stream.tickets.restart(held.get(stream.name))
