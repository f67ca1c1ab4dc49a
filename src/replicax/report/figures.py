"""Chooses the charts of a report, and their curves by worker."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from replicax._util.units import decimal, seconds
from replicax.report.charts import Chart, Point, Series, chart_of, plain
from replicax.report.runs import EpochRecord, Fit, Run, WorkerRecord

__all__ = [
    "counts_own",
    "mean_staleness",
    "memory_bytes",
    "metric_charts",
    "number_of_fit",
    "speed_charts",
]

_MOST_WORKERS = 6


class _EpochPositions:
    """Positions of epochs on the axis: each `fit` after the one before.

    A `fit` with a later `initial_epoch` continues the one before.
    """

    def __init__(self, fits: Sequence[Fit]) -> None:
        self._offsets: dict[int, int] = {}
        self.borders: list[tuple[float, str]] = []
        end = offset = 0
        for i, fit in enumerate(fits):
            first = fit.epochs[0].number if fit.epochs else 0
            number = number_of_fit(fit)
            if i and not first and number not in self._offsets:
                offset = end
                self.borders.append((offset + 0.5, f"fit {number}"))
            self._offsets.setdefault(number, offset)
            end = max([end, *(offset + e.number + 1 for e in fit.epochs)])

    def of(self, fit: Fit, epoch: EpochRecord) -> float:
        return float(self._offsets.get(number_of_fit(fit), 0) + epoch.number + 1)


def number_of_fit(fit: Fit) -> int:
    """The index of a call of `fit` in its process, from 1."""
    number = fit.facts.get("fit")
    return number if isinstance(number, int) else 1


def metric_charts(run: Run) -> list[Chart]:
    """Make a chart for each loss and metric, training and validation together."""
    if run.chief is None:
        return []
    fits = run.chief.fits
    positions = _EpochPositions(fits)
    names = dict.fromkeys(n for f in fits for e in f.epochs for n in e.logs)
    bases = list(dict.fromkeys(name.removeprefix("val_") for name in names))
    bases.sort(key=lambda base: base != "loss")  # The loss first.
    charts = []
    for base in bases:
        labels = [(base, "training"), (f"val_{base}", "validation")]
        series = [
            Series(name=label, parts=_parts(fits, positions, _log(name)))
            for name, label in labels
            if name in names
        ]
        title = base if base in names else f"{base} (validation)"
        charts.append(
            chart_of(title, series, borders=positions.borders, note=_gaps(series))
        )
    return [chart for chart in charts if chart is not None]


def _gaps(series: Sequence[Series]) -> str:
    """Describe the values that are not finite, which no chart can draw."""
    epochs = sorted({x for s in series for x, y in s.points if not math.isfinite(y)})
    if not epochs:
        return ""
    number = "1 epoch" if len(epochs) == 1 else f"{len(epochs):,} epochs"
    return f"Not finite in {number}, first in epoch {epochs[0]:,.0f}."


def _log(name: str) -> Callable[[EpochRecord], float | None]:
    return lambda epoch: epoch.logs.get(name)


def speed_charts(run: Run) -> list[Chart]:
    """Make the charts of throughput, step time, input wait, memory and staleness."""
    if run.chief is None:
        return []
    positions = _EpochPositions(run.chief.fits)
    epochs = [e for w in run.workers for f in w.fits for e in f.epochs]
    is_process = any(e.memory.get("of") == "process" for e in epochs)
    most = max((b for b in map(memory_bytes, epochs) if math.isfinite(b)), default=0.0)
    # For round numbers at the axis.
    size, name = (2.0**30, "GiB") if most >= 2**31 else (2.0**20, "MiB")

    def of_workers(value: Callable[[EpochRecord], float]) -> list[Series]:
        return _by_worker(run, positions, value)

    charts: list[tuple[str, list[Series], Callable[[float], str], str]] = [
        (
            "Throughput",
            [Series(name="all workers", parts=_throughput(run, positions))],
            lambda y: f"{decimal(y)}/s".replace(" /", "/"),
            "Examples per second, of all workers, without the time to compile.",
        ),
        (
            "Time of a step",
            of_workers(lambda e: e.step_s),
            lambda y: seconds(y) if y else "0",
            "",
        ),
        (
            "Waiting for input",
            of_workers(lambda e: e.input_share),
            lambda y: f"{100 * y:.3g}%",
            "Share of the time in which the devices had nothing to compute.",
        ),
        (
            "Memory of the process" if is_process else "Memory of the fullest device",
            of_workers(lambda e: memory_bytes(e) / size),
            lambda y: f"{y:.4g} {name}",
            "",
        ),
    ]
    if any(e.staleness for e in epochs):
        charts.append(
            (
                "Staleness of gradients",
                of_workers(lambda e: mean_staleness(e.staleness)),
                plain,
                "Mean number of updates by others between values and gradients.",
            )
        )
    drawn = [
        chart_of(
            title,
            series,
            unit=unit,
            from_zero=True,
            borders=positions.borders,
            note=note,
        )
        for title, series, unit, note in charts
    ]
    return [chart for chart in drawn if chart is not None]


def memory_bytes(epoch: EpochRecord) -> float:
    """Memory in use at the end of an epoch; the peak, where that is unknown."""
    for name in ("bytes", "peak_bytes"):
        value = epoch.memory.get(name)
        if isinstance(value, int | float):
            return float(value)
    return math.nan


def mean_staleness(staleness: Mapping[int, int]) -> float:
    """Mean of a histogram; NaN for an empty one."""
    count = sum(staleness.values())
    return sum(k * n for k, n in staleness.items()) / count if count else math.nan


def _parts(
    fits: Sequence[Fit],
    positions: _EpochPositions,
    value: Callable[[EpochRecord], float | None],
) -> list[list[Point]]:
    parts = []
    for fit in fits:
        points = [(positions.of(fit, e), value(e)) for e in fit.epochs]
        parts.append([(x, y) for x, y in points if y is not None])
    return [part for part in parts if part]


def _has_finite(part: Sequence[Point]) -> bool:
    return any(math.isfinite(y) for _, y in part)


def _by_worker(
    run: Run, positions: _EpochPositions, value: Callable[[EpochRecord], float]
) -> list[Series]:
    """Make a curve for each worker; for many workers minimum, median and maximum."""
    curves = {w.name: _parts(w.fits, positions, value) for w in run.workers}
    curves = {
        name: parts for name, parts in curves.items() if any(map(_has_finite, parts))
    }
    if len(curves) <= _MOST_WORKERS:
        return [Series(name=name, parts=parts) for name, parts in curves.items()]
    ys_by_x: dict[float, list[float]] = {}
    for parts in curves.values():
        for x, y in (point for part in parts for point in part):
            if math.isfinite(y):
                ys_by_x.setdefault(x, []).append(y)
    kinds: list[tuple[str, Callable[[list[float]], float]]] = [
        ("highest", max),
        ("middle", statistics.median),
        ("lowest", min),
    ]
    return [
        Series(
            name=f"{name} of {len(curves)} workers",
            parts=[[(x, pick(ys)) for x, ys in sorted(ys_by_x.items())]],
        )
        for name, pick in kinds
    ]


def _throughput(run: Run, positions: _EpochPositions) -> list[list[Point]]:
    assert run.chief is not None
    if not counts_own(run.chief):
        return _parts(run.chief.fits, positions, lambda e: e.examples_per_s)
    total: dict[tuple[int, int], float] = {}
    for worker in run.workers:
        # A restarted worker may repeat an epoch: the last one counts.
        rates = {
            (number_of_fit(f), e.number): e.examples_per_s
            for f in worker.fits
            for e in f.epochs
        }
        for key, rate in rates.items():
            if math.isfinite(rate):
                total[key] = total.get(key, 0.0) + rate
    return [
        [
            (positions.of(fit, e), total.get((number_of_fit(fit), e.number), math.nan))
            for e in fit.epochs
        ]
        for fit in run.chief.fits
        if fit.epochs
    ]


def counts_own(worker: WorkerRecord) -> bool:
    """Whether a worker counts its own examples, not those of all workers."""
    return worker.fits[-1].facts.get("examples_of") == "own"
