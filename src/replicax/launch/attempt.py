"""One attempt to run all tasks of a cluster on this machine, from start to end.

These tasks start and end together. `cluster.served` has those that do not.
"""

import dataclasses
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax._util.listing import listed
from replicax.cluster.failure import REPORT_DIR, FailureReport
from replicax.launch.console import TaskConsole
from replicax.launch.local_tasks import task_names, tf_configs
from replicax.launch.outcome import (
    Failure,
    Outcome,
    describe_exit,
    first_failure,
    progress,
    with_output,
)
from replicax.launch.processes import TaskProcesses
from replicax.launch.shutdown import KILL_AFTER_S, Ending

__all__ = ["ClusterCommand", "run_attempt"]

_TICK_S = 0.1
_SETTLE_S = 10.0  # For a task whose script ended too early to end by itself.


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

    @property
    def names(self) -> list[str]:
        """The tasks' names."""
        return task_names(self.num_tasks)


def run_attempt(
    command: ClusterCommand,
    console: TaskConsole,
    signals: Sequence[int],
) -> Outcome:
    """Run the tasks until all have ended. None is left.

    Args:
        command: What to run.
        console: Where their output goes.
        signals: The signals that the launcher has received; it grows.
    """
    with tempfile.TemporaryDirectory(prefix="replicax-") as folder:
        configs = tf_configs(command.num_tasks)
        processes = TaskProcesses(
            dict.fromkeys(configs, command.command),
            {
                name: {**command.environment, REPORT_DIR: folder, "TF_CONFIG": text}
                for name, text in configs.items()
            },
            on_output=console.take,
            cores=command.cores,
        )
        with processes:
            attempt = _Attempt(command, processes, console, signals, Path(folder))
            attempt.run()
        reports = FailureReport.read_all(Path(folder))
        noted = FailureReport.last_progress(folder)
    return Outcome(
        failure=attempt.failure(reports),
        progress=max(progress(reports), noted),
        signal=attempt.ending.signal,
    )


class _Attempt:
    """The tasks while they run, and what is known of them."""

    def __init__(
        self,
        command: ClusterCommand,
        processes: TaskProcesses,
        console: TaskConsole,
        signals: Sequence[int],
        folder: Path,
    ) -> None:
        self.ending = Ending(processes, console, signals, command.grace_seconds)
        self._command = command
        self._folder = folder
        self._spared: tuple[float, set[str]] | None = None
        self._processes = processes
        self._console = console
        self._running = set(processes.tasks)
        self._failed: list[tuple[str, int]] = []
        self._dismissed: set[str] = set()
        self._evaluate_until: float | None = None

    def run(self) -> None:
        """Go on until all tasks have ended."""
        while self._running:
            self._processes.wait_until(self._something_ended, _TICK_S)
            self._note_ends()
            self.ending.forward_signals(self._running)
            if self._failed:
                self._end_after_failure()
            elif not self._training:
                self._end_after_training()
            self.ending.kill_overdue()

    def failure(self, reports: Sequence[FailureReport]) -> Failure | None:
        """The first failure, once all have ended."""
        failure = first_failure(self._failed, reports) if self._failed else None
        if failure is None:
            return None
        output = self._console.last_lines(failure.task)
        return self.ending.explained(with_output(failure, output))

    @property
    def _training(self) -> set[str]:
        return {name for name in self._running if name.startswith(("chief", "worker"))}

    def _something_ended(self) -> bool:
        return len(self._processes.running) < len(self._running)

    def _note_ends(self) -> None:
        ended = self._running.difference(self._processes.running)
        self._running -= ended
        for name in sorted(ended - self._dismissed):
            code = self._processes.tasks[name].exit_code
            # Who the launcher ended after a failure has not failed by itself.
            if code and not (self._failed and self.ending.asked([name])):
                self._failed.append((name, code))

    def _end_after_failure(self) -> None:
        # After a signal the others are ending already, and have their time for it.
        rest = self._running - self.ending.asked(self._running) - self._leaving()
        if rest and self.ending.signal is None:
            what = describe_exit(*self._failed[0])
            self._console.say(f"{what} Ending {listed(sorted(rest))}.")
            self.ending.end(rest, signal.SIGTERM, KILL_AFTER_S)

    def _leaving(self) -> set[str]:
        """Tasks that end their script and whose own exit status tells the cause."""
        if self._spared is None:
            reports = FailureReport.read_all(self._folder)
            names = {r.culprit for r in reports if r.kind == "exited" and r.culprit}
            self._spared = (time.monotonic() + _SETTLE_S, names)
        until, names = self._spared
        return names if time.monotonic() < until else set()

    def _end_after_training(self) -> None:
        now = time.monotonic()
        if self._evaluate_until is None:
            self._evaluate_until = now + self._command.evaluator_seconds
        if now >= self._evaluate_until and not self._dismissed >= self._running:
            self._console.say(
                f"{listed(sorted(self._running))} did not end within "
                f"{self._command.evaluator_seconds:g} s after the training: ending it."
            )
            new = self._running - self._dismissed
            self._dismissed |= new
            rest = new - self.ending.asked(new)
            self.ending.end(rest, signal.SIGTERM, KILL_AFTER_S)
