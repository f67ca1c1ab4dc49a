"""A gang: tasks of a job that start, fail and restart together."""

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax.cluster.failure import ATTEMPT, REPORT_DIR, FailureReport
from replicax.launch.failures import Failure
from replicax.launch.local_tasks import task_names, tf_configs

__all__ = ["ClusterCommand", "Gang", "gangs_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCommand:
    """The command of a cluster's tasks, with their environment and limits.

    Attributes:
        command: The program and its arguments.
        num_tasks: Number of tasks by job.
        environment: The complete environment of a task, without the variables that name
            the task.
        variables: Further variables of single tasks, by task name.
        cores: The cores that each task is pinned to, by task name.
        grace_seconds: Time for tasks to exit after a signal, and for parameter servers
            after the training.
        evaluator_seconds: Time for the evaluator to exit after the training.
    """

    command: Sequence[str]
    num_tasks: Mapping[str, int]
    environment: Mapping[str, str] = dataclasses.field(repr=False)  # Has secrets.
    variables: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    cores: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    grace_seconds: float = 30.0
    evaluator_seconds: float = 600.0


@dataclasses.dataclass(eq=False)
class Gang:
    """Tasks that start, fail and restart together.

    Attributes:
        names: The tasks' names.
        folder: The folder of the tasks' reports since the last start.
        environment: The variables that are the same in each start.
        variables: Further variables of single tasks, by task name.
        configs: Makes the `TF_CONFIG` of each task for the next start.
        adds_steps: Whether each start counts its steps from 0, as with parameter
            servers. Otherwise tasks continue from the step of their checkpoint.
        num_starts: Number of starts.
        exited: The exit codes of the tasks that have exited since the last start.
        failed: Names and exit codes of the failed tasks, in the order of their exits.
        failures: The first failure of each failed attempt.
        steps: The last step of each failed attempt; -1: unknown.
        restart_at: Time of the next restart; None: the tasks run, or have ended.
        ended: The final state in a word; None: the tasks have not ended.
        exit_deadline: Time at which tasks whose script ended early are terminated.
    """

    names: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = dataclasses.field(repr=False)  # Has secrets.
    variables: Mapping[str, Mapping[str, str]]
    configs: Callable[[], Mapping[str, str]]
    adds_steps: bool = False
    num_starts: int = 0
    exited: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    restart_at: float | None = None
    ended: str | None = None
    exit_deadline: float | None = None
    _earlier_steps: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        return max(0, self.num_starts - 1)

    @property
    def has_exited(self) -> bool:
        """Whether none of the tasks runs."""
        return len(self.exited) == len(self.names)

    def state_of(self, name: str) -> str:
        """The state of a task, in a word or two."""
        if self.restart_at is not None:
            wait_s = max(0.0, self.restart_at - time.monotonic())
            return f"restarts in {wait_s:.0f} s"
        code = self.exited.get(name)
        if code is None:
            return "running"
        if (name, code) in self.failed:
            return "killed" if code < 0 else f"failed with {code}"
        return "ended" if code else "done"

    def steps_by_task(self) -> dict[str, int]:
        """The number of steps of each task that has trained."""
        steps = Counter(self._earlier_steps)
        steps.update(FailureReport.steps_by_task(self.folder))
        return steps

    @property
    def reports(self) -> list[FailureReport]:
        """The tasks' reports since the last start."""
        return FailureReport.read_all(self.folder)

    def begin(self) -> dict[str, dict[str, str]]:
        """Begin the next start; return the complete environment of each task."""
        if self.adds_steps:
            self._earlier_steps = self.steps_by_task()
        self.num_starts += 1
        self.exited, self.failed = {}, []
        self.restart_at = self.ended = self.exit_deadline = None
        self._clear_folder()
        variables = {
            **self.environment,
            REPORT_DIR: str(self.folder),
            ATTEMPT: str(self.num_restarts),
        }
        configs = self.configs()
        return {
            name: {
                **variables,
                **self.variables.get(name, {}),
                "TF_CONFIG": configs[name],
            }
            for name in self.names
        }

    def _clear_folder(self) -> None:
        """Delete reports of the last start, and files of tasks that were killed.

        The folder itself stays: a full disk might have no room for a new folder.
        """
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def gangs_of(command: ClusterCommand, folder: Path) -> list[Gang]:
    """Make the gangs of a cluster, with a folder for their reports.

    All tasks form one gang; with parameter servers, each task is a gang of its own.
    """
    num_tasks = command.num_tasks
    shared = command.environment, command.variables
    if "ps" not in num_tasks:
        # New ports for each start: the last ones may still be in use.
        names = task_names(num_tasks)
        return [Gang(names, folder, *shared, lambda: tf_configs(num_tasks))]
    configs = tf_configs(num_tasks)  # A restarted task keeps its address.
    return [
        Gang(
            [name],
            folder / name.replace(":", "-"),
            *shared,
            lambda: configs,
            adds_steps=True,
        )
        for name in configs
    ]
