"""Supervises the tasks of a job: one loop that notes exits and shuts down in order."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from replicax._util.listing import listed
from replicax.launch.processes import TaskProcesses

__all__ = ["Supervisor"]

KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL, where nobody asked for an orderly end."""

_TICK_S = 0.1


class Supervisor:
    """Runs the loop, restarts tasks, ends them, and kills those that take too long.

    The loop knows no restart policy: subclasses decide what follows an exit.

    Args:
        processes: The tasks, which have been started.
        say: Takes messages for the user.
        signals: The signals that this process has received; it grows.
        grace_seconds: How long tasks may take to end after one of them.
        kill_after_seconds: How long they may take after SIGTERM otherwise.

    Attributes:
        running: The tasks that have not exited, as far as the loop has seen.
        dismissed: Tasks that were ended because nobody needed them any more.
        signal: The signal that asked this process to end; None: none did.
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
        self._kill_at: dict[str, float] = {}  # Of tasks that were asked to end.
        self._killed: set[str] = set()
        self._since: dict[str, float] = {}

    # What subclasses decide.

    @property
    def is_waiting(self) -> bool:
        """Whether tasks are to be restarted, though perhaps none runs now."""
        return False

    def note_exits(self, codes: Mapping[str, int]) -> None:
        """Take the exit codes of the tasks that have exited just now."""

    def act(self) -> None:
        """Restart and end tasks; called after each wait, ten times a second or more."""

    # The loop.

    def run(self) -> None:
        """Go on until all tasks have exited and none is to be restarted."""
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
        for name in [name for name, end in self._kill_at.items() if end <= now]:
            # Others that were dismissed keep their entry: they are not asked again.
            self._kill_at[name] = float("inf")
            if name in self._processes.running:
                self._killed.add(name)
                self._processes.tasks[name].kill()

    def running_of(self, *jobs: str) -> set[str]:
        """The running tasks of these jobs, such as `"worker"`."""
        return {name for name in self.running if name.startswith(jobs)}

    def restart(self, name: str, environment: Mapping[str, str]) -> None:
        """Start a task that has exited again; no earlier deadline holds for it."""
        self._processes.start_again(name, environment)
        self.running.add(name)
        self._kill_at.pop(name, None)
        self._killed.discard(name)
        self._since.clear()

    # The end of tasks.

    def terminate(self, names: Iterable[str]) -> None:
        """Send SIGTERM to tasks, and soon SIGKILL to those that run still."""
        self._end(names, signal.SIGTERM, self._kill_after_s)

    def dismiss(
        self, names: set[str], since: str, seconds: float, after: str | None = None
    ) -> None:
        """Terminate tasks that nobody needs, once their time for it is over.

        Args:
            names: The tasks.
            since: What has made them needless: their time begins with the first call
                that names it.
            seconds: How long they may take to end by themselves.
            after: The same in words, for a message that says so; None: no message.
        """
        names = names - self.dismissed
        begin = self._since.setdefault(since, time.monotonic())
        if not names or time.monotonic() < begin + seconds:
            return
        if after is not None:
            self._say(
                f"{listed(sorted(names))} did not end within {seconds:g} s after "
                f"{after}: ending it."
            )
        self.dismissed |= names
        self.terminate(names - set(self._kill_at))

    def forward_signals(self, names: Iterable[str]) -> None:
        """Pass on to tasks the signals that have come since the last time.

        A second SIGINT kills all that run.
        """
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            if list(self._signals).count(signal.SIGINT) > 1:
                self._kill_at = dict.fromkeys(self._processes.running, 0.0)
            else:
                self.forward(names, number)

    def forward(self, names: Iterable[str], number: int) -> None:
        """Pass a signal on, and give the tasks time for an orderly end."""
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
