"""The table of a running job with parameter servers, as `replicax run` shows it."""

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from replicax.launch.job_status import Readings

__all__ = ["TaskState", "draw", "place_in_training"]

_STYLES = {
    "running": "green",
    "done": "dim",
    "failed": "bold red",
    "killed": "bold red",
    "silent": "yellow",
    "again": "yellow",
    "starting": "cyan",
}
_EPOCH = re.compile(r"fit (\d+)/epoch/(\d+)$")
_SILENT_S = 5.0
_TOTALS = {
    "given_up": "Steps given up with workers that ended: {:,}.",
    "twice": "Steps that two workers have trained on: {:,}.",
}


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What the launcher knows of a task.

    Attributes:
        name: Such as `"worker:1"`.
        state: In a word or two, such as `"running"` or `"again in 3 s"`.
        num_restarts: How often it was started again.
    """

    name: str
    state: str
    num_restarts: int


def draw(
    tasks: Sequence[TaskState],
    readings: Mapping[str, Readings],
    title: str,
    *,
    totals: Mapping[str, int] = types.MappingProxyType({}),
    at_the_end: bool = False,
) -> Table:
    """The table: a line for each worker, and below them one for each server.

    Args:
        tasks: The tasks, as the launcher knows them.
        readings: What the servers tell of them.
        title: What stands above.
        totals: Steps of `fit` that were given up, and that were done twice.
        at_the_end: Whether rates are those of the whole run, not of the last seconds.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"\n{title}\n",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.title_style = "bold"
    table.add_column("task", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=8)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("steps/s", justify="right", no_wrap=True)
    table.add_column("staleness", justify="right", no_wrap=True)
    table.add_column("MB/s", justify="right", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    if any(each.lost for each in readings.values()):
        table.add_column("lost", justify="right", no_wrap=True, style="yellow")
    workers = [t for t in tasks if not t.name.startswith(("ps:", "evaluator"))]
    servers = [t for t in tasks if t.name.startswith("ps:")]
    for task in workers:
        _add(table, task, readings.get(task.name), at_the_end)
    table.add_section()
    for task in servers:
        _add(table, task, readings.get(task.name), at_the_end)
    table.caption = "\nA server's steps are the updates that are in its values."
    for name, count in totals.items():
        if count:
            table.caption += f"\n{_TOTALS[name].format(count)}"
    table.caption_justify = "left"
    return table


def _add(
    table: Table, task: TaskState, readings: Readings | None, at_the_end: bool
) -> None:
    state = _state(task, readings)
    style = _STYLES.get(state.split()[0], "")
    num_restarts = Text(
        str(task.num_restarts), "yellow" if task.num_restarts else "dim"
    )
    if readings is None:
        values = [""] * 4
    else:
        rates = [
            meter.mean_per_second if at_the_end else meter.per_second
            for meter in (readings.steps, readings.traffic)
        ]
        if state != "running" and not at_the_end:
            rates = [0.0, 0.0]
        values = [
            f"{readings.count:,}",
            _number(rates[0]),
            _staleness(readings.staleness),
            _number(rates[1] / 1e6),
        ]
    lost = [f"{readings.lost:,}" if readings and readings.lost else ""]
    cells = [*values, num_restarts, *lost][: len(table.columns) - 2]
    table.add_row(task.name, Text(state, style), *cells)


def _state(task: TaskState, readings: Readings | None) -> str:
    """What the launcher says, but for a process of which the board knows more."""
    if task.state != "running" or task.name.startswith("ps:"):
        return task.state
    if readings is None or readings.state == "absent":
        return "starting"
    if readings.state == "left":
        return "ending"
    if readings.state == "dead" and task.num_restarts:
        return "starting"
    if readings.state == "dead" or readings.silent_seconds > _SILENT_S:
        return f"silent {readings.silent_seconds:.0f} s"
    return "running"


def _staleness(histogram: Mapping[int, int]) -> str:
    """Its mean and maximum.

    Example:
        >>> _staleness({0: 3, 4: 1})
        '1.0, max 4'
    """
    total = sum(histogram.values())
    if not total:
        return ""
    mean = sum(k * count for k, count in histogram.items()) / total
    return f"{mean:,.1f}, max {max(histogram):,}"


def _number(value: float) -> str:
    """A rate in three digits.

    Example:
        >>> _number(0.0), _number(3.25), _number(47.31), _number(1234.5)
        ('0', '3.2', '47', '1,234')
    """
    if value == 0:
        return "0"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def place_in_training(streams: Mapping[str, Mapping[str, Any]]) -> str:
    """Where `fit` is, of the epochs that the board knows.

    Example:
        >>> place_in_training({"fit 1/epoch/2": {"length": 938, "next": 412}})
        'epoch 3, step 412 of 938'
        >>> place_in_training({})
        ''
    """
    found = [
        (int(match[1]), int(match[2]), name)
        for name in streams
        if (match := _EPOCH.match(name))
    ]
    if not found:
        return ""
    number, epoch, name = max(found)
    counts = streams[name]
    of = "" if counts["length"] is None else f" of {counts['length']:,}"
    prefix = f"fit {number}, " if number > 1 else ""
    return f"{prefix}epoch {epoch + 1}, step {counts['next']:,}{of}"
