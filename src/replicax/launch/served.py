"""A cluster with parameter servers on this machine: tasks are restarted one by one.

The chief, which is worker 0 where there is no chief, decides about the whole: with its
end the job is done or has failed. Servers see that by themselves. A task whose failure
is permanent, such as an exception of its script, ends the job. Another worker that has
no restart left is missed by nobody, but its exit code is the launcher's.
"""

import dataclasses
import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from replicax._util.listing import listed
from replicax.cluster.failure import (
    ATTEMPT,
    REPORT_DIR,
    STATUS_FILE,
    ExitCode,
    FailureReport,
)
from replicax.launch.attempt import ClusterCommand
from replicax.launch.console import TaskConsole
from replicax.launch.job_status import JobStatus, servers_of
from replicax.launch.job_table import TaskState, draw, place_in_training
from replicax.launch.local_tasks import tf_configs
from replicax.launch.outcome import (
    Failure,
    Outcome,
    RestartPolicy,
    crash_loop,
    exit_status,
    first_failure,
    last_lines,
    with_output,
)
from replicax.launch.processes import TaskProcesses
from replicax.launch.shutdown import KILL_AFTER_S, Ending
from replicax.ps.credentials import Credentials

__all__ = ["run_served"]

_TICK_S = 0.1
_SETTLE_S = 3.0  # For the others to see by themselves that the job has failed.


def run_served(
    command: ClusterCommand,
    console: TaskConsole,
    signals: Sequence[int],
    policy: RestartPolicy,
) -> int:
    """Run the tasks until all have ended. None is left.

    Args:
        command: What to run.
        console: Where their output goes.
        signals: The signals that the launcher has received; it grows.
        policy: How often each task may be started again, and after what.

    Returns:
        The exit status of the task that failed first and for good; 0: none did.
    """
    configs = tf_configs(command.num_tasks)
    with tempfile.TemporaryDirectory(prefix="replicax-") as folder:
        tasks = {
            name: _Task(
                name,
                {**command.environment, "TF_CONFIG": text},
                Path(folder) / name.replace(":", "-"),
            )
            for name, text in configs.items()
        }
        processes = TaskProcesses(
            dict.fromkeys(configs, command.command),
            {name: task.next_environment() for name, task in tasks.items()},
            on_output=console.take,
            cores=command.cores,
        )
        with processes:
            ending = Ending(processes, console, signals, command.grace_seconds)
            run = _Run(command, console, processes, ending, tasks, policy)
            with _Display(console, run, command.environment):
                run.go_on()
    return run.summarize()


@dataclasses.dataclass
class _Task:
    """One task through its restarts."""

    name: str
    environment: Mapping[str, str]
    folder: Path
    num_starts: int = 0
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    restart_at: float | None = None
    ended: str | None = None  # How, in a word, when it will not be started again.

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    @property
    def state(self) -> str:
        restart_at = self.restart_at
        if restart_at is not None:
            return f"again in {max(0.0, restart_at - time.monotonic()):.0f} s"
        return self.ended or "running"

    def next_environment(self) -> dict[str, str]:
        """Of its next start, with a folder of its own for the report."""
        folder = self.folder / str(self.num_starts)
        folder.mkdir(parents=True)
        number = str(self.num_starts)
        self.num_starts += 1
        return {**self.environment, REPORT_DIR: str(folder), ATTEMPT: number}

    def last_status(self) -> dict[str, Any] | None:
        """What a server has left behind; None: nothing, as it was killed."""
        path = self.folder / str(self.num_restarts) / STATUS_FILE
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def reports(self) -> list[FailureReport]:
        """What it has reported since its last start."""
        return FailureReport.read_all(self.folder / str(self.num_restarts))

    def failure(self, exit_code: int) -> Failure:
        """Why it ended just now."""
        failure = first_failure([(self.name, exit_code)], self.reports)
        assert failure is not None
        return failure


