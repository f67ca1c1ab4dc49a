"""The policy of a job: restarts after exits, and the order of its shutdown.

Synchronous workers are one gang, restarted as a whole, since a step needs all of them.
In a job with parameter servers each task is a gang of its own, and the job ends with
its chief (worker 0 without a chief). A permanent failure of any task, such as an
exception of its script, ends the job. If a worker has no restart left, the others
continue, and the launcher exits with that worker's exit code.
"""

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence

from replicax._util.listing import listed
from replicax.cluster.failure import ExitCode, FailureReport, exit_status
from replicax.launch.console import TaskConsole
from replicax.launch.failures import (
    CRASH_LOOP,
    Failure,
    RestartPolicy,
    back_off,
    describe_exit,
    first_failure,
    last_lines,
    with_output,
)
from replicax.launch.gang import ClusterCommand, Gang
from replicax.launch.processes import TaskProcesses
from replicax.launch.supervisor import Supervisor

__all__ = ["Job"]

_SETTLE_S = 3.0  # Time for other tasks to notice that the job has failed, and to exit.
_LEAVE_S = 10.0  # Time to exit for a task whose script ended too early.


class Job(Supervisor):
    """Supervises a job: decides about restarts and the end after each exit.

    Args:
        command: The command of the tasks.
        policy: The restart policy of each gang.
        gangs: The tasks.
        processes: Their processes, which have been started.
        console: Writes their output.
        signals: The signals that this process has received; a handler appends to it.
    """

    def __init__(
        self,
        command: ClusterCommand,
        policy: RestartPolicy,
        gangs: Sequence[Gang],
        processes: TaskProcesses,
        console: TaskConsole,
        signals: Sequence[int],
    ) -> None:
        super().__init__(
            processes,
            say=console.say,
            signals=signals,
            grace_seconds=command.grace_seconds,
        )
        self._command = command
        self._policy = policy
        self._gangs = gangs
        self._console = console
        self._gang_of = {name: gang for gang in gangs for name in gang.names}
        self._chief = self._gang_of.get("chief:0") or self._gang_of["worker:0"]
        self._has_servers = "ps" in command.num_tasks
        self._is_done = False  # The chief's gang has succeeded.
        self._culprit: str | None = None  # The task whose failure ends the job.
        self._failures: list[Failure] = []  # Failures without a restart.
        self._reason = ""  # The reason for no restart, in the summary.

    @property
    def is_waiting(self) -> bool:
        """Whether a gang waits for its restart."""
        return any(gang.restart_at is not None for gang in self._gangs)

    @property
    def _training(self) -> set[str]:
        return self.running_of("chief", "worker")

    @property
    def _restarts_are_over(self) -> bool:
        """Whether there will be no more restarts."""
        ended = self._is_done or self._culprit is not None
        return ended or self.signal is not None

    # Exits and restarts.

    def note_exits(self, codes: Mapping[str, int]) -> None:
        """Process the exit codes of the tasks that have exited just now."""
        # The chief first: its exit explains the exits of other tasks.
        names = sorted(codes, key=lambda n: (self._gang_of[n] is not self._chief, n))
        for name in names:
            gang = self._gang_of[name]
            gang.exited[name] = codes[name]
            # A task that the launcher has terminated has not failed.
            is_terminated = gang.failed and name in self._kill_at
            if codes[name] and not is_terminated and name not in self.dismissed:
                gang.failed.append((name, codes[name]))
        for gang in dict.fromkeys(self._gang_of[name] for name in names):
            if gang.has_exited and gang.failed:
                self._note_failure(gang)
            elif gang.has_exited:
                is_done = 0 in gang.exited.values()
                gang.ended = "done" if is_done else "ended"
                self._is_done |= is_done and gang is self._chief
        if self._chief_failed_when_done and not self._restarts_are_over:
            self._is_done = True
            self._say("The servers have ended because the chief's script has ended.")

    @property
    def _chief_failed_when_done(self) -> bool:
        """Whether the chief has failed after the end of its script.

        A server exits with 0 when the chief has reported the end of its script.
        """
        servers = [gang for gang in self._gangs if gang.names[0].startswith("ps")]
        return bool(self._chief.failures) and any(x.ended == "done" for x in servers)

    def _note_failure(self, gang: Gang) -> None:
        gang.ended = "killed" if gang.failed[0][1] < 0 else "failed"
        reports = gang.reports
        failure = self._explain(gang, reports)
        gang.failures.append(failure)
        gang.steps.append(self._steps_of(gang, reports))
        if self._culprit is not None or self.signal is not None:
            self._failures.append(failure)  # A consequence of the first failure.
        elif (
            self._is_done or self._chief_failed_when_done
        ) and not self._policy.is_permanent(failure):
            self._is_done = True
            self._say(f"{failure.message} The job is done without it.")
        elif (server := _server_without_values(reports)) is not None:
            self._failures.append(failure)
            cause = [failure, *self._gang_of[server].failures][-1]
            self._fail_for_good(
                self._gang_of[server], cause, f"{server} is back without a snapshot"
            )
        elif (culprit := self._running_culprit()) is not None:
            self._failures.append(failure)
            self._culprit = culprit
        elif (reason := self._policy.give_up(failure, gang.steps)) is not None:
            if not self._has_servers:
                self._reason = reason
            self._fail_for_good(gang, failure, reason)
        else:
            wait = back_off(gang.num_restarts, self._policy.backoff_seconds)
            gang.restart_at = time.monotonic() + wait
            self._say(
                f"{failure.message} Restart {gang.num_starts} of "
                f"{self._policy.max_restarts} in {wait:.1f} s."
            )

    def _explain(self, gang: Gang, reports: Sequence[FailureReport]) -> Failure:
        failure = first_failure(gang.failed, reports)
        assert failure is not None
        number = self.signal
        if number is not None and failure.task in self._killed:
            # The launcher killed the task after forwarding a signal.
            message = f"{failure.task} did not end after {signal.Signals(number).name}."
            return dataclasses.replace(failure, exit_code=-number, message=message)
        return with_output(failure, self._console.pop_last_lines(failure.task))

    def _steps_of(self, gang: Gang, reports: Sequence[FailureReport]) -> int:
        """The last step of an attempt; -1: unknown."""
        if not self._has_servers:
            reported = [step for report in reports for step in report.steps.values()]
            return max([*reported, *gang.steps_by_task().values()], default=-1)
        # Servers and the chief of a `ClusterCoordinator` train no steps themselves.
        trains_none = gang is self._chief or gang.names[0].startswith("ps")
        gangs = self._gangs if trains_none else [gang]
        return sum(sum(gang.steps_by_task().values()) for gang in gangs)

    def _running_culprit(self) -> str | None:
        """Find a running task that has already reported a permanent failure."""
        for name in sorted(self.running):
            for report in self._gang_of[name].reports:
                failure = first_failure([(name, report.exit_code)], [report])
                if failure is not None and self._policy.is_permanent(failure):
                    return name
        return None

    def _fail_for_good(self, gang: Gang, failure: Failure, reason: str) -> None:
        self._failures.append(failure)
        is_permanent = self._policy.is_permanent(failure) and not self._is_done
        outcome = "the others go on"
        if gang is self._chief or failure.task.startswith("ps") or is_permanent:
            self._culprit = failure.task
            outcome = "the job cannot go on"
        if self._has_servers:
            self._say(f"{failure.message} No restart follows ({reason}): {outcome}.")

    def _restart(self) -> None:
        """Restart the gangs whose wait has ended, unless the job has ended."""
        waiting = [gang for gang in self._gangs if gang.restart_at is not None]
        for gang in waiting:
            if self._restarts_are_over:
                gang.restart_at = None
                if not self._is_done:
                    self._failures.append(gang.failures[-1])
                if not self._has_servers:
                    self._reason = "a signal came before the restart"
            elif gang.restart_at is not None and gang.restart_at <= time.monotonic():
                for name, environment in gang.begin().items():
                    self._console.pop_last_lines(name)  # Drop the old output.
                    self.restart(name, environment)

    def progress(self) -> list[tuple[str, ...]]:
        """One row per task: its name, state, steps and restarts."""
        lines = []
        for gang in self._gangs:
            steps, num = gang.steps_by_task(), gang.num_restarts
            restarts = f"{num} restart{'s' * (num > 1)}" if num else ""
            for name in gang.names:
                progress = f"{steps[name]:,} steps" if name in steps else ""
                lines.append((name, gang.state_of(name), progress, restarts))
        return lines

    # The end of the job.

    def act(self) -> None:
        """Restart and terminate the tasks that are due."""
        # Servers get no signal yet: workers may need them to save.
        names = (self._has_servers and self._training) or self.running
        if self._console.error is not None and self.signal is None:
            # The reader of the output is gone, as after a hang-up.
            self.forward(names, signal.SIGTERM)
        self.forward_signals(names)
        self._restart()
        failing = [gang for gang in self._gangs if gang.failed and not gang.has_exited]
        for gang in failing:
            self._end_the_rest(gang)
        if not failing:
            self._shut_down()
        self._console.refresh()

    def _end_the_rest(self, gang: Gang) -> None:
        if self.signal is not None:
            return  # The tasks are in their grace period already.
        if gang.exit_deadline is None:
            gang.exit_deadline = time.monotonic() + _LEAVE_S
        rest = set(gang.names) - set(gang.exited) - set(self._kill_at)
        if rest and time.monotonic() < gang.exit_deadline:
            # Let a task whose script has ended exit by itself, with its own status.
            rest -= {r.culprit for r in gang.reports if r.kind == "exited"}
        if rest:
            cause = describe_exit(*gang.failed[0])
            self._say(f"{cause} Ending {listed(sorted(rest))}.")
            self.terminate(rest)

    def _shut_down(self) -> None:
        """Terminate tasks that are not needed any more, dependents first."""
        grace = self._command.grace_seconds
        serving = self.running_of("ps")
        if self.signal is not None:
            if self._has_servers and not self._training:
                self.dismiss(self.running, "signal", 0.0)
        elif self._culprit is not None:
            # The culprit exits by itself, perhaps after a save.
            self.dismiss(self.running - {self._culprit}, "failure", _SETTLE_S)
            self.dismiss(self.running, "failure", _SETTLE_S + grace)
        elif self._is_done and len(serving) < self._command.num_tasks.get("ps", 0):
            # Without all servers the workers cannot train.
            self.dismiss(self._training, "servers", grace)
        if not self._training and not self.is_waiting:
            seconds = self._command.evaluator_seconds
            evaluating = self.running - serving
            self.dismiss(evaluating, "evaluation", seconds, "the training")
            self.dismiss(serving, "training", grace, "the last worker")

    def summarize(self) -> int:
        """Print the outcome of the job; return the first failure's exit status."""
        num = sum(gang.num_restarts for gang in self._gangs)
        restarts = f"{num} restart" if num == 1 else f"{num} restarts"
        first = self._first_failure()
        if first is None:
            if num:
                self._say(f"The job is done, after {restarts}.")
            return ExitCode.DONE
        if self._reason == CRASH_LOOP:
            failure = self._chief.failures[0]
            text = f"{failure.message}\n{failure.traceback or ''}".rstrip()
            self._say(f"The first failure of the first attempt:\n{text}")
        elif lines := last_lines(first):
            self._say(lines)
        status = exit_status(first.exit_code)
        reason = self._reason
        if not reason and self.signal is not None:
            reason = f"after {signal.Signals(self.signal).name}"
        others = {f.task for f in self._failures if self._is_done} - {first.task}
        self._say(
            f"{'The job is done, but ' if self._is_done else ''}{first.task} failed "
            f"first, with exit code {status}{f' ({reason})' if reason else ''}, after "
            f"{restarts}. {first.message}"
            f"{f' So did {listed(sorted(others))}.' if others else ''}"
        )
        return status

    def _first_failure(self) -> Failure | None:
        # The culprit's last failure, or else the first failure of any task.
        of_culprit = [f for f in self._failures if f.task == self._culprit]
        first = next(reversed(of_culprit), next(iter(self._failures), None))
        is_server = first is not None and first.task.startswith("ps")
        if first is not None and is_server and first.exit_code == ExitCode.FAILED:
            # A server exits with this code after the job's failure, perhaps before the
            # culprit.
            for failure in self._failures:
                is_server = failure.task.startswith("ps")
                if not is_server and self._policy.is_permanent(failure):
                    return failure
        return first


def _server_without_values(reports: Sequence[FailureReport]) -> str | None:
    """Find a server that has lost its values, from the tasks' reports."""
    lost = (r.culprit for r in reports if r.kind == "values lost")
    return next(lost, None)
