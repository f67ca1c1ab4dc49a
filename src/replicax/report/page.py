"""Renders the report page, a self-contained HTML file, from the workers' records.

`templates/` has the HTML, the style sheet and the charts; this module computes their
values. Jinja escapes every value.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2

from replicax._util.listing import listed
from replicax._util.units import binary_bytes, seconds
from replicax.report.charts import plain
from replicax.report.figures import (
    counts_own,
    mean_staleness,
    memory_bytes,
    metric_charts,
    number_of_fit,
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

_NOT_SHOWN = {"worker", "workers", "examples_of", "fit"}


def page_of(run: Run, *, now: float | None = None) -> str:
    """Render a report as one HTML page, which reloads itself while the run lasts."""
    now = time.time() if now is None else now
    return rendered("page.html", **_shown(run, now), reload_s=_RELOAD_S)


def rendered(template: str, **values: object) -> str:
    """Render a template of this folder with escaped values.

    Lone surrogates, from file names that are no text, are replaced: UTF-8 has none.
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


def _shown(run: Run, now: float) -> dict[str, object]:
    """Compute the template's values by name."""
    chief = run.chief
    if chief is None:
        return {"title": "Training report", "began": "", "state": "running"}
    fit = chief.fits[-1]
    shares = {
        name: float(share)
        for name, share in fit.shares.items()
        if name in _SHARES and isinstance(share, int | float)
    }
    is_served = any(e.staleness for w in run.workers for f in w.fits for e in f.epochs)
    columns = ["worker", "host", "state", "steps", "time of a step"]
    columns += ["waiting for input", "memory", "peak"]
    columns += ["staleness, mean and most"] if is_served else []
    rows = [_worker_row(worker, is_served) for worker in run.workers]
    return {
        "title": f"Training report: {fit.facts.get('model', 'a model')}",
        "state": fit.state,
        "began": _began(chief, now),
        "problems": [p for w in run.workers for p in _problems(w)] + _missing(run),
        "num_fits": len(chief.fits),
        "diagnosis": fit.diagnosis,
        "shares": [(_SHARES[n], shares[n]) for n in _SHARES if n in shares],
        "not_measured": [_SHARES[name] for name in _SHARES if name not in shares],
        "key_figures": _key_figures(run, fit),
        "figures": [
            ("Losses and metrics", metric_charts(run)),
            ("Speed and memory", speed_charts(run)),
        ],
        "worker_columns": columns,
        "worker_rows": rows
        + [[n, "no figures", *[""] * (len(columns) - 2)] for n in run.missing],
        "configuration": _configuration(chief),
        "written": _date(now),
    }


def _began(chief: WorkerRecord, now: float) -> str:
    fit = chief.fits[-1]
    began = chief.fits[0].began
    text = f"Began {_date(began)}, "
    if fit.state == "running":
        silent = now - fit.last
        ago = _long(silent) if silent >= 1 else "just"
        text += f"last sign of life {ago} before this page was written."
    else:
        text += f"ended {_date(fit.last)}, after {_long(fit.last - began)}."
    if len(chief.fits) > 1:
        text += f" {len(chief.fits)} calls of fit."
    if fit.state == "running" and fit.current is not None:
        text += f" It is in {_where(fit.current)}."
    return text


def _where(epoch: EpochRecord) -> str:
    """Describe the progress of an epoch that has not ended."""
    steps = epoch.counts.get("steps", 0)
    name = "step" if steps == 1 else "steps"
    where = f"epoch {epoch.number + 1}, after {steps:,.0f} {name}"
    loss = epoch.logs.get("loss")
    return where if loss is None else f"{where}, at a loss of {plain(loss)}"


def _problems(worker: WorkerRecord) -> list[tuple[str, str]]:
    fit, found = worker.fits[-1], []
    if fit.state == "interrupted":
        where = f" in {_where(fit.current)}" if fit.current else ""
        found.append(("error", f"{worker.name} was interrupted{where}: {fit.error}"))
    if worker.num_bad:
        lines = "line" if worker.num_bad == 1 else "lines"
        text = f"{worker.num_bad} {lines} of {worker.name} make no sense."
        found.append(("warn", text))
    return found


