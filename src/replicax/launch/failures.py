"""Finds a job's first failure and describes it; the restart policy."""

import dataclasses
import itertools
import random
import signal
from collections.abc import Sequence

from replicax.cluster.failure import (
    ExitCode,
    FailureReport,
    exit_status,
    is_retryable,
)

__all__ = [
    "CRASH_LOOP",
    "Failure",
    "RestartPolicy",
    "back_off",
    "crash_loop",
    "describe_exit",
    "first_failure",
    "last_lines",
    "with_output",
]

_SHOWN_LINES = 14
_FIRST_LINES = 4
_MAX_BACK_OFF_S = 60.0
_NUM_FRUITLESS = 3  # Attempts in a row without progress that make a crash loop.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of an attempt.

    Attributes:
        task: The name of the task that failed.
        exit_code: The task's exit status; negative for a signal.
        message: The cause, in full sentences.
        traceback: The task's Python traceback, or the end of its output.
    """

    task: str
    exit_code: int
    message: str
    traceback: str | None = None


def first_failure(
    exits: Sequence[tuple[str, int]], reports: Sequence[FailureReport]
) -> Failure | None:
    """Find the first failure, which usually caused the others.

    Args:
        exits: Names and nonzero codes of tasks that exited by themselves, in order.
        reports: The tasks' reports, the earliest first.
    """
    codes = dict(exits)
    for report in reports:
        # A preempted task has not failed: it received SIGTERM, perhaps from a launcher
        # after the failure of another task.
        if report.culprit == report.task and report.kind != "preempted":
            return Failure(
                task=report.task,
                exit_code=report.exit_code,
                message=_sentence(report.message),
                traceback=report.traceback,
            )
        if report.kind == "exited" and report.culprit is not None:
            # Prefer the culprit's exit status to that of the reporting task.
            return Failure(
                task=report.culprit,
                exit_code=codes.get(report.culprit) or report.exit_code,
                message=_sentence(report.message),
            )
    if not exits:
        return None
    task, exit_code = exits[0]
    own = next((report for report in reports if report.task == task), None)
    message = describe_exit(task, exit_code)
    if own is not None:
        message = f"{task} ended with exit code {exit_code}: {_sentence(own.message)}"
    return Failure(
        task=task,
        exit_code=exit_code,
        message=message,
        traceback=own.traceback if own else None,
    )


def _sentence(text: str) -> str:
    """Add a full stop to a message, which exceptions' messages may lack."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def describe_exit(task: str, exit_code: int) -> str:
    """Describe the exit of a task without a report, as a sentence."""
    if exit_code >= 0:
        return f"{task} ended with exit code {exit_code}."
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # A real-time signal.
        name = f"signal {-exit_code}"
    guess = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"{task} was killed by {name}{guess}."


def with_output(failure: Failure, output: Sequence[str]) -> Failure:
    """Add the end of the task's output to a failure without a traceback."""
    # After a signal or Ctrl-C, the last output does not show the cause.
    is_sudden = failure.exit_code < 0 or failure.exit_code == ExitCode.INTERRUPTED
    if failure.traceback is not None or is_sudden:
        return failure
    return dataclasses.replace(failure, traceback="\n".join(output) or None)


def last_lines(failure: Failure) -> str:
    """Format the end of a failed task's traceback or output; empty without one.

    Example:
        >>> failure = Failure(task="ps:0", exit_code=1, message="", traceback="A")
        >>> print(last_lines(failure))
        The last lines of ps:0:
          A
    """
    lines = (failure.traceback or "").rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most")]
    lines = lines[starts[-1] :] if starts else lines
    if len(lines) > _SHOWN_LINES:
        # A traceback starts with the script's own line.
        head = [*lines[:_FIRST_LINES], "  ..."] if starts else []
        lines = [*head, *lines[len(head) - _SHOWN_LINES :]]
    shown = [f"  {line}" for line in lines]
    return "\n".join([f"The last lines of {failure.task}:", *shown]) if shown else ""


# Reasons why no restart follows a failure.
_INTERRUPTED = "interrupted"
_PERMANENT = "permanent: another attempt would fail again"
CRASH_LOOP = "retryable, but three attempts in a row got no further: a crash loop"
_NONE_LEFT = "retryable, but no restart is left"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Decides after which failures to restart, and how often.

    Attributes:
        max_restarts: The maximal number of restarts.
        backoff_seconds: The wait before the first restart; doubles with each restart,
            up to a minute.
        on_any: Whether to restart after permanent failures, too. No restart follows an
            interrupt (SIGINT).
    """

    max_restarts: int = 3
    backoff_seconds: float = 1.0
    on_any: bool = False

    def is_permanent(self, failure: Failure) -> bool:
        """Whether no restart follows this failure, regardless of `max_restarts`."""
        if self.on_any:
            return exit_status(failure.exit_code) == ExitCode.INTERRUPTED
        return not is_retryable(failure.exit_code)

    def give_up(self, failure: Failure, steps: Sequence[int]) -> str | None:
        """Return the reason for no restart; None: restart.

        `steps` has the last step of each failed attempt, in order, this one included.
        """
        if self.is_permanent(failure):
            is_interrupted = exit_status(failure.exit_code) == ExitCode.INTERRUPTED
            return _INTERRUPTED if is_interrupted else _PERMANENT
        if crash_loop(steps):
            return CRASH_LOOP
        return _NONE_LEFT if len(steps) > self.max_restarts else None


def crash_loop(steps: Sequence[int]) -> bool:
    """Whether each of the last three attempts got no further than its predecessor.

    Example:
        >>> crash_loop([7, 9, 9, 8, 8]), crash_loop([7, 9, 9, 8])
        (True, False)
    """
    last = steps[-_NUM_FRUITLESS - 1 :]
    return len(last) > _NUM_FRUITLESS and all(
        after <= before for before, after in itertools.pairwise(last)
    )


def back_off(restart: int, base_seconds: float) -> float:
    """Compute the wait before a restart (0: the first one), in seconds.

    Exponential back-off up to a minute, with jitter, so that jobs that failed together
    do not restart together.

    Example:
        >>> 0.75 <= back_off(0, 1.0) <= 1.25, back_off(50, 1.0) <= 60
        (True, True)
    """
    # The exponent is bounded, or the float would overflow.
    wait = base_seconds * 2.0 ** min(restart, 60) * random.uniform(0.75, 1.25)
    return min(wait, _MAX_BACK_OFF_S)
