"""Runs tasks as processes: starts them, reads their output and kills them."""

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
from typing import IO

__all__ = ["OnOutput", "TaskProcess", "TaskProcesses"]

OnOutput = Callable[[str, bytes], None]
"""Called with a task's name and a chunk of its output; `b""` ends the output."""

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PYTHON = (sys.executable, "-I", "-S", str(_BOOTSTRAP))

_TICK_S = 0.02  # Interval of the checks whether a task has ended.
_DRAIN_S = 1.0  # A process that left the task's group may keep its output open.
_KILL_S = 10.0  # Time for the kernel to end a large process.
_CHUNK_BYTES = 1 << 16


class TaskProcess:
    """One task: a process with its own session and process group.

    Attributes:
        name: The task's name, such as `"worker:1"`.
        pid: The id of the process and of its group.
        exit_code: None while the task runs; then its exit status, negative for a
            signal. It is set after all of the task's output was read.
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
        """Send SIGTERM to the task, but not to its children."""
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the task and its process group (SIGKILL)."""
        self.signal(signal.SIGKILL, os.killpg)

    def stop(self) -> None:
        """Freeze the task and its group (SIGSTOP), to simulate a hang."""
        self.signal(signal.SIGSTOP, os.killpg)

    def resume(self) -> None:
        """Resume a frozen task (SIGCONT)."""
        self.signal(signal.SIGCONT, os.killpg)

    def signal(self, number: int, send: Callable[[int, int], None] = os.kill) -> None:
        """Send a signal to the task's process, if it still runs."""
        # Locked: after the process is reaped, its id may be reused.
        with self._lock:
            if self._ended_at is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, number)

    def poll(self) -> bool:
        """Whether the process has ended; if so, kill the rest of its group."""
        with self._lock:
            if self._ended_at is None and self._process.poll() is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._ended_at = time.monotonic()
            return self._ended_at is not None

    def set_exit_code(self, output: IO[bytes]) -> bool:
        """Set `exit_code` if the task and its output have ended; return True if so.

        An output that stays open counts as ended a second after the task.
        """
        if not self.poll() or self._ended_at is None:
            return False
        if not output.closed and time.monotonic() < self._ended_at + _DRAIN_S:
            return False
        self.exit_code = self._process.returncode
        return True


class _Guard:
    """A process that kills the tasks when this process dies, even by SIGKILL.

    Starting tasks write their ids to the file descriptor `registrations`. Finally
    the guard deletes the tasks' temporary `folder`.
    """

    def __init__(self, folder: Path | None) -> None:
        read_end, self.registrations = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_PYTHON, "guard", str(read_end), str(folder or "")],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(read_end,),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self.registrations)
            raise
        finally:
            os.close(read_end)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def send(self, message: bytes) -> None:
        """Report the start (`+id`) or the end (`-id`) of a task."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._pipe.write(message)

    def dismiss(self) -> None:
        """Make the guard kill the remaining tasks, and exit.

        Tasks remain only after an exception during the start of a process.
        """
        if not self._pipe.closed:
            os.close(self.registrations)
            self._pipe.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TaskProcesses:
    """Context manager that starts a cluster's tasks as processes, and kills them.

    One thread reads the output of all tasks, and notices their exits. A guard process
    kills them if this process dies, and deletes their temporary folder.

    Args:
        commands: The program and its arguments for each task, by name.
        environments: The complete environment of each task, by name.
        on_output: Called in the thread with the tasks' output to stdout and stderr.
        cores: The cores that tasks are pinned to; a task without an entry may use all.
        folder: The tasks' temporary folder, which the guard deletes.
        new_task: Makes a task from its name and process.

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
        folder: Path | None = None,
        new_task: Callable[[str, subprocess.Popen[bytes]], TaskProcess] = TaskProcess,
    ) -> None:
        self.tasks: dict[str, TaskProcess] = {}
        self._commands = commands
        self._environments = environments
        self._on_output = on_output
        self._cores = cores or {}
        self._folder = folder
        self._new_task = new_task
        self._outputs: dict[str, IO[bytes]] = {}
        self._changed = threading.Condition()
        # Held while an exit is processed, so that a restart comes afterwards.
        self._finishing = threading.Lock()
        self._closing = False
        self._error: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._guard: _Guard | None = None
        self._thread = threading.Thread(
            target=self._watch, name="replicax-processes", daemon=True
        )

    def __enter__(self) -> "TaskProcesses":
        try:
            self._guard = _Guard(self._folder)
            for name in self._commands:
                self._start(name)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str) -> None:
        assert self._guard is not None
        registrations = self._guard.registrations
        cores = ",".join(map(str, self._cores.get(name, ())))
        process = subprocess.Popen(
            [
                *(*_PYTHON, str(registrations), str(os.getpid()), cores),
                *self._commands[name],
            ],
            env=dict(self._environments[name]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(registrations,),
            start_new_session=True,
            bufsize=0,
        )
        self._guard.send(b"+%d\n" % process.pid)
        self.tasks[name] = self._new_task(name, process)
        output = process.stdout
        assert output is not None
        self._outputs[name] = output
        self._selector.register(output, selectors.EVENT_READ, name)

    def start_again(self, name: str, environment: Mapping[str, str]) -> TaskProcess:
        """Restart a task that has ended, with a new complete environment.

        Returns:
            The new task, which replaces the old one in `tasks`.
        """
        with self._finishing:
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
        """The exit codes of the named tasks, without tasks that still run."""
        codes = {name: self.tasks[name].exit_code for name in names}
        return {name: code for name, code in codes.items() if code is not None}

    def wait_until(
        self, reached: Callable[[], bool], timeout_seconds: float | None = None
    ) -> bool:
        """Wait until `reached()`, tested after each output and each end of a task.

        Returns `reached()`, False after a timeout; re-raises errors of `on_output`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or reached(), timeout_seconds)
            if self._error is not None:
                raise self._error
            return reached()

    def close(self) -> None:
        """Kill all running tasks, and wait until they have ended.

        Raises:
            RuntimeError: If a process does not end after SIGKILL.
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
            ended = [name for name in running if self._finish(name)]
            if events or ended:
                with self._changed:
                    self._changed.notify_all()

    def _finish(self, name: str) -> bool:
        with self._finishing:
            task, output = self.tasks[name], self._outputs[name]
            if not task.set_exit_code(output):
                return False
            self._end_output(name)
            if self._guard is not None:
                self._guard.send(b"-%d\n" % task.pid)
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
    """Ignore output after `close`."""