def _missing(run: Run) -> list[tuple[str, str]]:
    if not run.missing:
        return []
    text = (
        f"No figures of {listed(run.missing)}: pass the callback on all workers, with "
        "a path in a folder that all of them see."
    )
    return [("warn", text)]


def _key_figures(run: Run, fit: Fit) -> dict[str, str]:
    epochs = _epochs(fit)
    if not epochs:
        return {}
    total = merged(epochs)
    everything = [e for w in run.workers for f in w.fits for e in _epochs(f)]
    figures = {
        "epochs": str(total.number + 1) if fit.epochs else "none has ended",
        "examples/s": _rate(run),
        "time of a step": _step(total),
        "waiting for input": _percent(total.input_share),
        "time to compile": seconds(total.counts.get("first_s", 0.0)),
        "memory, peak": _peak(everything),
    }
    if total.staleness:
        figures["staleness, mean"] = f"{mean_staleness(total.staleness):.2g}"
    for name in ("loss", "val_loss"):
        if name in total.logs:
            figures[f"last {name}"] = plain(total.logs[name])
    return figures


def _rate(run: Run) -> str:
    chief = run.chief
    assert chief is not None
    number = number_of_fit(chief.fits[-1])
    fits = [chief.fits[-1]]
    if counts_own(chief):
        # The last attempt of a restarted worker.
        last = [[f for f in w.fits if number_of_fit(f) == number] for w in run.workers]
        fits = [found[-1] for found in last if found]
    rates = [merged(_epochs(f)).examples_per_s for f in fits if _epochs(f)]
    known = [rate for rate in rates if math.isfinite(rate)]
    return plain(round(sum(known), 1)) if known else "not measured"


def _epochs(fit: Fit) -> Sequence[EpochRecord]:
    """The finished epochs; before there is one, the epoch in progress."""
    return fit.epochs or ([fit.current] if fit.current else [])


def _step(epoch: EpochRecord) -> str:
    return seconds(epoch.step_s) if math.isfinite(epoch.step_s) else "not measured"


def _percent(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "not measured"


def _peak(epochs: Sequence[EpochRecord]) -> str:
    peaks = [e.memory.get("peak_bytes") for e in epochs]
    known = [peak for peak in peaks if isinstance(peak, int | float)]
    return binary_bytes(max(known)) if known else "not known"


def _worker_row(worker: WorkerRecord, is_served: bool) -> list[str]:
    fit = worker.fits[-1]
    epochs = _epochs(fit)
    row = [worker.name, str(fit.facts.get("host", "")), fit.state]
    if not epochs:
        return row + [""] * (6 if is_served else 5)
    total = merged(epochs)
    memory, stale = memory_bytes(total), total.staleness
    row += [
        f"{int(total.counts.get('steps', 0)):,}",
        _step(total),
        _percent(total.input_share),
        binary_bytes(memory) if math.isfinite(memory) else "not known",
        _peak(epochs),
    ]
    if is_served:
        row.append(f"{mean_staleness(stale):.2g}, {max(stale)}" if stale else "")
    return row


def _configuration(chief: WorkerRecord) -> list[tuple[int, list[tuple[str, str]]]]:
    """The configuration of each `fit`, as the differences from the one before."""
    found: list[tuple[int, list[tuple[str, str]]]] = []
    before: Mapping[str, object] = {}
    for number, fit in enumerate(chief.fits, 1):
        facts = {k: v for k, v in fit.facts.items() if k not in _NOT_SHOWN}
        if number == 1 or facts != before:
            lines = [
                (str(name).replace("_", " "), _text(value))
                for name, value in facts.items()
                if name not in before or before[name] != value
            ]
            found.append((number, lines))
        before = facts
    return found


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return plain(value)
    return str(value)


def _date(when: float) -> str:
    try:
        date = datetime.fromtimestamp(when).astimezone()
        return date.strftime("%Y-%m-%d %H:%M:%S %Z")
    except (OverflowError, ValueError, OSError):  # Out of the calendar's range.
        return "at an unknown time"


def _long(took_s: float) -> str:
    took = max(0, round(took_s))
    if took < 60:
        return f"{took} s" if took_s >= 9.5 else f"{max(0.0, took_s):.1f} s"
    if took < 3600:
        return f"{took // 60} min {took % 60} s"
    return f"{took // 3600} h {took % 3600 // 60} min"
