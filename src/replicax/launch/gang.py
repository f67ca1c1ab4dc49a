"""A gang: tasks of a job that are started, fail and are restarted together."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax._util.types import JSONObject
from replicax.cluster.failure import ATTEMPT, REPORT_DIR, STATUS_FILE, FailureReport
from replicax.launch.failures import Failure
from replicax.launch.local_tasks import task_names, tf_configs

__all__ = ["ClusterCommand", "Gang", "gangs_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCommand:
    """What to run as the tasks of a cluster.

    Attributes:
        command: The program and its arguments.
        num_tasks: Number of tasks by job.
        environment: The whole environment of a task, but for what names the task.
        cores: The cores that each task is pinned to, by task name.
        grace_seconds: How long tasks may take to end after a signal, and parameter
            servers after the training.
        evaluator_seconds: How long the evaluator may go on after the training.
    """

    command: Sequence[str]
    num_tasks: Mapping[str, int]
    environment: Mapping[str, str] = dataclasses.field(repr=False)  # Has secrets.
    cores: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    grace_seconds: float = 30.0
    evaluator_seconds: float = 600.0


@dataclasses.dataclass(eq=False)
class Gang:
    """Tasks that are started, fail and are restarted together.

    Attributes:
        names: The tasks' names.
        folder: Where each start has a folder for the tasks' reports.
        environment: Variables that are the same in each start.
        configs: Makes the `TF_CONFIG` of each task for the next start.
        num_starts: How often they were started.
        exited: The exit codes of those that have exited since the last start.
        failed: Those that have failed, in the order in which they exited.
        failures: The first failure of each attempt that failed.
        steps: How far each of these attempts came.
        restart_at: When to restart them; None: they run, or have ended.
        ended: How they have ended, in a word; None: they have not.
        leaving_until: Until when tasks may leave a script that others have missed.
    """

    names: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = dataclasses.field(repr=False)  # Has secrets.
    configs: Callable[[], Mapping[str, str]]
    num_starts: int = 0
    exited: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    restart_at: float | None = None
    ended: str | None = None
    leaving_until: float | None = None

    @property
    def num_restarts(self) -> int:
        """How often they were started again."""
        return max(0, self.num_starts - 1)

    @property
    def has_exited(self) -> bool:
        """Whether none of the tasks runs."""
        return len(self.exited) == len(self.names)

    @property
    def state(self) -> str:
        """What the tasks do, in a word or two."""
        if self.restart_at is not None:
            return f"again in {max(0.0, self.restart_at - time.monotonic()):.0f} s"
        return self.ended or "running"

    @property
    def report_folder(self) -> Path:
        """Where the tasks leave reports since the last start."""
        return self.folder / str(self.num_restarts)

    @property
    def reports(self) -> list[FailureReport]:
        """What the tasks have reported since the last start."""
        return FailureReport.read_all(self.report_folder)

    def begin(self) -> dict[str, dict[str, str]]:
        """Begin the next start: the whole environment of each task for it."""
        self.num_starts += 1
        self.exited, self.failed = {}, []
        self.restart_at = self.ended = self.leaving_until = None
        self.report_folder.mkdir(parents=True)
        variables = {
            **self.environment,
            REPORT_DIR: str(self.report_folder),
            ATTEMPT: str(self.num_restarts),
        }
        configs = self.configs()
        return {name: {**variables, "TF_CONFIG": configs[name]} for name in self.names}

    def last_status(self) -> JSONObject | None:
        """What a parameter server has left behind; None: nothing, as it was killed."""
        path = self.report_folder / STATUS_FILE
        return json.loads(path.read_text()) if path.exists() else None


def gangs_of(command: ClusterCommand, folder: Path) -> list[Gang]:
    """The gangs of a cluster, with a folder for their reports.

    One of all tasks; with parameter servers, one for each task.
    """
    num_tasks, environment = command.num_tasks, command.environment
    if "ps" not in num_tasks:
        # New ports for each start: the last ones may be in use still.
        names = task_names(num_tasks)
        return [Gang(names, folder, environment, lambda: tf_configs(num_tasks))]
    configs = tf_configs(num_tasks)  # The others go on with the addresses they know.
    return [
        Gang([name], folder / name.replace(":", "-"), environment, lambda: configs)
        for name in configs
    ]