class _Run:
    """The tasks while they run, and what is known of them."""

    def __init__(
        self,
        command: ClusterCommand,
        console: TaskConsole,
        processes: TaskProcesses,
        ending: Ending,
        tasks: dict[str, _Task],
        policy: RestartPolicy,
    ) -> None:
        self.tasks = tasks
        self.status: JobStatus | None = None
        self._command = command
        self._console = console
        self._processes = processes
        self._ending = ending
        self._policy = policy
        self._chief = "chief:0" if "chief:0" in tasks else "worker:0"
        self._chief_is_done = False
        self._running = set(tasks)
        self._dismissed: set[str] = set()
        self._failures: list[Failure] = []
        self._why_over: str | None = None
        self._since: dict[str, float] = {}

    @property
    def servers(self) -> list[str]:
        """The addresses of the parameter servers."""
        return servers_of(self.tasks["ps:0"].environment["TF_CONFIG"])

    def go_on(self) -> None:
        """Go on until all tasks have ended."""
        while self._running or self._waiting:
            self._processes.wait_until(self._something_ended, _TICK_S)
            self._note_ends()
            self._note_lost_variables()
            # Workers may want to save, which needs the servers.
            self._ending.forward_signals(self._training or self._running)
            if self._ending.signal is not None or self._is_over:
                self._cancel_restarts()
            self._start_again()
            self._end_what_nobody_needs()
            self._ending.kill_overdue()

    @property
    def _is_over(self) -> bool:
        return self._chief_is_done or self._why_over is not None

    @property
    def _waiting(self) -> list[_Task]:
        return [task for task in self.tasks.values() if task.restart_at is not None]

    @property
    def _training(self) -> set[str]:
        return {name for name in self._running if name.startswith(("chief", "worker"))}

    @property
    def _serving(self) -> set[str]:
        return {name for name in self._running if name.startswith("ps")}

    # Ends and restarts.

    def _something_ended(self) -> bool:
        return len(self._processes.running) < len(self._running)

    def _note_ends(self) -> None:
        ended = self._running.difference(self._processes.running)
        self._running -= ended
        # The chief first: its end explains the others'.
        for name in sorted(ended, key=lambda name: (name != self._chief, name)):
            exit_code = self._processes.tasks[name].exit_code
            if exit_code:
                self._note_failure(self.tasks[name], exit_code)
            else:
                self.tasks[name].ended = "done"
                self._chief_is_done |= name == self._chief
        if ended and self.status is not None:
            self.status.look()

    def _note_failure(self, task: _Task, exit_code: int) -> None:
        task.ended = "killed" if exit_code < 0 else "failed"
        if task.name in self._dismissed:
            task.ended = "ended"
            return
        output = self._console.last_lines(task.name)
        failure = with_output(self._ending.explained(task.failure(exit_code)), output)
        progress = -1 if self.status is None else self.status.progress(task.name)
        task.outcomes.append(Outcome(failure=failure, progress=progress))
        if self._why_over is not None or self._ending.signal is not None:
            self._failures.append(failure)  # A consequence.
        elif self._chief_is_done and not self._policy.is_permanent(failure):
            self._console.say(f"{failure.message} The job is done without it.")
        elif (culprit := self._permanently_failing()) is not None:
            self._failures.append(failure)
            self._why_over = culprit
        elif (reason := self._why_for_good(task)) is None:
            wait = self._policy.wait_seconds(len(task.outcomes) - 1)
            task.restart_at = time.monotonic() + wait
            self._console.say(
                f"{failure.message} Restart {task.num_starts} of "
                f"{self._policy.max_restarts} in {wait:.1f} s."
            )
        else:
            self._fail_for_good(failure, reason)

    def _permanently_failing(self) -> str | None:
        """A task that has reported a permanent failure and has not ended yet."""
        for name in sorted(self._running):
            for report in self.tasks[name].reports:
                failure = first_failure([(name, report.exit_code)], [report])
                if failure is not None and self._policy.is_permanent(failure):
                    return name
        return None

    def _why_for_good(self, task: _Task) -> str | None:
        """Why a task that failed is not started again; None: it is."""
        failure = task.outcomes[-1].failure
        assert failure is not None
        if self._policy.is_permanent(failure):
            return "It would fail again"
        if crash_loop(task.outcomes):
            return "Three restarts in a row brought no step more"
        if task.num_restarts >= self._policy.max_restarts:
            return "No restart is left"
        return None

    def _fail_for_good(self, failure: Failure, reason: str) -> None:
        self._failures.append(failure)
        name = failure.task
        is_permanent = self._policy.is_permanent(failure) and not self._chief_is_done
        if name == self._chief or name.startswith("ps") or is_permanent:
            self._why_over = name
            rest = "the job cannot go on"
        else:
            rest = "the others go on"
        self._console.say(f"{failure.message} {reason}: {rest}.")

    def _note_lost_variables(self) -> None:
        """A server that is back without its variables is of no use to anybody."""
        emptied = set() if self.status is None else self.status.emptied
        for name in sorted(emptied):
            outcomes = self.tasks[name].outcomes
            if self._is_over or self._ending.signal is not None or not outcomes:
                return
            failure = outcomes[-1].failure
            assert failure is not None
            self._fail_for_good(failure, "It is back without a snapshot")

    def _cancel_restarts(self) -> None:
        for task in self._waiting:
            task.restart_at = None
            failure = task.outcomes[-1].failure
            if not self._chief_is_done and failure is not None:
                self._failures.append(failure)

    def _start_again(self) -> None:
        now = time.monotonic()
        for task in self._waiting:
            if task.restart_at is not None and task.restart_at <= now:
                task.restart_at = task.ended = None
                self._processes.start_again(task.name, task.next_environment())
                self._running.add(task.name)

    # The end of the job.

    def _end_what_nobody_needs(self) -> None:
        grace = self._command.grace_seconds
        if self._ending.signal is not None:
            if not self._training:
                self._dismiss(self._running, "signal", 0.0)
        elif self._why_over is not None:
            # Who has failed ends by itself, perhaps after it has saved something.
            culprit = {self._why_over}
            self._dismiss(self._running - culprit, "failure", _SETTLE_S)
            self._dismiss(self._running, "failure", _SETTLE_S + grace)
        elif self._chief_is_done and not self._serving:
            # Nothing can be trained any more.
            self._dismiss(self._training, "servers", grace)
        if not self._training and not self._waiting:
            evaluators = self._running - self._serving
            seconds = self._command.evaluator_seconds
            self._dismiss(evaluators, "evaluation", seconds, "the training")
            self._dismiss(self._serving, "training", grace, "the last worker")

    def _dismiss(
        self, names: set[str], since: str, seconds: float, after: str | None = None
    ) -> None:
        """End tasks that run still some seconds after something was the case first."""
        names = names - self._dismissed
        begin = self._since.setdefault(since, time.monotonic())
        if not names or time.monotonic() < begin + seconds:
            return
        if after is not None:
            self._console.say(
                f"{listed(sorted(names))} did not end within {seconds:g} s after "
                f"{after}: ending it."
            )
        self._dismissed |= names
        rest = names - self._ending.asked(names)
        self._ending.end(rest, signal.SIGTERM, KILL_AFTER_S)

    def summarize(self) -> int:
        """Say how it ended; the exit status."""
        num = sum(task.num_restarts for task in self.tasks.values())
        restarts = f"{num} restart" if num == 1 else f"{num} restarts"
        first = self._first_failure()
        if first is None:
            if num:
                self._console.say(f"The job is done, after {restarts}.")
            return ExitCode.DONE
        if lines := last_lines(first):
            self._console.say(lines)
        status = exit_status(first.exit_code)
        job = "The job is done, but " if self._chief_is_done else ""
        others = {f.task for f in self._failures if self._chief_is_done}
        others.discard(first.task)
        also = f" So did {listed(sorted(others))}." if others else ""
        if self._ending.signal is not None:
            after = f"after {signal.Signals(self._ending.signal).name}, "
        else:
            after = ""
        self._console.say(
            f"{job}{first.task} failed first, with exit code {status}, {after}after "
            f"{restarts}. {first.message}{also}"
        )
        return status

    def _first_failure(self) -> Failure | None:
        if not self._failures:
            return None
        first = self._failures[0]
        for failure in self._failures:
            if failure.task == self._why_over:
                first = failure
        if first.task.startswith("ps") and first.exit_code == ExitCode.FAILED:
            # So a server ends when the job has failed, perhaps before who failed does.
            for failure in self._failures:
                is_server = failure.task.startswith("ps")
                if not is_server and self._policy.is_permanent(failure):
                    return failure
        return first


