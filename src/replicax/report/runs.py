"""Reads workers' event logs as runs, fits and epochs, for the page."""

import contextlib
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from replicax.report.journal import files_of, folder_of

__all__ = [
    "EpochRecord",
    "Fit",
    "FitBegin",
    "FitEnd",
    "MemoryUse",
    "Run",
    "WorkerRecord",
    "merged",
    "read_run",
]

_STALE_S = 300.0
"""Files of older runs end at least this long before the chief's file begins."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in use, and their maximum since the process began; None: unknown."""

    of: Literal["device", "process"] = "process"
    bytes: int | None = None
    peak_bytes: int | None = None


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """A line of a worker's file."""

    time: float = msgspec.field(default_factory=time.time)


class FitBegin(_Event, frozen=True, kw_only=True, tag="begin"):
    """The first event of a `fit`; `facts` is the configuration, as JSON values."""

    worker: str
    workers: Sequence[str] = ()  # All workers.
    number: int = 1  # Of this call of `fit` in its process, from 1.
    counts_own: bool = False  # Whether `counts` are of this worker only, or of all.
    facts: Mapping[str, object] = {}


class FitEnd(_Event, frozen=True, kw_only=True, tag="end"):
    """The last event of a `fit`, with the measured shares of a step's time."""

    state: Literal["running", "done", "interrupted"]
    error: str = ""
    shares: Mapping[str, float | None] = {}
    diagnosis: str = ""


class EpochRecord(_Event, frozen=True, kw_only=True, tag="epoch"):
    """An epoch of one worker; times in seconds.

    `wall_s` ends when the devices have finished the epoch's steps. `counts` is the
    recorder's `Tally`; `first_*` are of executions that compiled.
    """

    number: int = msgspec.field(name="epoch", default=0)
    logs: Mapping[str, float] = {}
    wall_s: float = 0.0
    counts: Mapping[str, float] = {}
    exchange_s: float = 0.0  # Exchanges with parameter servers.
    memory: MemoryUse = MemoryUse()
    staleness: Mapping[int, int] = {}  # A histogram, with parameter servers.

    @property
    def timed_s(self) -> float:
        """Time of the executions that did not compile."""
        return max(0.0, self.wall_s - self.counts.get("first_s", 0.0))

    @property
    def timed_steps(self) -> float:
        """Steps of the executions that did not compile."""
        return self.counts.get("steps", 0) - self.counts.get("first_steps", 0)

    @property
    def step_s(self) -> float:
        """Time of one step; NaN without a timed step."""
        return self.timed_s / self.timed_steps if self.timed_steps > 0 else math.nan

    @property
    def examples_per_s(self) -> float:
        """Examples per second that this worker counted; NaN without a timed step."""
        examples = self.counts.get("examples", 0) - self.counts.get("first_examples", 0)
        is_timed = self.timed_s > 0 and self.timed_steps > 0
        return examples / self.timed_s if is_timed else math.nan

    @property
    def input_share(self) -> float:
        """Share of the time in which the devices waited for input; NaN: unknown."""
        if self.timed_s <= 0:
            return math.nan
        return min(1.0, self.counts.get("stalled_s", 0.0) / self.timed_s)


_RUNNING = FitEnd(state="running")


@dataclasses.dataclass(kw_only=True)
class Fit:
    """One call of `fit` in one worker."""

    begin: FitBegin
    last: float  # Time of the last event.
    epochs: list[EpochRecord] = dataclasses.field(default_factory=list)
    end: FitEnd = _RUNNING


@dataclasses.dataclass(kw_only=True)
class WorkerRecord:
    """The contents of one worker's event log."""

    name: str
    fits: list[Fit]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a training by all workers."""

    workers: Sequence[WorkerRecord]  # The chief first.
    missing: Sequence[str] = ()  # Workers without a record.

    @property
    def chief(self) -> WorkerRecord:
        """The worker whose logs the page shows."""
        return self.workers[0]


def read_run(page: Path) -> Run:
    """Read the workers' event logs for a page.

    Raises:
        OSError: If there are none, or one cannot be read.
    """
    workers = [_worker(number, file) for number, file in files_of(page)]
    workers = [worker for worker in workers if worker.fits]
    if not workers:
        raise FileNotFoundError(f"there are no events in {folder_of(page)}")
    names = workers[0].fits[-1].begin.workers
    began = workers[0].fits[0].begin.time
    current = [
        worker
        for worker in workers
        if worker.name in names and worker.fits[-1].last > began - _STALE_S
    ]
    present = {worker.name for worker in current}
    return Run(workers=current, missing=[name for name in names if name not in present])


_Events = FitBegin | EpochRecord | FitEnd


def _worker(number: int, file: Path) -> WorkerRecord:
    worker = WorkerRecord(name=f"worker:{number}", fits=[])
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        # A killed process leaves part of a line.
        with contextlib.suppress(ValueError):
            # `strict=False`: the file has NaN, infinities and integer keys as strings.
            event = msgspec.convert(json.loads(line), _Events, strict=False)
            _add(worker, event)
    return worker


def _add(worker: WorkerRecord, event: _Events) -> None:
    if isinstance(event, FitBegin):
        if worker.fits and worker.fits[-1].end.state == "running":
            why = "the process was restarted"
            worker.fits[-1].end = FitEnd(state="interrupted", error=why)
        worker.name = event.worker
        worker.fits.append(Fit(begin=event, last=event.time))
        return
    fit = worker.fits[-1]
    fit.last = max(fit.last, event.time)
    if isinstance(event, EpochRecord):
        fit.epochs.append(event)
    else:
        fit.end = event


def merged(epochs: Sequence[EpochRecord]) -> EpochRecord:
    """Add up epochs; the result has the number and logs of the last.

    An epoch has no timed step if all of its executions compiled, or if other workers
    ran its steps. Such an epoch adds its counts and the time to compile, but no other
    times.
    """
    counts: Counter[str] = Counter()
    staleness: Counter[int] = Counter()
    wall_s = exchange_s = 0.0
    for epoch in epochs:
        staleness.update(epoch.staleness)
        if epoch.timed_steps > 0:
            counts.update(epoch.counts)
            wall_s += epoch.wall_s
            exchange_s += epoch.exchange_s
        else:
            left_out = ("stalled_s", "waits_s")
            counts.update({k: x for k, x in epoch.counts.items() if k not in left_out})
            wall_s += epoch.counts.get("first_s", 0.0)
    return msgspec.structs.replace(
        epochs[-1],
        wall_s=wall_s,
        counts=counts,
        exchange_s=exchange_s,
        staleness=staleness,
    )
