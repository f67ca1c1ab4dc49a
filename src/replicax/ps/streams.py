"""The work queues of a job by name, and each worker's progress in them.

- Callers hold the board's lock. A queue that has ended never reopens, and still answers
  calls.
- A step is leased to one worker, and never again. It is then held, finished or lost;
  only the same worker can finish a lost step.
- `past` and the open streams add up to the job's totals.
"""

import logging
from collections.abc import Sequence

import msgspec

from replicax._util.types import JSONObject
from replicax.ps.limits import (
    AtLeastOne,
    Count,
    Name,
    RequestError,
    family_of,
    remember,
)
from replicax.ps.tickets import StepTickets

__all__ = ["Stream", "Streams"]

_logger = logging.getLogger("replicax")

_LENGTHS_KEPT = 1024


class Stream(msgspec.Struct):
    """A stream: its name, the settings that it was opened with, and its tickets."""

    name: str
    settings: dict[str, int | None]
    tickets: StepTickets


class _StreamEntry(msgspec.Struct):
    """The write-ahead log's entry of a stream and one worker.

    Each call appends an entry, which therefore omits the other workers' state. `past`
    are the totals of all streams that a newer stream of their family has replaced.
    """

    stream: Stream
    past: dict[str, int]
    worker: str
    held: dict[int, int]
    total: int


