"""The supervision loop of a job: handles exits, signals and the order of shutdown."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from replicax._util.listing import listed
from replicax.launch.processes import TaskProcesses

__all__ = ["Supervisor"]

KILL_AFTER_S = 5.0
"""Default time from SIGTERM to SIGKILL."""

_TICK_S = 0.1


class Supervisor:
    """Base class that runs the loop; subclasses decide about restarts and the end.

    Args:
        processes: The tasks, which have been started.
        say: Prints a message for the user.
        signals: The signals that this process has received; a handler appends to it.
        grace_seconds: Time for tasks to exit after one of these signals.
        kill_after_seconds: Time from `terminate` to SIGKILL; None: the default.

    Attributes:
        running: The tasks whose exit the loop has not processed yet.
        dismissed: Terminated tasks that no other task needs any more.
        signal: The last signal forwarded to the tasks; None: no signal.
    """

    def __init__(
        self,
        processes: TaskProcesses,
        *,
        say: Callable[[str], None],
        signals: Sequence[int] = (),
        grace_seconds: float = 0.0,
        kill_after_seconds: float | None = None,
    ) -> None:
        self.running = set(processes.tasks)
        self.dismissed: set[str] = set()
        self.signal: int | None = None
        self._processes = processes
        self._say = say
        self._signals = signals
        self._grace_s = grace_seconds
        self._kill_after_s = kill_after_seconds or KILL_AFTER_S
        self._num_forwarded = 0
        self._kill_at: dict[str, float] = {}  # SIGKILL deadlines of signalled tasks.
        self._killed: set[str] = set()
        self._dismiss_since: dict[str, float] = {}  # Start times of timers by event.

    # Hooks for subclasses.

    @property
    def is_waiting(self) -> bool:
        """Whether tasks wait for a restart, even if none runs now."""
        return False

    def note_exits(self, codes: Mapping[str, int]) -> None:
        """Process the exit codes of the tasks that have exited just now."""

    def act(self) -> None:
        """Restart and terminate tasks; called at least ten times a second."""

    # The loop.

    def run(self) -> None:
        """Run until all tasks have exited and none waits for a restart."""
        while self.running or self.is_waiting:
            self._processes.wait_until(self._something_exited, _TICK_S)
            exited = self.running.difference(self._processes.running)
            self.running -= exited
            if exited:
                self.note_exits(self._processes.exit_codes(exited))
            self.act()
            self._kill_overdue()

    def _something_exited(self) -> bool:
        return len(self._processes.running) < len(self.running)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._kill_at.items() if at <= now]:
            # The entry stays, so that the task is not terminated again.
            self._kill_at[name] = float("inf")
            if name in self._processes.running:
                self._killed.add(name)
                self._processes.tasks[name].kill()

    def running_of(self, *jobs: str) -> set[str]:
        """The running tasks of the named jobs, such as `"worker"`."""
        return {name for name in self.running if name.startswith(jobs)}

    def restart(self, name: str, environment: Mapping[str, str]) -> None:
        """Restart an exited task; drop its kill deadline and all `dismiss` timers."""
        self._processes.start_again(name, environment)
        self.running.add(name)
        self._kill_at.pop(name, None)
        self._killed.discard(name)
        self._dismiss_since.clear()

    # The end of tasks.

    def terminate(self, names: Iterable[str]) -> None:
        """Send SIGTERM to tasks; send SIGKILL later if they still run."""
        self._end(names, signal.SIGTERM, self._kill_after_s)

    def dismiss(
        self, names: set[str], since: str, seconds: float, after: str | None = None
    ) -> None:
        """Terminate unneeded tasks, after a time to exit on their own.

        Args:
            names: The tasks.
            since: Key of the event that made the tasks unnecessary. The timer starts at
                the first call with this key.
            seconds: Time for the tasks to exit on their own.
            after: Description of the event for a message; None: no message.
        """
        names = names - self.dismissed
        begin = self._dismiss_since.setdefault(since, time.monotonic())
        if not names or time.monotonic() < begin + seconds:
            return
        if after is not None:
            self._say(
                f"{listed(sorted(names))} did not end within {seconds:g} s after "
                f"{after}: terminating."
            )
        self.dismissed |= names
        self.terminate(names - set(self._kill_at))

    def forward_signals(self, names: Iterable[str]) -> None:
        """Forward to tasks the signals received since the last call.

        A second SIGINT kills all running tasks.
        """
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            if list(self._signals).count(signal.SIGINT) > 1:
                self._kill_at = dict.fromkeys(self._processes.running, 0.0)
            else:
                self.forward(names, number)

    def forward(self, names: Iterable[str], number: int) -> None:
        """Forward a signal, and start the tasks' grace period."""
        self.signal = number
        if self.running:
            self._say(
                f"{signal.Signals(number).name}: the tasks have {self._grace_s:g} s "
                "to end."
            )
        self._end(names, number, self._grace_s)

    def _end(self, names: Iterable[str], number: int, seconds: float) -> None:
        kill_at = time.monotonic() + seconds
        for name in names:
            task = self._processes.tasks[name]
            task.signal(number)
            task.resume()  # A frozen task would not see the signal.
            self._kill_at[name] = min(kill_at, self._kill_at.get(name, kill_at))
