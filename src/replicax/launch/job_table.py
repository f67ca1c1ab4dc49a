"""Draws the live table of a job with parameter servers, for `replicax run`."""

import contextlib
import dataclasses
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from replicax._util.types import JSONObject
from replicax.launch.console import TaskConsole
from replicax.launch.gang import Gang
from replicax.launch.job_status import JobStatus, Readings
from replicax.ps.credentials import Credentials

__all__ = ["TaskState", "draw", "live_table", "place_in_training"]

_STYLES = {
    "running": "green",
    "done": "dim",
    "failed": "bold red",
    "killed": "bold red",
    "silent": "yellow",
    "again": "yellow",
    "starting": "cyan",
}
_NUMBERS = ("steps", "steps/s", "staleness", "MB/s", "restarts")
_EPOCH = re.compile(r"fit (\d+)/epoch/(\d+)$")
_SILENT_S = 5.0
_TOTALS = {
    "given_up": "Steps given up with workers that ended: {:,}.",
    "twice": "Steps that two workers have trained on: {:,}.",
}


@dataclasses.dataclass(frozen=True)
class TaskState:
    """The launcher's state of a task.

    Attributes:
        name: The task's name, such as `"worker:1"`.
        state: The state in a word or two, such as `"running"` or `"again in 3 s"`.
        num_restarts: Number of restarts.
    """

    name: str
    state: str
    num_restarts: int


@contextlib.contextmanager
def live_table(
    gangs: Sequence[Gang], environment: Mapping[str, str], console: TaskConsole
) -> Iterator[JobStatus | None]:
    """Show the table of a job while open, and once more at the end.

    `environment` has the cluster's credentials. It yields the servers' counts; None
    without servers or credentials.
    """
    servers = {gang.names[0]: gang for gang in gangs if gang.names[0].startswith("ps:")}
    try:
        credentials = Credentials.from_environment(environment)
    except (ValueError, OSError):
        credentials = None  # The tasks fail for the same reason, and report it.
    if not servers or credentials is None:
        yield None
        return

    def table(status: JobStatus, *, at_the_end: bool = False) -> Table:
        return draw(
            [TaskState(g.names[0], g.state, g.num_restarts) for g in gangs],
            status.readings,
            place_in_training(status.streams),
            totals=status.totals,
            at_the_end=at_the_end,
        )

    def show(status: JobStatus) -> None:
        if status.is_known:
            console.show(table(status))

    cluster = json.loads(servers["ps:0"].configs()["ps:0"])["cluster"]
    status = JobStatus(cluster["ps"], credentials, show)
    try:
        yield status
    finally:
        status.close()
        for i in range(len(servers)):
            if (last := servers[f"ps:{i}"].last_status()) is not None:
                status.note_end(i, last)
        known = status.is_known
        console.end_table(table(status, at_the_end=True) if known else None)


def draw(
    tasks: Sequence[TaskState],
    readings: Mapping[str, Readings],
    title: str,
    *,
    totals: Mapping[str, int] = types.MappingProxyType({}),
    at_the_end: bool = False,
) -> Table:
    """Draw the table: a line for each worker, and below them one for each server.

    At the end it has the rates of the whole run, else of the last seconds.
    """
    lines = ["\nA server's steps are the updates that are in its values."]
    lines += [_TOTALS[name].format(count) for name, count in totals.items() if count]
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"\n{title}\n",
        title_style="bold",
        title_justify="left",
        caption="\n".join(lines),
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("task", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=8)
    for header in _NUMBERS:
        table.add_column(header, justify="right", no_wrap=True)
    if any(each.lost for each in readings.values()):
        table.add_column("lost", justify="right", no_wrap=True, style="yellow")
    for jobs in (("chief", "worker"), ("ps",)):
        table.add_section()
        for task in tasks:
            if task.name.startswith(jobs):
                row = _row(task, readings.get(task.name), at_the_end)
                table.add_row(task.name, *row[: len(table.columns) - 1])
    return table


def _row(
    task: TaskState, readings: Readings | None, at_the_end: bool
) -> list[str | Text]:
    state = _state(task, readings)
    style = "yellow" if task.num_restarts else "dim"
    restarts = Text(str(task.num_restarts), style)
    shown = Text(state, _STYLES.get(state.split()[0], ""))
    if readings is None:
        return [shown, "", "", "", "", restarts, ""]
    meters = (readings.steps, readings.traffic)
    if at_the_end:
        steps, traffic = (meter.mean_per_second for meter in meters)
    elif state == "running":
        steps, traffic = (meter.per_second for meter in meters)
    else:
        steps = traffic = 0.0
    return [
        shown,
        f"{readings.count:,}",
        _number(steps),
        _staleness(readings.staleness),
        _number(traffic / 1e6),
        restarts,
        f"{readings.lost:,}" if readings.lost else "",
    ]


def _state(task: TaskState, readings: Readings | None) -> str:
    """The launcher's state of a task, or the board's for a running process."""
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
    """Format the mean and maximum of a histogram.

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
    """Format a rate with three digits.

    Example:
        >>> _number(0.0), _number(3.25), _number(47.31), _number(1234.5)
        ('0', '3.2', '47', '1,234')
    """
    if value == 0:
        return "0"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def place_in_training(streams: Mapping[str, JSONObject]) -> str:
    """Describe the progress of `fit`, from the board's epochs.

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
