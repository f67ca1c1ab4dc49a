"""Which task of a job failed first, and how its end is described."""

import dataclasses
import signal
from collections.abc import Sequence

from replicax.cluster.failure import ExitCode, FailureReport

__all__ = [
    "Failure",
    "describe_exit",
    "exit_status",
    "first_failure",
    "last_lines",
    "progress",
    "with_output",
]

_SHOWN_LINES = 14
_FIRST_LINES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The task that failed first in an attempt.

    Attributes:
        task: Its name.
        exit_code: Its exit status; negative for a signal.
        message: What happened, in full sentences.
        traceback: Its Python traceback; without one, the end of its output.
    """

    task: str
    exit_code: int
    message: str
    traceback: str | None = None


def exit_status(exit_code: int) -> int:
    """A process' exit code as a shell has it: 128 and the signal's number for signals.

    Example:
        >>> exit_status(-9), exit_status(1)
        (137, 1)
    """
    return 128 - exit_code if exit_code < 0 else exit_code


def first_failure(
    exits: Sequence[tuple[str, int]], reports: Sequence[FailureReport]
) -> Failure | None:
    """Which task failed first: the rest is mostly a consequence of that.

    Args:
        exits: The tasks that ended with a code that is not 0 by themselves, in the
            order in which they ended.
        reports: What tasks have reported, the earliest first.
    """
    codes = dict(exits)
    for report in reports:
        # A preempted task has not failed, but was asked to end, perhaps by a launcher
        # that had seen another one fail.
        if report.culprit == report.task and report.kind != "preempted":
            return Failure(
                task=report.task,
                exit_code=report.exit_code,
                message=_sentence(report.message),
                traceback=report.traceback,
            )
        if report.kind == "exited" and report.culprit is not None:
            # The culprit's own exit status tells more than that of who missed it.
            return Failure(
                task=report.culprit,
                exit_code=codes.get(report.culprit) or report.exit_code,
                message=_sentence(report.message),
            )
    if not exits:
        return None
    task, exit_code = exits[0]
    own = next((report for report in reports if report.task == task), None)
    return Failure(
        task=task,
        exit_code=exit_code,
        message=describe_exit(task, exit_code, own),
        traceback=own.traceback if own else None,
    )


def _sentence(text: str) -> str:
    """A message with a full stop, which those of exceptions may lack."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def describe_exit(
    task: str, exit_code: int, report: FailureReport | None = None
) -> str:
    """What happened to a task, in full sentences."""
    if report is not None:
        return f"{task} ended with exit code {exit_code}: {_sentence(report.message)}"
    if exit_code >= 0:
        return f"{task} ended with exit code {exit_code}."
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # A real-time signal.
        name = f"signal {-exit_code}"
    guess = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"{task} was killed by {name}{guess}."


def with_output(failure: Failure, output: Sequence[str]) -> Failure:
    """The failure, with the end of its task's output where it left no traceback."""
    if failure.traceback is not None or failure.exit_code < 0:
        return failure  # A signal comes without a last word.
    if failure.exit_code == ExitCode.INTERRUPTED:
        return failure  # And so does Ctrl-C.
    return dataclasses.replace(failure, traceback="\n".join(output) or None)


def last_lines(failure: Failure) -> str:
    """The end of a failed task's traceback or output; empty where there is none.

    Example:
        >>> failure = Failure(task="ps:0", exit_code=1, message="", traceback="A")
        >>> print(last_lines(failure))
        The last lines of ps:0:
          A
    """
    lines = (failure.traceback or "").rstrip().splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("Traceback (most")]
    lines = lines[begins[-1] :] if begins else lines
    if len(lines) > _SHOWN_LINES:
        # A traceback begins with the script's own line.
        head = [*lines[:_FIRST_LINES], "  ..."] if begins else []
        lines = [*head, *lines[len(head) - _SHOWN_LINES :]]
    shown = [f"  {line}" for line in lines]
    return "\n".join([f"The last lines of {failure.task}:", *shown]) if shown else ""


def progress(reports: Sequence[FailureReport]) -> int:
    """The last step that a task is known to have finished; -1: none is."""
    return max((step for r in reports for step in r.steps.values()), default=-1)
