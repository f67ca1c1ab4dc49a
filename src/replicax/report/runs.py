"""Reads workers' event logs as runs, fits and epochs, for the page.

Files may be incomplete, of another version or written by hand, so every event is
validated: malformed ones are counted and skipped.
"""

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from replicax.report.journal import folder_of, number_of, read_events

__all__ = [
    "EpochRecord",
    "Fit",
    "Run",
    "WorkerRecord",
    "is_written",
    "merged",
    "read_run",
]

_STALE_S = 300.0
"""A worker's file that ends this long before the chief's begins is outdated."""

_ALL_EPOCHS = 1000
"""Number of first epochs with a line each in a worker's file."""

_AMID_STEPS = ("input_s", "stalled_s", "waits_s")
"""Durations within the time of steps."""


_MOST = sys.float_info.max
_Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
_Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
"""A duration or a count."""


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch of one worker, finished or in progress; times in seconds.

    Attributes:
        number: Keras' number of the epoch, from 0.
        wall_s: Time from its beginning until the devices finished its steps.
        counts: The recorder's tally by name.
        after_s: Time of validation and callbacks after the steps.
        exchange_s: With parameter servers: time of exchanging gradients and values.
        staleness: With parameter servers: histogram of the updates' staleness.
    """

    number: int = msgspec.field(name="epoch", default=0)
    logs: Mapping[str, float] = {}
    wall_s: _Amount = 0.0
    counts: Mapping[str, _Amount] = {}
    after_s: _Amount = 0.0
    exchange_s: _Amount = 0.0
    memory: Mapping[str, object] = {}
    staleness: Mapping[int, int] = {}

    @property
    def timed_s(self) -> float:
        """Time without executions that compiled."""
        return max(0.0, self.wall_s - self.counts.get("first_s", 0.0))

    @property
    def timed_steps(self) -> float:
        """Steps without executions that compiled."""
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


@dataclasses.dataclass(kw_only=True)
class Fit:
    """One call of `fit` in one worker.

    Attributes:
        last: Time of the last event.
        current: The epoch in progress; None: unknown, or none.
        state: `"running"`, `"done"` or `"interrupted"`.
        shares: Shares of a step's time by name, measured at the end.
    """

    facts: Mapping[str, object]
    began: float
    last: float
    epochs: list[EpochRecord] = dataclasses.field(default_factory=list)
    current: EpochRecord | None = None
    state: str = "running"
    error: str = ""
    shares: Mapping[str, object] = dataclasses.field(default_factory=dict)
    diagnosis: str = ""


@dataclasses.dataclass(kw_only=True)
class WorkerRecord:
    """The contents of one worker's event log.

    Attributes:
        num_bad: Number of malformed lines.
    """

    name: str
    fits: list[Fit]
    num_bad: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The records of a training by all workers.

    Attributes:
        workers: The records of the workers, the chief's first.
        missing: Names of workers without a record.
    """

    workers: Sequence[WorkerRecord]
    missing: Sequence[str]

    @property
    def chief(self) -> WorkerRecord | None:
        """The worker whose logs the page shows."""
        return self.workers[0] if self.workers else None


def read_run(page: Path) -> Run:
    """Read the workers' event logs for a page; empty without a folder."""
    folder = folder_of(page)
    files = list(folder.iterdir()) if folder.is_dir() else []
    numbered = [(n, file) for file in files if (n := number_of(file)) is not None]
    workers = [_worker(number, file) for number, file in sorted(numbered)]
    workers = [worker for worker in workers if worker.fits]
    if not workers:
        return Run(workers=[], missing=[])
    named = workers[0].fits[-1].facts.get("workers")
    expected = [str(name) for name in named] if isinstance(named, list) else []
    began = workers[0].fits[0].began
    kept = [
        worker
        for worker in workers
        if (not expected or worker.name in expected)
        and worker.fits[-1].last > began - _STALE_S
    ]
    there = {worker.name for worker in kept}
    return Run(workers=kept, missing=[n for n in expected if n not in there])


def _worker(number: int, file: Path) -> WorkerRecord:
    events, num_bad = read_events(file)
    worker = WorkerRecord(name=f"worker:{number}", fits=[], num_bad=num_bad)
    for event in events:
        try:
            _take(worker, event)
        except (ValueError, IndexError):
            worker.num_bad += 1
    return worker


class _FitEnd(msgspec.Struct):
    """The last event of a `fit`."""

    state: Literal["done", "interrupted"]
    error: str | None = None
    shares: Mapping[str, object] | None = None
    diagnosis: str | None = None


def _take(worker: WorkerRecord, event: Mapping[str, object]) -> None:
    """Add an event to the record; ValueError or IndexError for a malformed one."""
    kind = event.get("event")
    if kind == "begin":
        _begin(worker, event)
        return
    fit = worker.fits[-1]
    when = msgspec.convert(event.get("time", fit.last), _Finite)
    if kind == "end":
        end = msgspec.convert(event, _FitEnd)
        fit.state, fit.error = end.state, end.error or ""
        fit.shares, fit.diagnosis = end.shares or {}, end.diagnosis or ""
    elif kind in ("epoch", "progress"):
        # NaN and infinities are strings, and so are keys that are numbers.
        epoch = msgspec.convert(event, EpochRecord, strict=False)
        fit.current = epoch if kind == "progress" else None
        if kind == "epoch":
            fit.epochs.append(epoch)
    else:
        raise ValueError(f"no such event: {kind!r}")
    fit.last = max(fit.last, when)


def _begin(worker: WorkerRecord, event: Mapping[str, object]) -> None:
    facts = msgspec.convert(event.get("facts", {}), dict[str, object])
    now = msgspec.convert(event.get("time"), _Finite)
    if worker.fits and worker.fits[-1].state == "running":
        worker.fits[-1].state = "interrupted"
        worker.fits[-1].error = worker.fits[-1].error or "the process was restarted"
    worker.name = str(facts.get("worker", worker.name))
    worker.fits.append(Fit(facts=facts, began=now, last=now))


def is_written(number: int) -> bool:
    """Whether the log gets a line at the end of epoch `number`, for a group of epochs.

    The first 1,000 epochs have a line each. Later lines are for 2, 4, 8, ... epochs,
    the same on all workers: a million epochs have about six thousand lines.

    Example:
        >>> [n for n in range(3996, 4016) if is_written(n)]
        [3999, 4007, 4015]
    """
    stride = 1 << (number // _ALL_EPOCHS).bit_length()
    return (number + 1) % stride == 0


def merged(epochs: Sequence[EpochRecord]) -> EpochRecord:
    """Merge epochs into one, with the last one's logs and number.

    An epoch without a timed step (all of its executions compiled, or other workers made
    its steps) adds its counts but no timed duration.
    """
    if not epochs:
        raise ValueError("merged: got no epochs, expected at least one.")
    counts: Counter[str] = Counter()
    staleness: Counter[int] = Counter()
    wall_s = exchange_s = 0.0
    for epoch in epochs:
        staleness.update(epoch.staleness)
        counts.update(epoch.counts)
        if epoch.timed_steps > 0:
            wall_s += epoch.wall_s
            exchange_s += epoch.exchange_s
        else:
            counts.subtract({k: epoch.counts.get(k, 0) for k in _AMID_STEPS})
            wall_s += epoch.counts.get("first_s", 0.0)
    return msgspec.structs.replace(
        epochs[-1],
        wall_s=wall_s,
        counts={name: max(0, count) for name, count in counts.items()},
        after_s=sum(e.after_s for e in epochs),
        exchange_s=exchange_s,
        staleness=dict(staleness),
    )
