"""Starts tasks as processes, reads their output, and leaves no process behind."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["OnOutput", "TaskProcess", "TaskProcesses"]

OnOutput = Callable[[str, bytes], None]
"""Takes a task's name and what it has written; nothing (`b""`) at the end of it."""

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PYTHON = (sys.executable, "-I", "-S", str(_BOOTSTRAP))

_TICK_S = 0.02  # How often to look whether a task has ended.
_DRAIN_S = 1.0  # A process that left the task's group may keep its output open.
_KILL_S = 10.0  # The kernel takes its time to end a large process.
_CHUNK_BYTES = 1 << 16


class TaskProcess:
    """One task: a process with a session and process group of its own.

    Attributes:
        name: Such as `"worker:1"`.
        pid: The process' id, which is its group's too.
        exit_code: None while it runs; then its exit status, negative for the signal
            that ended it. It is set once all output of the task has been taken.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self.exit_code: int | None = None
        self._process = process
        self._lock = threading.Lock()
        self._ended_at: float | None = None

    def __repr__(self) -> str:
        state = "running" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"<{self.name}: process {self.pid}, {state}>"

    def terminate(self) -> None:
        """Ask the task to end (SIGTERM). Its own children are its affair."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the task and all processes of its group at once (SIGKILL)."""
        self.signal(signal.SIGKILL, os.killpg)

    def stop(self) -> None:
        """Freeze the task and its group (SIGSTOP), as a machine that hangs."""
        self.signal(signal.SIGSTOP, os.killpg)

    def resume(self) -> None:
        """Let a frozen task go on (SIGCONT)."""
        self.signal(signal.SIGCONT, os.killpg)

    def signal(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Send a signal to the task's process, if it runs still."""
        # The lock: once the process is reaped, its id may be that of another one.
        with self._lock:
            if self._ended_at is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, number)

    def poll(self) -> bool:
        """Whether the process has ended; what it left in its group is killed then."""
        with self._lock:
            if self._ended_at is None and self._process.poll() is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._ended_at = time.monotonic()
            return self._ended_at is not None

    def settle(self, output: IO[bytes]) -> bool:
        """Set the exit code, if the task has ended and its output too.

        The output is not waited for where a process that has left the group would keep
        it open for ever.
        """
        if not self.poll() or self._ended_at is None:
            return False
        if not output.closed and time.monotonic() < self._ended_at + _DRAIN_S:
            return False
        self.exit_code = self._process.returncode
        return True


