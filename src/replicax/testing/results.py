"""Results of the tasks of a test's cluster, and the errors that show them."""

import dataclasses
from collections.abc import Mapping

from replicax._util.types import PyTree
from replicax.cluster.failure import FailureReport

__all__ = ["ClusterTimeout", "Results", "TaskFailed", "TaskResult"]

_TAIL_LINES = 60


class TaskFailed(AssertionError):
    """A task of a test's cluster ended with an exit code that is not 0."""


class ClusterTimeout(AssertionError):
    """A test's cluster did not get where it should in time.

    The message holds the end of each task's output and, for the deadline of the whole
    cluster, the Python stacks of all threads of the tasks that were still running.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """How one task ended.

    Attributes:
        exit_code: Its exit status; negative for the signal that ended it.
        output: All it wrote to stdout and stderr.
        value: What the function returned. None for a script, and for a function that
            did not return.
        report: Why it failed, where it said so.
        dismissed: Whether it is a parameter server that was still serving when all
            others were done, and was terminated for that.
    """

    exit_code: int
    output: str
    value: PyTree = None
    report: FailureReport | None = None
    dismissed: bool = False


class Results(dict[str, TaskResult]):
    """The tasks' results by their names, such as `"worker:1"`."""

    def __repr__(self) -> str:
        codes = {name: result.exit_code for name, result in self.items()}
        return f"Results(exit codes: {codes})"

    @property
    def exit_codes(self) -> dict[str, int]:
        """The exit status of each task."""
        return {name: result.exit_code for name, result in self.items()}

    @property
    def returned(self) -> dict[str, PyTree]:
        """What the function returned in each task."""
        return {name: result.value for name, result in self.items()}

    def check(self) -> "Results":
        """Raise if a task failed.

        Returns:
            Itself.

        Raises:
            TaskFailed: With the end of every task's output, if an exit code is not 0;
                parameter servers that were dismissed do not count.
        """
        failed = [
            f"{name} with exit code {result.exit_code}"
            for name, result in self.items()
            if result.exit_code and not result.dismissed
        ]
        if failed:
            outputs = {name: result.output for name, result in self.items()}
            raise TaskFailed(f"Failed: {', '.join(failed)}.\n{show_outputs(outputs)}")
        return self


def show_outputs(outputs: Mapping[str, str]) -> str:
    """The end of each task's output under a line with its name."""
    return "\n".join(
        f"--- output of {name} ---\n{_tail(output)}" for name, output in outputs.items()
    )


def _tail(output: str) -> str:
    lines = output.splitlines()
    left_out = len(lines) - _TAIL_LINES
    if left_out > 0:
        lines = [f"({left_out} lines before)", *lines[-_TAIL_LINES:]]
    return "\n".join(lines) or "(nothing)"
