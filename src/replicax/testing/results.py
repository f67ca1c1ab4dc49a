"""Results of the tasks of a test's cluster, and errors that show their outputs."""

import dataclasses
from collections.abc import Mapping

from replicax._util.types import PyTree
from replicax.cluster.failure import FailureReport

__all__ = ["ClusterTimeout", "Results", "TaskFailed", "TaskResult"]

_TAIL_LINES = 60


class TaskFailed(AssertionError):
    """A task of a test's cluster ended with an exit code that is not 0."""


class ClusterTimeout(AssertionError):
    """A test's cluster missed a deadline.

    The message has the end of each task's output and, for the deadline of the whole
    cluster, the Python stacks of all threads of the running tasks.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of one task.

    Attributes:
        exit_code: The task's exit status; negative for a signal.
        output: The task's output to stdout and stderr.
        value: The function's return value. None for a script, and for a function that
            raised or was killed.
        report: The task's failure report, if it wrote one.
        dismissed: Whether the task is a parameter server that was terminated because
            all other tasks had ended.

    Example:
        >>> import posixpath
        >>> import replicax as rx
        >>> results = rx.testing.run(posixpath.basename, num_workers=1, args=("a/b",))
        >>> results["worker:0"].exit_code, results["worker:0"].value
        (0, 'b')
    """

    exit_code: int
    output: str
    value: PyTree = None
    report: FailureReport | None = None
    dismissed: bool = False


class Results(dict[str, TaskResult]):
    """The tasks' results by their names, such as `"worker:1"`.

    `rx.testing.run` and `Cluster.wait` return it.

    Example:
        >>> import posixpath
        >>> import replicax as rx
        >>> results = rx.testing.run(posixpath.basename, num_workers=2, args=("a/b",))
        >>> results.check().returned
        {'worker:0': 'b', 'worker:1': 'b'}
    """

    def __repr__(self) -> str:
        codes = {name: result.exit_code for name, result in self.items()}
        return f"Results(exit codes: {codes})"

    @property
    def exit_codes(self) -> dict[str, int]:
        """The exit status of each task."""
        return {name: result.exit_code for name, result in self.items()}

    @property
    def returned(self) -> dict[str, PyTree]:
        """The function's return value in each task."""
        return {name: result.value for name, result in self.items()}

    def check(self) -> "Results":
        """Raise if a task failed.

        Returns:
            These results.

        Raises:
            TaskFailed: With the end of every task's output, if an exit code is not 0,
                except that of a dismissed parameter server.
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
    """Format the end of each task's output, under a line with its name."""
    return "\n".join(
        f"--- output of {name} ---\n{_tail(output)}" for name, output in outputs.items()
    )


def _tail(output: str) -> str:
    lines = output.splitlines()
    left_out = len(lines) - _TAIL_LINES
    if left_out > 0:
        lines = [f"({left_out} lines before)", *lines[-_TAIL_LINES:]]
    return "\n".join(lines) or "(nothing)"
