"""Which task of a job failed first, how that is described, and what follows it."""

import dataclasses
import itertools
import random
import signal
from collections.abc import Sequence
from typing import NamedTuple

from replicax.cluster.failure import (
    ExitCode,
    FailureReport,
    exit_status,
    is_retryable,
)

__all__ = [
    "CRASH_LOOP",
    "Failure",
    "GiveUp",
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
_FRUITLESS = 3


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
    """A message with a full stop, which those of exceptions may lack."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def describe_exit(task: str, exit_code: int) -> str:
    """What happened to a task that left no report, as a sentence."""
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
    # Neither a signal nor Ctrl-C comes with a last word.
    is_sudden = failure.exit_code < 0 or failure.exit_code == ExitCode.INTERRUPTED
    if failure.traceback is not None or is_sudden:
        return failure
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


class GiveUp(NamedTuple):
    """Why a failure is not followed by a restart.

    Attributes:
        said: In words for the moment of the failure, when other tasks may go on.
        told: In words for the summary of the job.
    """

    said: str
    told: str


_INTERRUPTED = GiveUp("It would fail again", "interrupted")
_PERMANENT = GiveUp(
    "It would fail again", "permanent: another attempt would fail again"
)
CRASH_LOOP = GiveUp(
    "Three restarts in a row brought no step more",
    "retryable, but three attempts in a row got no further: a crash loop",
)
_NONE_LEFT = GiveUp("No restart is left", "retryable, but no restart is left")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Which failures are followed by a restart, and how often.

    Attributes:
        max_restarts: How often at most.
        backoff_seconds: The wait before the first restart; it doubles from then on, up
            to a minute.
        on_any: Whether after any failure, and not only one that may pass. An interrupt
            (SIGINT) is never followed by a restart.
    """

    max_restarts: int = 3
    backoff_seconds: float = 1.0
    on_any: bool = False

    def is_permanent(self, failure: Failure) -> bool:
        """Whether nothing is restarted after this failure, whatever is left."""
        if self.on_any:
            return exit_status(failure.exit_code) == ExitCode.INTERRUPTED
        return not is_retryable(failure.exit_code)

    def give_up(self, failure: Failure, steps: Sequence[int]) -> GiveUp | None:
        """Why a failure is not followed by a restart; None: it is.

        Args:
            failure: The failure.
            steps: How far each attempt came that has failed, this one the last.
        """
        if self.is_permanent(failure):
            interrupted = exit_status(failure.exit_code) == ExitCode.INTERRUPTED
            return _INTERRUPTED if interrupted else _PERMANENT
        if crash_loop(steps):
            return CRASH_LOOP
        return _NONE_LEFT if len(steps) > self.max_restarts else None


def crash_loop(steps: Sequence[int]) -> bool:
    """Whether three attempts in a row got no further than the one before each.

    Example:
        >>> crash_loop([7, 9, 9, 8, 8]), crash_loop([7, 9, 9, 8])
        (True, False)
    """
    last = steps[-_FRUITLESS - 1 :]
    return len(last) > _FRUITLESS and all(
        after <= before for before, after in itertools.pairwise(last)
    )


def back_off(restart: int, base_seconds: float) -> float:
    """How long to wait before a restart (0: the first one), in seconds.

    Doubles from restart to restart up to a minute. A random part keeps jobs that failed
    together from coming back together.

    Example:
        >>> 0.75 <= back_off(0, 1.0) <= 1.25, back_off(50, 1.0) <= 60
        (True, True)
    """
    # The bound of the exponent: a float has an end.
    wait = base_seconds * 2.0 ** min(restart, 60) * random.uniform(0.75, 1.25)
    return min(wait, _MAX_BACK_OFF_S)
