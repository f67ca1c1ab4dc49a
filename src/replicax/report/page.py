"""The page: one HTML file that loads nothing, from what workers have written."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from replicax._util.listing import listed
from replicax._util.units import binary_bytes, seconds
from replicax.report.charts import plain
from replicax.report.figures import (
    counts_own,
    memory_bytes,
    metric_figures,
    number_of_fit,
    speed_figures,
    stale_mean,
)
from replicax.report.runs import Epoch, Fit, Run, Worker, together
from replicax.report.style import STYLE

__all__ = ["page_of"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_SHARES = {
    "input": "waiting for input",
    "start": "starting programs",
    "communication": "communication",
    "compute": "compute",
}

_NOTES = (
    "Throughput and step times are the wall time of an epoch's training steps, until "
    "the devices were done, divided by what was done in it. Executions that had to "
    "compile are left out, and so are validation and other callbacks between epochs.",
    "Waiting for input is the time in which the host made or placed a batch while the "
    "result of the last step was there already, so that the devices had nothing to do. "
    "If that result came meanwhile, half of the time counts. Nothing was blocked to "
    "find out.",
    "Communication between replicas is the time that the sum of arrays like the "
    "gradients takes by itself, with the strategy's own operations: a program with the "
    "sums, less one without them, measured five times each after training (the "
    "median). In a step it may overlap with computing, so the share is an upper limit. "
    "Waiting for a slower worker counts as compute.",
    "With parameter servers communication is what this worker has measured while it "
    "trained: how long its exchanges with the slowest server took, and how long it "
    "waited for steps to do and for other workers; the longer of the two where steps "
    "are asynchronous, as they overlap then, with computing too.",
    "Starting programs is the time that a program which computes nothing takes, with "
    "as many arrays, on the same devices, measured after training (the median of ten).",
    "Compute is what remains.",
    "Memory is that of the fullest local device; on CPUs that of the process.",
    "Staleness is how many updates others made between the values that gradients are "
    "of and their own update, as this worker was told.",
)


def page_of(run: Run, *, now: float | None = None, head: str = "") -> str:
    """A report as one HTML page.

    Args:
        run: What workers have written.
        now: When the page is made, in seconds since 1970; None: now.
        head: HTML that a server of the page adds to its head.
    """
    now = time.time() if now is None else now
    title, body = _body(run, now)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"{head or policy}\n"
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )
    # Names of files that are no text come as lone surrogates, which no file can hold.
    return text.encode(errors="backslashreplace").decode()


def _body(run: Run, now: float) -> tuple[str, str]:
    chief = run.chief
    if chief is None:
        wait = "Nothing is here yet: the first line comes when <code>fit</code> begins."
        return "Training report", f"<h1>Training report</h1><p>{wait}</p>"
    fit = chief.fits[-1]
    title = f"Training report: {fit.facts.get('model', 'a model')}"
    metrics = "\n".join(filter(None, metric_figures(run)))
    speed = "\n".join(filter(None, speed_figures(run)))
    parts = [
        _header(title, chief, now),
        _problems(run),
        _which(chief),
        _verdict(fit),
        _key_figures(run, fit),
        _section("Losses and metrics", f'<div class="charts">{metrics}</div>', metrics),
        _section("Speed and memory", f'<div class="charts">{speed}</div>', speed),
        _section("Workers", _workers(run)),
        _section("Configuration", _configuration(chief)),
        _section("How this was measured", _notes()),
        f"<footer>Written {_date(now)} by replicax. This file loads nothing from "
        "elsewhere.</footer>",
    ]
    return title, "\n".join(part for part in parts if part)


def _section(title: str, content: str, needed: str = "yes") -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if needed else ""


def _header(title: str, chief: Worker, now: float) -> str:
    fit = chief.fits[-1]
    began = chief.fits[0].began
    told = f"Began {_date(began)}, "
    if fit.state == "running":
        silent = _ago(now - fit.last)
        told += f"last sign of life {silent} before this page was written."
    else:
        told += f"ended {_date(fit.last)}, after {_long(fit.last - began)}."
    if len(chief.fits) > 1:
        told += f" {len(chief.fits)} calls of fit."
    if fit.state == "running" and fit.current is not None:
        told += f" It is in {_where(fit.current)}."
    return (
        f'<header><h1>{escape(title)}</h1><span class="state {escape(fit.state)}">'
        f'{escape(fit.state)}</span><p class="soft">{escape(told)}</p></header>'
    )


def _where(epoch: Epoch) -> str:
    """How far an epoch is that has not ended."""
    steps = epoch.counts.get("steps", 0)
    name = "step" if steps == 1 else "steps"
    said = f"epoch {epoch.number + 1}, after {steps:,.0f} {name}"
    loss = epoch.logs.get("loss")
    return said if loss is None else f"{said}, at a loss of {plain(loss)}"


def _problems(run: Run) -> str:
    found = []
    for worker in run.workers:
        fit = worker.fits[-1]
        if fit.state == "interrupted":
            where = f" in {_where(fit.current)}" if fit.current else ""
            found.append(
                ("error", f"{worker.name} was interrupted{where}: {fit.error}")
            )
        if worker.num_bad:
            lines = "line" if worker.num_bad == 1 else "lines"
            found.append(
                ("warn", f"{worker.num_bad} {lines} of {worker.name} make no sense.")
            )
    if run.missing:
        names = listed(run.missing)
        found.append(
            (
                "warn",
                f"No figures of {names}: pass the callback on all workers, with a path "
                "in a folder that all of them see.",
            )
        )
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in found)


def _which(chief: Worker) -> str:
    """What the figures below are of, where that is not all."""
    number = len(chief.fits)
    return f'<p class="soft">Of fit {number}, the last one:</p>' if number > 1 else ""


def _verdict(fit: Fit) -> str:
    text = f'<p class="verdict">{escape(fit.diagnosis)}</p>' if fit.diagnosis else ""
    known = {
        name: float(share)
        for name, share in fit.shares.items()
        if name in _SHARES and isinstance(share, int | float)
    }
    if not known:
        return text
    order = [name for name in _SHARES if name in known]
    words = ", ".join(f"{_SHARES[name]} {known[name]:.0%}" for name in order)
    bar = "".join(
        f'<i class="s{i}" style="width:{100 * known[name]:.2f}%"></i>'
        for i, name in enumerate(order)
    )
    legend = "".join(
        f'<li class="s{i}"><i></i>{_SHARES[name]} {known[name]:.0%}</li>'
        for i, name in enumerate(order)
    )
    missing = [_SHARES[name] for name in _SHARES if name not in known]
    note = f'<p class="soft">Not measured: {", ".join(missing)}.</p>' if missing else ""
    return (
        f"{text}<section><h2>Where a step's time goes</h2>"
        f'<div class="shares" role="img" aria-label="{words}">{bar}</div>'
        f'<ul class="legend">{legend}</ul>{note}</section>'
    )


def _key_figures(run: Run, fit: Fit) -> str:
    epochs = _shown(fit)
    if not epochs:
        return '<p class="soft">No epoch has ended yet.</p>'
    total = together(epochs)
    steps = total.step_s
    everything = [e for w in run.workers for f in w.fits for e in _shown(f)]
    figures = {
        "epochs": str(total.number + 1) if fit.epochs else "none has ended",
        "examples/s": _rate(run),
        "time of a step": seconds(steps) if math.isfinite(steps) else "not measured",
        "waiting for input": _percent(total.input_share),
        "time to compile": seconds(total.counts.get("first_s", 0.0)),
        "memory, peak": _peak(everything),
    }
    if total.staleness:
        figures["staleness, mean"] = f"{stale_mean(total.staleness):.2g}"
    for name in ("loss", "val_loss"):
        if name in total.logs:
            figures[f"last {name}"] = plain(total.logs[name])
    items = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>"
        for k, v in figures.items()
    )
    return f'<dl class="keys">{items}</dl>'


def _rate(run: Run) -> str:
    chief = run.chief
    assert chief is not None
    number = number_of_fit(chief.fits[-1])
    fits = [chief.fits[-1]]
    if counts_own(chief):
        # Of one that was restarted the last one.
        last = [[f for f in w.fits if number_of_fit(f) == number] for w in run.workers]
        fits = [found[-1] for found in last if found]
    rates = [together(_shown(f)).examples_per_s for f in fits if _shown(f)]
    known = [rate for rate in rates if math.isfinite(rate)]
    return plain(round(sum(known), 1)) if known else "not measured"


def _shown(fit: Fit) -> Sequence[Epoch]:
    """Epochs that have ended; before the first one has, what is known of it."""
    return fit.epochs or ([fit.current] if fit.current else [])


def _percent(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "not measured"


def _peak(epochs: Sequence[Epoch]) -> str:
    peaks = [e.memory.get("peak_bytes") for e in epochs]
    known = [peak for peak in peaks if isinstance(peak, int | float)]
    return binary_bytes(max(known)) if known else "not known"


def _workers(run: Run) -> str:
    is_served = any(e.staleness for w in run.workers for f in w.fits for e in f.epochs)
    head = ["worker", "host", "state", "steps", "time of a step", "waiting for input"]
    head += ["memory", "peak"] + (["staleness, mean and most"] if is_served else [])
    rows = [_worker_row(worker, is_served) for worker in run.workers]
    rows += [[name, *["no figures"], *[""] * (len(head) - 2)] for name in run.missing]
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Workers"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _worker_row(worker: Worker, is_served: bool) -> list[str]:
    fit = worker.fits[-1]
    epochs = _shown(fit)
    row = [worker.name, str(fit.facts.get("host", "")), fit.state]
    if not epochs:
        return row + [""] * (6 if is_served else 5)
    total = together(epochs)
    step, memory = total.step_s, memory_bytes(total)
    row += [
        f"{int(total.counts.get('steps', 0)):,}",
        seconds(step) if math.isfinite(step) else "not measured",
        _percent(total.input_share),
        binary_bytes(memory) if math.isfinite(memory) else "not known",
        _peak(epochs),
    ]
    if is_served:
        stale = total.staleness
        row.append(f"{stale_mean(stale):.2g}, {max(stale)}" if stale else "")
    return row


def _configuration(chief: Worker) -> str:
    """What was trained, with what, on what: of each `fit` that differs."""
    left_out = {"worker", "workers", "examples_of", "fit"}
    parts, before = [], None
    for number, fit in enumerate(chief.fits, 1):
        facts = {k: v for k, v in fit.facts.items() if k not in left_out}
        if facts == before:
            continue
        heading = f"<h3>fit {number}</h3>" if len(chief.fits) > 1 else ""
        parts.append(f'{heading}<dl class="facts">{_facts(facts, before)}</dl>')
        before = facts
    return "".join(parts)


def _facts(facts: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    return "".join(
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_said(value))}</dd>"
        for name, value in facts.items()
        if before is None or before.get(name) != value
    )


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return plain(value) if is_number else str(value)


def _notes() -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in _NOTES)
    return f"<details><summary>Explanations</summary><ul>{items}</ul></details>"


def _date(when: float) -> str:
    try:
        date = datetime.fromtimestamp(when).astimezone()
        return date.strftime("%Y-%m-%d %H:%M:%S %Z")
    except (OverflowError, ValueError, OSError):  # A year that no calendar has.
        return "at an unknown time"


def _ago(took_s: float) -> str:
    return _long(took_s) if took_s >= 1 else "just"


def _long(took_s: float) -> str:
    took = max(0, round(took_s))
    if took < 60:
        return f"{took} s" if took_s >= 9.5 else f"{max(0.0, took_s):.1f} s"
    if took < 3600:
        return f"{took // 60} min {took % 60} s"
    return f"{took // 3600} h {took % 3600 // 60} min"