class _Display:
    """The table of what the servers tell, while in the context."""

    def __init__(
        self, console: TaskConsole, run: _Run, environment: Mapping[str, str]
    ) -> None:
        self._console = console
        self._run = run
        try:
            credentials = Credentials.from_environment(environment)
        except (ValueError, OSError):
            return  # The tasks cannot use them either, and say so.
        run.status = JobStatus(run.servers, credentials, self._show)

    def __enter__(self) -> "_Display":
        return self

    def __exit__(self, *_: object) -> None:
        status = self._run.status
        if status is None:
            return
        status.close()
        for server in range(len(self._run.servers)):
            last = self._run.tasks[f"ps:{server}"].last_status()
            if last is not None:
                status.note_end(server, last)
        table = self._draw(status, at_the_end=True) if status.is_known else None
        self._console.end_table(table)

    def _show(self) -> None:
        status = self._run.status
        if status is not None and status.is_known:
            self._console.show(self._draw(status))

    def _draw(self, status: JobStatus, *, at_the_end: bool = False) -> Table:
        states = [
            TaskState(task.name, task.state, task.num_restarts)
            for task in self._run.tasks.values()
        ]
        title = place_in_training(status.streams)
        return draw(
            states,
            status.readings,
            title,
            totals=status.totals,
            at_the_end=at_the_end,
        )
