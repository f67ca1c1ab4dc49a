"""Renders the report page, a self-contained HTML file, from the workers' records.

This module computes the values for the HTML in `templates/`. Jinja escapes every value.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2

from replicax._util.listing import listed
from replicax._util.units import binary_bytes, seconds
from replicax.report.charts import plain
from replicax.report.figures import (
    mean_staleness,
    memory_bytes,
    metric_charts,
    speed_charts,
)
from replicax.report.runs import EpochRecord, Fit, Run, WorkerRecord, merged

__all__ = ["page_of", "rendered"]

_RELOAD_S = 5

_SHARES = {
    "input": "waiting for input",
    "start": "starting programs",
    "communication": "communication",
    "compute": "compute",
}

_WORKER_COLUMNS = [
    "worker",
    "host",
    "state",
    "steps",
    "time of a step",
    "waiting for input",
    "memory",
    "peak",
    "staleness, mean and largest",
]


def page_of(run: Run) -> str:
    """Render a report as one HTML page, which reloads itself while the run lasts."""
    return rendered("page.html", **_values(run), reload_s=_RELOAD_S)


def rendered(template: str, **values: object) -> str:
    """Render a template of this folder with escaped values.

    Names of files may have lone surrogates, which UTF-8 cannot encode: escape them.
    """
    text = _templates().get_template(template).render(values)
    return text.encode(errors="backslashreplace").decode()


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("replicax.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def _values(run: Run) -> dict[str, object]:
    """Compute the template's values by name."""
    chief = run.chief
    fit = chief.fits[-1]
    facts = fit.begin.facts
    shares = {name: x for name, x in fit.end.shares.items() if x is not None}
    return {
        "title": f"Training report: {facts.get('model') or facts.get('script')}",
        "state": fit.end.state,
        "began": _began(chief),
        "problems": _problems(run),
        "num_fits": len(chief.fits),
        "diagnosis": fit.end.diagnosis,
        "shares": [(_SHARES[name], shares[name]) for name in _SHARES if name in shares],
        "not_measured": [_SHARES[name] for name in _SHARES if name not in shares],
        "key_figures": _key_figures(run, fit),
        "figures": [
            ("Losses and metrics", metric_charts(run)),
            ("Speed and memory", speed_charts(run)),
        ],
        "worker_columns": _WORKER_COLUMNS,
        "worker_rows": [_worker_row(worker) for worker in run.workers],
        "configuration": {
            name.replace("_", " "): _text(value) for name, value in facts.items()
        },
        "written": _date(time.time()),
    }


def _began(chief: WorkerRecord) -> str:
    fit, began = chief.fits[-1], chief.fits[0].begin.time
    last = "last event" if fit.end.state == "running" else "ended"
    trainings = f" {len(chief.fits)} trainings." if len(chief.fits) > 1 else ""
    return f"Began {_date(began)}, {last} {_date(fit.last)}.{trainings}"


def _problems(run: Run) -> list[tuple[str, str]]:
    """List the problems to show, each with its class in the style sheet."""
    problems = []
    for worker in run.workers:
        fit, name = worker.fits[-1], worker.name
        if fit.end.state == "interrupted":
            problems.append(("error", f"{name} was interrupted: {fit.end.error}"))
    if run.missing:
        text = (
            f"No data from {listed(run.missing)}: use Report on all workers, "
            "with a path in a folder that all of them see."
        )
        problems.append(("warn", text))
    return problems


def _key_figures(run: Run, fit: Fit) -> dict[str, str]:
    if not fit.epochs:
        return {}
    total = merged(fit.epochs)
    all_epochs = [e for w in run.workers for f in w.fits for e in f.epochs]
    figures = {
        "epochs": str(total.number + 1),
        "examples/s": _rate(run),
        "time of a step": _measured(total.step_s, seconds),
        "waiting for input": _measured(total.input_share, "{:.0%}".format),
        "time to compile": seconds(total.counts.get("first_s", 0.0)),
        "memory, peak": _peak(all_epochs),
    }
    if total.staleness:
        figures["staleness, mean"] = f"{mean_staleness(total.staleness):.2g}"
    for name in ("loss", "val_loss"):
        if name in total.logs:
            figures[f"last {name}"] = plain(total.logs[name])
    return figures


def _rate(run: Run) -> str:
    counts_own = run.workers[0].fits[-1].begin.counts_own
    workers = run.workers if counts_own else run.workers[:1]
    last_fits = [worker.fits[-1] for worker in workers]
    rates = [merged(fit.epochs).examples_per_s for fit in last_fits if fit.epochs]
    finite = [rate for rate in rates if math.isfinite(rate)]
    return plain(round(sum(finite), 1)) if finite else "not measured"


def _measured(value: float, format_: Callable[[float], str]) -> str:
    return format_(value) if math.isfinite(value) else "not measured"


def _peak(epochs: Sequence[EpochRecord]) -> str:
    peaks = [e.memory.peak_bytes for e in epochs if e.memory.peak_bytes is not None]
    return binary_bytes(max(peaks)) if peaks else "not measured"


def _worker_row(worker: WorkerRecord) -> list[str]:
    fit = worker.fits[-1]
    row = [worker.name, str(fit.begin.facts.get("host", "")), fit.end.state]
    if not fit.epochs:
        return row + [""] * (len(_WORKER_COLUMNS) - len(row))
    total = merged(fit.epochs)
    staleness = total.staleness
    return [
        *row,
        f"{int(total.counts.get('steps', 0)):,}",
        _measured(total.step_s, seconds),
        _measured(total.input_share, "{:.0%}".format),
        _measured(memory_bytes(total), binary_bytes),
        _peak(fit.epochs),
        f"{mean_staleness(staleness):.2g}, {max(staleness)}" if staleness else "",
    ]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return plain(value)
    return str(value)


def _date(when: float) -> str:
    return datetime.fromtimestamp(when).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
