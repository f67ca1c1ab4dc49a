"""One attempt to run all tasks of a cluster on this machine, from start to end."""

import dataclasses
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax.cluster.console import TaskConsole
from replicax.cluster.failure import REPORT_DIR, FailureReport
from replicax.cluster.outcome import (
    Failure,
    Outcome,
    describe_exit,
    first_failure,
    progress,
)
from replicax.cluster.placement import task_names, tf_configs
from replicax.cluster.processes import TaskProcesses

__all__ = ["ClusterCommand", "run_attempt"]

_TICK_S = 0.1
_KILL_AFTER_S = 5.0  # From SIGTERM to SIGKILL, where nobody asked for an orderly end.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCommand:
    """What to run as the tasks of a cluster.

    Attributes:
        command: The program and its arguments.
        num_tasks: Number of tasks by job.
        environment: The whole environment of a task, but for what names the task.
        cores: The cores that each task is pinned to, by task name.
        grace_seconds: How long tasks may take to end after a signal.
        evaluator_seconds: How long the evaluator may go on after the training.
    """

    command: Sequence[str]
    num_tasks: Mapping[str, int]
    environment: Mapping[str, str]
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
            attempt = _Attempt(command, processes, console, signals)
            attempt.run()
        reports = FailureReport.read_all(Path(folder))
    return Outcome(
        failure=attempt.failure(reports),
        progress=progress(reports),
        signal=attempt.asked_to_end,
    )


class _Attempt:
    """The tasks while they run, and what is known of them."""

    def __init__(
        self,
        command: ClusterCommand,
        processes: TaskProcesses,
        console: TaskConsole,
        signals: Sequence[int],
    ) -> None:
        self.asked_to_end: int | None = None
        self._command = command
        self._processes = processes
        self._console = console
        self._signals = signals
        self._num_forwarded = 0
        self._running = set(processes.tasks)
        self._failed: list[tuple[str, int]] = []
        self._dismissed: set[str] = set()
        self._killed: set[str] = set()
        self._kill_at: dict[str, float] = {}
        self._evaluate_until: float | None = None

    def run(self) -> None:
        """Go on until all tasks have ended."""
        while self._running:
            self._processes.wait_until(self._something_ended, _TICK_S)
            self._note_ends()
            self._forward_signals()
            if self._failed:
                self._end_after_failure()
            elif not self._training:
                self._end_after_training()
            self._kill_overdue()

    def failure(self, reports: Sequence[FailureReport]) -> Failure | None:
        """The first failure, once all have ended."""
        failure = first_failure(self._failed, reports) if self._failed else None
        number = self.asked_to_end
        if failure is None or number is None or failure.task not in self._killed:
            return failure
        # Killed by the launcher, which passes on what it was asked to do.
        message = f"{failure.task} did not end after {signal.Signals(number).name}."
        return dataclasses.replace(failure, exit_code=-number, message=message)

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
            if code:
                self._failed.append((name, code))

    def _forward_signals(self) -> None:
        if self._console.error is not None and self.asked_to_end is None:
            # Whoever reads the output is gone, as after a hang-up.
            self._ask_to_end(signal.SIGTERM)
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            if list(self._signals).count(signal.SIGINT) > 1:
                self._kill_at = dict.fromkeys(self._running, 0.0)
            else:
                self._ask_to_end(number)

    def _ask_to_end(self, number: int) -> None:
        self.asked_to_end = number
        seconds = self._command.grace_seconds
        self._console.say(
            f"{signal.Signals(number).name}: the tasks have {seconds:g} s to end."
        )
        self._end(self._running, number, seconds)

    def _end_after_failure(self) -> None:
        # After a signal the others are ending already, and have their time for it.
        rest = self._running.difference(self._kill_at)
        if rest and self.asked_to_end is None:
            what = describe_exit(*self._failed[0])
            self._console.say(f"{what} Ending {', '.join(sorted(rest))}.")
            self._end(rest, signal.SIGTERM, _KILL_AFTER_S)

    def _end_after_training(self) -> None:
        servers = {name for name in self._running if name.startswith("ps")}
        self._dismiss(servers)
        evaluators = self._running - servers
        now = time.monotonic()
        if self._evaluate_until is None:
            self._evaluate_until = now + self._command.evaluator_seconds
        if now >= self._evaluate_until and not self._dismissed >= evaluators:
            self._console.say(
                f"{', '.join(sorted(evaluators))} did not end within "
                f"{self._command.evaluator_seconds:g} s after the training: ending it."
            )
            self._dismiss(evaluators)

    def _dismiss(self, names: set[str]) -> None:
        new = names - self._dismissed
        self._dismissed |= new
        self._end(new.difference(self._kill_at), signal.SIGTERM, _KILL_AFTER_S)

    def _end(self, names: set[str], number: int, seconds: float) -> None:
        kill_at = time.monotonic() + seconds
        for name in names:
            task = self._processes.tasks[name]
            task.signal(number)
            task.resume()  # A frozen task would not see the signal.
            self._kill_at[name] = min(kill_at, self._kill_at.get(name, kill_at))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for name in [name for name, end in self._kill_at.items() if end <= now]:
            # Others that were dismissed keep their entry: they are not asked again.
            self._kill_at[name] = float("inf")
            if name in self._running:
                self._killed.add(name)
                self._processes.tasks[name].kill()
