"""Chooses the charts of a report, and their curves by worker."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from replicax._util.units import decimal, seconds
from replicax.report.charts import Chart, Point, Series, chart_of, plain
from replicax.report.runs import EpochRecord, Fit, Run

__all__ = ["mean_staleness", "memory_bytes", "metric_charts", "speed_charts"]

_MAX_WORKER_CURVES = 6


class _EpochAxis:
    """Positions of epochs on the x axis, where each `fit` follows the previous one.

    A `fit` with an `initial_epoch` continues the epoch numbers of the previous one.
    `borders` has the position before each further `fit`, and its name.
    """

    def __init__(self, fits: Sequence[Fit]) -> None:
        self._offsets: dict[int, int] = {}
        self.borders: list[tuple[float, str]] = []
        end = offset = 0
        for i, fit in enumerate(fits):
            first = fit.epochs[0].number if fit.epochs else 0
            number = fit.begin.number
            if i and not first and number not in self._offsets:
                offset = end
                self.borders.append((offset + 0.5, f"fit {number}"))
            self._offsets.setdefault(number, offset)
            end = max([end, *(offset + e.number + 1 for e in fit.epochs)])

    def position(self, fit: Fit, epoch: EpochRecord) -> float:
        return float(self._offsets.get(fit.begin.number, 0) + epoch.number + 1)


def metric_charts(run: Run) -> list[Chart]:
    """Make a chart for each loss and metric, training and validation together."""
    fits = run.chief.fits
    axis = _EpochAxis(fits)
    names = dict.fromkeys(n for f in fits for e in f.epochs for n in e.logs)
    bases = list(dict.fromkeys(name.removeprefix("val_") for name in names))
    bases.sort(key=lambda base: base != "loss")  # The loss first.
    charts = []
    for base in bases:
        labels = [(base, "training"), (f"val_{base}", "validation")]
        series = [
            Series(
                name=label,
                parts=_parts(fits, axis, lambda _, e, name=name: e.logs.get(name)),
            )
            for name, label in labels
            if name in names
        ]
        title = base if base in names else f"{base} (validation)"
        note = _describe_gaps(series)
        charts.append(chart_of(title, series, borders=axis.borders, note=note))
    return [chart for chart in charts if chart is not None]


def _describe_gaps(series: Sequence[Series]) -> str:
    """Describe the values that are not finite, which no curve shows."""
    epochs = sorted({x for s in series for x, y in s.points if not math.isfinite(y)})
    if not epochs:
        return ""
    number = "1 epoch" if len(epochs) == 1 else f"{len(epochs):,} epochs"
    return f"Not finite in {number}, first in epoch {epochs[0]:,.0f}."


def speed_charts(run: Run) -> list[Chart]:
    """Make the charts of throughput, step time, input wait, memory and staleness."""
    axis = _EpochAxis(run.chief.fits)
    epochs = [e for w in run.workers for f in w.fits for e in f.epochs]
    peak = max((b for b in map(memory_bytes, epochs) if math.isfinite(b)), default=0.0)
    # One unit for the whole axis, so that its labels are round numbers.
    size, suffix = (2.0**30, "GiB") if peak >= 2**31 else (2.0**20, "MiB")
    of_process = any(e.memory.of == "process" for e in epochs)

    def chart(
        title: str, series: list[Series], unit: Callable[[float], str], note: str = ""
    ) -> Chart | None:
        borders = axis.borders
        return chart_of(
            title, series, unit=unit, from_zero=True, borders=borders, note=note
        )

    def by_worker(value: Callable[[EpochRecord], float]) -> list[Series]:
        return _by_worker(run, axis, value)

    charts = [
        chart(
            "Throughput",
            [Series(name="all workers", parts=_throughput(run, axis))],
            lambda y: f"{decimal(y)}/s".replace(" /", "/"),
            "Examples per second, of all workers, without the time to compile.",
        ),
        chart(
            "Time of a step",
            by_worker(lambda e: e.step_s),
            lambda y: seconds(y) if y else "0",
        ),
        chart(
            "Waiting for input",
            by_worker(lambda e: e.input_share),
            lambda y: f"{100 * y:.3g}%",
            "Share of the time in which the devices had nothing to compute.",
        ),
        chart(
            f"Memory of the {'process' if of_process else 'fullest device'}",
            by_worker(lambda e: memory_bytes(e) / size),
            lambda y: f"{y:.4g} {suffix}",
        ),
        chart(
            "Staleness of gradients",
            by_worker(lambda e: mean_staleness(e.staleness)),
            plain,
            "Mean number of updates between a gradient's values and its own update.",
        ),
    ]
    return [chart for chart in charts if chart is not None]


def memory_bytes(epoch: EpochRecord) -> float:
    """Memory in use at the end of an epoch, or else the peak; NaN if both unknown."""
    for value in (epoch.memory.bytes, epoch.memory.peak_bytes):
        if value is not None:
            return float(value)
    return math.nan


def mean_staleness(staleness: Mapping[int, int]) -> float:
    """Mean of a histogram; NaN for an empty one."""
    count = sum(staleness.values())
    return sum(k * n for k, n in staleness.items()) / count if count else math.nan


def _parts(
    fits: Sequence[Fit],
    axis: _EpochAxis,
    value: Callable[[Fit, EpochRecord], float | None],
) -> list[list[Point]]:
    parts = []
    for fit in fits:
        points = [(axis.position(fit, e), value(fit, e)) for e in fit.epochs]
        parts.append([(x, y) for x, y in points if y is not None])
    return [part for part in parts if part]


def _by_worker(
    run: Run, axis: _EpochAxis, value: Callable[[EpochRecord], float]
) -> list[Series]:
    """Make a curve for each worker; for many workers minimum, median and maximum."""
    curves = [
        Series(name=w.name, parts=_parts(w.fits, axis, lambda _, e: value(e)))
        for w in run.workers
    ]
    curves = [c for c in curves if any(math.isfinite(y) for _, y in c.points)]
    if len(curves) <= _MAX_WORKER_CURVES:
        return curves
    ys_by_x: dict[float, list[float]] = {}
    for x, y in (point for curve in curves for point in curve.points):
        if math.isfinite(y):
            ys_by_x.setdefault(x, []).append(y)
    kinds: dict[str, Callable[[list[float]], float]] = {
        "highest": max,
        "middle": statistics.median,
        "lowest": min,
    }
    return [
        Series(
            name=f"{name} of {len(curves)} workers",
            parts=[[(x, pick(ys)) for x, ys in sorted(ys_by_x.items())]],
        )
        for name, pick in kinds.items()
    ]


def _throughput(run: Run, axis: _EpochAxis) -> list[list[Point]]:
    totals: dict[tuple[int, int], float] = {}
    for worker in run.workers if run.chief.fits[-1].begin.counts_own else [run.chief]:
        # The last record of an epoch counts: a restarted worker may repeat one.
        rates = {
            (f.begin.number, e.number): e.examples_per_s
            for f in worker.fits
            for e in f.epochs
        }
        for key, rate in rates.items():
            if math.isfinite(rate):
                totals[key] = totals.get(key, 0.0) + rate
    return _parts(
        run.chief.fits,
        axis,
        lambda f, e: totals.get((f.begin.number, e.number), math.nan),
    )