class Streams(msgspec.Struct):
    """The newest stream of each family in a job.

    A stream's name ends in a number that increases throughout the job, such as `"fit
    0/epoch/12"`. A new stream ends the family's earlier stream, which all workers have
    completed. So a name is never used again.

    `newest` has the streams by family, `ended` the greatest number of an ended stream
    by family, `lengths` the lengths of the last ended streams. `steps` counts the
    finished steps of all streams by worker, `past` has the totals of ended streams.
    """

    newest: dict[str, Stream] = {}
    ended: dict[str, int] = {}
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
    ) -> JSONObject:
        """Open a stream of step tickets, with equal settings on all workers.

        `limit` is the number of steps; None: until a worker finds the end. Between the
        lease and the end of a step at most `max_staleness` other steps may be finished.
        The answer says whether the stream is `over`, and its `length` if that is known.
        """
        settings = {"limit": limit, "max_staleness": max_staleness}
        if self._is_over(stream):
            return {"over": True, "length": self.lengths.get(stream)}
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
        return {"over": existing.tickets.is_over, "length": existing.tickets.length}

    def claim(
        self,
        stream: Name,
        worker: Name,
        count: AtLeastOne = 1,
        finished: list[Count] = [],  # noqa: B006 - never changed
    ) -> JSONObject:
        """Lease up to `count` tickets for the next steps, after finishing others.

        The answer is `{"indices": [...]}`, or `{"wait": reason}`: claim again soon, or
        `{"over": length, "lost": n, "complete": ...}`: no steps are left; `lost` ones
        were leased by workers that died; `complete` if none is in progress. With
        `finished` it also has the answer of `finish`.
        """
        done = self._finish(stream, worker, finished) if finished else {}
        tickets = self._open_tickets(stream)
        if tickets is None:
            length = self.lengths.get(stream)
            return {"over": length, "lost": 0, "complete": True, **done}
        if tickets.is_over:
            length, is_complete = tickets.length, tickets.is_complete
            over = {"over": length, "lost": tickets.lost, "complete": is_complete}
            return over | done
        leased = tickets.claim(worker, count)
        return {"wait" if isinstance(leased, str) else "indices": leased} | done

    def finish(
        self,
        stream: Name,
        worker: Name,
        indices: list[Count],
        given_up: list[Count] = [],  # noqa: B006 - never changed
    ) -> JSONObject:
        """Record that the updates of leased steps are applied.

        The worker gives up the steps `given_up` without training on them. In the
        answer, `late_indices` are finished steps that the worker no longer held, since
        it counted as dead for a while; `late` says whether there are any.
        """
        tickets = self._open_tickets(stream)
        if given_up and tickets is not None:
            tickets.give_up(worker, given_up)
        return self._finish(stream, worker, indices)

    def _finish(self, stream: str, worker: str, indices: Sequence[int]) -> JSONObject:
        tickets = self._open_tickets(stream)
        if tickets is None:
            return {"late": bool(indices), "late_indices": list(indices)}
        twice = tickets.twice
        late = tickets.finish(worker, indices)
        if tickets.twice > twice:
            _logger.warning(
                "%s: %s trained on steps %s, as other workers did.",
                stream,
                worker,
                late,
            )
        if len(late) < len(indices):
            done = len(indices) - len(late)
            self.steps[worker] = self.steps.get(worker, 0) + done
        return {"late": bool(late), "late_indices": late}

    def end(self, stream: Name, length: Count | None = None) -> JSONObject:
        """Truncate a stream to `length` steps; None: to the steps leased so far.

        Leases of later steps are dropped. The answer's `length` is the least of all
        calls.
        """
        tickets = self._open_tickets(stream)
        if tickets is None:
            return {"length": self.lengths.get(stream)}
        tickets.end(length)
        return {"length": tickets.length}

    def release(self, worker: str) -> int:
        """Revoke all leases of a worker; return the number of steps that are lost."""
        given_up = 0
        for stream in self.newest.values():
            given_up += stream.tickets.release(worker)
        return given_up

    def _opened(self, stream: str) -> Stream | None:
        newest = self.newest.get(family_of(stream)[0])
        return newest if newest is not None and newest.name == stream else None

    def _is_over(self, stream: str) -> bool:
        """Whether a newer stream of its family was opened."""
        family, number = family_of(stream)
        return self.ended.get(family, -1) >= (number or 0)

    def _open_tickets(self, stream: str) -> StepTickets | None:
        """The tickets of a stream; None if a newer one of its family is open."""
        existing = self._opened(stream)
        if existing is not None:
            return existing.tickets
        if self._is_over(stream):
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
            self._retire(previous)
        self.newest[family] = stream
        remember(self.ended, family, (number or 0) - 1, most=_LENGTHS_KEPT)

    def _retire(self, stream: Stream) -> None:
        remember(self.lengths, stream.name, stream.tickets.length, most=_LENGTHS_KEPT)
        for worker in list(stream.tickets.held):
            stream.tickets.release(worker)
        self.past = _with(self.past, stream.tickets)

    def totals(self) -> dict[str, int]:
        """The job's numbers of lost steps, and of steps trained on twice."""
        totals = self.past
        for stream in self.newest.values():
            totals = _with(totals, stream.tickets)
        return totals

    def status(self) -> JSONObject:
        """Every stream's counts, for display."""
        return {x.name: x.tickets.status() for x in self.newest.values()}

    def entry(self, stream: str, worker: str) -> JSONObject | None:
        """The write-ahead log's entry of a stream and a worker; None once it ended."""
        newest = self._opened(stream)
        if newest is None:
            return None
        shared = msgspec.structs.replace(newest.tickets, held={}, waiting=[])
        entry = _StreamEntry(
            stream=msgspec.structs.replace(newest, tickets=shared),
            past=self.past,
            worker=worker,
            held=newest.tickets.held.get(worker, {}),
            total=self.steps.get(worker, 0),
        )
        return msgspec.to_builtins(entry, str_keys=True)

    def restart(self, saved: Sequence[JSONObject]) -> None:
        """Resume in a restarted server, where no worker waits yet.

        `saved` are log entries, in order, that are newer than the restored state.
        """
        held: dict[str, dict[str, dict[int, int]]] = {}  # By stream and worker.
        for value in saved:
            entry = msgspec.convert(value, _StreamEntry, str_keys=True)
            stream, worker = entry.stream, entry.worker
            self.steps[worker] = max(entry.total, self.steps.get(worker, 0))
            held.setdefault(stream.name, {})[worker] = entry.held
            if not self._is_over(stream.name):
                self._add(stream)
                self.past = entry.past
        for stream in self.newest.values():
            stream.tickets.restart(held.get(stream.name))


def _with(totals: dict[str, int], tickets: StepTickets) -> dict[str, int]:
    return {
        "given_up": totals["given_up"] + tickets.lost,
        "twice": totals["twice"] + tickets.twice,
    }