class _Guard:
    """A process that kills the tasks when this process dies, however it dies.

    Starting tasks tell it their ids on the file descriptor `announcements`.
    """

    def __init__(self) -> None:
        its_end, self.announcements = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_PYTHON, "guard", str(its_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(its_end,),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self.announcements)
            raise
        finally:
            os.close(its_end)
        assert self._process.stdin is not None
        self._line = self._process.stdin

    def tell(self, message: bytes) -> None:
        """Tell it of a task that has begun or ended."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._line.write(message)

    def dismiss(self) -> None:
        """Have it kill what it still knows of, and end.

        That is nothing, but for a process that started while an exception came in
        between.
        """
        if not self._line.closed:
            os.close(self.announcements)
            self._line.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TaskProcesses:
    """A cluster's tasks as processes: a context manager that starts and ends them.

    One thread takes the output of all, and sees them end. A guard process kills them
    if this process dies.

    Args:
        commands: The program and its arguments for each task, by name.
        environments: The whole environment of each task, by name.
        on_output: Called, from the thread, with what the tasks write to stdout and
            stderr.
        cores: The cores that each task is pinned to; tasks that are not in it may use
            all.
        new_task: Makes the object of a task, of its name and process.

    Attributes:
        tasks: The tasks by name, once the context is entered.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environments: Mapping[str, Mapping[str, str]],
        *,
        on_output: OnOutput,
        cores: Mapping[str, Sequence[int]] | None = None,
        new_task: Callable[[str, subprocess.Popen[bytes]], TaskProcess] = TaskProcess,
    ) -> None:
        self.tasks: dict[str, TaskProcess] = {}
        self._commands = commands
        self._environments = environments
        self._on_output = on_output
        self._cores = cores or {}
        self._new_task = new_task
        self._outputs: dict[str, IO[bytes]] = {}
        self._changed = threading.Condition()
        # Nobody starts a task again before its end is noted in full.
        self._noting = threading.Lock()
        self._closing = False
        self._error: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._guard: _Guard | None = None
        self._thread = threading.Thread(
            target=self._watch, name="replicax-processes", daemon=True
        )

    def __enter__(self) -> "TaskProcesses":
        try:
            self._guard = _Guard()
            for name in self._commands:
                self._start(name)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, name: str) -> None:
        assert self._guard is not None
        announcements = self._guard.announcements
        cores = ",".join(map(str, self._cores.get(name, ())))
        process = subprocess.Popen(
            [
                *(*_PYTHON, str(announcements), str(os.getpid()), cores),
                *self._commands[name],
            ],
            env=dict(self._environments[name]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(announcements,),
            start_new_session=True,
            bufsize=0,
        )
        self._guard.tell(b"+%d\n" % process.pid)
        self.tasks[name] = self._new_task(name, process)
        output = process.stdout
        assert output is not None
        self._outputs[name] = output
        self._selector.register(output, selectors.EVENT_READ, name)

    def start_again(self, name: str, environment: Mapping[str, str]) -> TaskProcess:
        """Start a task that has ended again, with this whole environment from now on.

        Returns:
            The new task, which takes the place of the old one in `tasks`.
        """
        with self._noting:
            if self.tasks[name].exit_code is None:
                raise RuntimeError(
                    f"{name} cannot be started again: {self.tasks[name]!r}."
                )
            self._environments = {**self._environments, name: environment}
            self._start(name)
        return self.tasks[name]

    @property
    def running(self) -> list[str]:
        """The names of the tasks that have not ended."""
        return [name for name, task in self.tasks.items() if task.exit_code is None]

    def exit_codes(self, names: Iterable[str]) -> dict[str, int]:
        """The exit codes of those of these tasks that have ended."""
        codes = {name: self.tasks[name].exit_code for name in names}
        return {name: code for name, code in codes.items() if code is not None}

    def wait_until(
        self, reached: Callable[[], bool], timeout_seconds: float | None = None
    ) -> bool:
        """Wait until `reached()`, which is asked whenever output comes or a task ends.

        Returns whether it was reached in time; raises what `on_output` raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or reached(), timeout_seconds)
            if self._error is not None:
                raise self._error
            return reached()

    def close(self) -> None:
        """Kill what runs, and wait for its end. Nothing is left afterwards.

        Raises:
            RuntimeError: If a process does not end though it was killed.
        """
        self._closing = True
        try:
            for task in self.tasks.values():
                task.kill()
            if self._thread.ident is not None:
                self._thread.join(_KILL_S)
            if self._thread.ident is None or self._error is not None:
                self._on_output = _discard
                self._watch_all()
        finally:
            if self._guard is not None:
                self._guard.dismiss()
        if self._thread.is_alive():
            raise RuntimeError(
                f"{', '.join(self.running)} did not end within {_KILL_S:.0f} s of "
                "SIGKILL: the system holds them, perhaps in a file system or driver."
            )
        self._selector.close()

    def _watch(self) -> None:
        try:
            self._watch_all()
        except BaseException as error:  # noqa: BLE001 - `wait_until` raises it.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _watch_all(self) -> None:
        while (running := self.running) or not self._closing:
            events = self._selector.select(_TICK_S)
            for key, _ in events:
                self._read(key.data)
            ended = [name for name in running if self._settle(name)]
            if events or ended:
                with self._changed:
                    self._changed.notify_all()

    def _settle(self, name: str) -> bool:
        with self._noting:
            task, output = self.tasks[name], self._outputs[name]
            if not task.settle(output):
                return False
            self._end_output(name)
            if self._guard is not None:
                self._guard.tell(b"-%d\n" % task.pid)
            return True

    def _read(self, name: str) -> None:
        chunk = os.read(self._outputs[name].fileno(), _CHUNK_BYTES)
        if chunk:
            self._on_output(name, chunk)
        else:
            self._end_output(name)

    def _end_output(self, name: str) -> None:
        output = self._outputs[name]
        if output.closed:
            return
        self._selector.unregister(output)
        output.close()
        self._on_output(name, b"")


def _discard(name: str, chunk: bytes) -> None:
    """Take output that nobody wants any more."""
