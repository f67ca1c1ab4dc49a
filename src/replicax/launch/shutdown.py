"""How a launcher ends tasks: it asks, waits, and kills those that take too long."""

import dataclasses
import signal
import time
from collections.abc import Iterable, Sequence

from replicax.launch.console import TaskConsole
from replicax.launch.outcome import Failure
from replicax.launch.processes import TaskProcesses

__all__ = ["KILL_AFTER_S", "Ending"]

KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL, where nobody asked for an orderly end."""


class Ending:
    """Tasks that were asked to end, and until when they have time.

    Args:
        processes: The tasks.
        console: Where to say what is done.
        signals: The signals that the launcher has received; it grows.
        grace_seconds: How long tasks may take to end after one of them.

    Attributes:
        signal: The signal that asked the launcher to end; None: none did.
    """

    def __init__(
        self,
        processes: TaskProcesses,
        console: TaskConsole,
        signals: Sequence[int],
        grace_seconds: float,
    ) -> None:
        self.signal: int | None = None
        self._processes = processes
        self._console = console
        self._signals = signals
        self._grace_s = grace_seconds
        self._num_forwarded = 0
        self._killed: set[str] = set()
        self._kill_at: dict[str, float] = {}

    def asked(self, names: Iterable[str]) -> set[str]:
        """Those of the tasks that have been asked to end."""
        return set(names) & set(self._kill_at)

    def end(self, names: Iterable[str], number: int, seconds: float) -> None:
        """Send a signal to tasks, and kill those that run after some seconds still."""
        kill_at = time.monotonic() + seconds
        for name in names:
            task = self._processes.tasks[name]
            task.signal(number)
            task.resume()  # A frozen task would not see the signal.
            self._kill_at[name] = min(kill_at, self._kill_at.get(name, kill_at))

    def forward_signals(self, names: Iterable[str]) -> None:
        """Pass on what signals have come since the last time.

        Args:
            names: The tasks that are to get them. A second SIGINT kills all that run.
        """
        if self._console.error is not None and self.signal is None:
            # Whoever reads the output is gone, as after a hang-up.
            self._forward(names, signal.SIGTERM)
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            if list(self._signals).count(signal.SIGINT) > 1:
                self._kill_at = dict.fromkeys(self._processes.running, 0.0)
            else:
                self._forward(names, number)

    def _forward(self, names: Iterable[str], number: int) -> None:
        self.signal = number
        self._console.say(
            f"{signal.Signals(number).name}: the tasks have {self._grace_s:g} s to end."
        )
        self.end(names, number, self._grace_s)

    def kill_overdue(self) -> None:
        """Kill the tasks whose time is over."""
        now = time.monotonic()
        for name in [name for name, end in self._kill_at.items() if end <= now]:
            # Others that were dismissed keep their entry: they are not asked again.
            self._kill_at[name] = float("inf")
            if name in self._processes.running:
                self._killed.add(name)
                self._processes.tasks[name].kill()

    def explained(self, failure: Failure) -> Failure:
        """The failure, of the launcher's own making if it killed the task."""
        if self.signal is None or failure.task not in self._killed:
            return failure
        # Killed by the launcher, which passes on what it was asked to do.
        name = signal.Signals(self.signal).name
        message = f"{failure.task} did not end after {name}."
        return dataclasses.replace(failure, exit_code=-self.signal, message=message)
