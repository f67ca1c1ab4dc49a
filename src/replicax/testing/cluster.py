"""`Cluster`: runs a cluster on this machine for a test."""

import contextlib
import math
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax._util.waiting import wait_for
from replicax.cluster.failure import REPORT_DIR, FailureReport
from replicax.launch.local_tasks import check_tasks, ps_token, tf_configs
from replicax.launch.processes import TaskProcess, TaskProcesses
from replicax.launch.supervisor import Supervisor
from replicax.testing import runner
from replicax.testing.calls import call_of, child_environment
from replicax.testing.results import ClusterTimeout, Results, TaskResult, show_outputs

__all__ = ["Cluster", "run"]

_PS_GRACE_S = 1.0
_STACKS_S = 2.0
_PAUSE_S = 0.1


class RunningTask(TaskProcess):
    """One task of a running cluster; `Cluster.task` returns it."""

    def __init__(
        self, cluster: "Cluster", name: str, process: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(name, process)
        self._cluster = cluster

    @property
    def output(self) -> str:
        """The task's output to stdout and stderr so far."""
        return self._cluster.outputs()[self.name]

    def wait_for(self, text: str, *, timeout_seconds: float = 60) -> None:
        """Wait until the output contains `text`.

        Raises:
            ClusterTimeout: After `timeout_seconds`, at the cluster's deadline, or if
                the task has ended without writing `text`.
        """
        self._cluster.wait_until(
            lambda: self._cluster.has_written(self.name, text),
            lambda: f"{self.name} to write {text!r}",
            timeout_seconds,
            by=self,
        )

    def wait(self, *, timeout_seconds: float = 60) -> int:
        """Wait until the task has ended.

        Returns:
            The task's exit status, negative for a signal.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self.exit_code is not None,
            lambda: f"{self.name} to end",
            timeout_seconds,
        )
        assert self.exit_code is not None
        return self.exit_code


class Cluster:
    """A cluster whose tasks all run one function or script, each in its own process.

    A context manager: entering it starts the tasks, leaving it kills the tasks that
    still run. Tasks end also if this process is killed.

    Each task has a `TF_CONFIG` with addresses on free ports of this machine. Tasks run
    on the CPU (`JAX_PLATFORMS=cpu`) unless this process' environment or `env` overrides
    it.

    Args:
        program: A function at the top level of a module, which each task imports from
            its file; or the path of a script.
        num_workers: Number of workers. Or give `tasks`.
        tasks: Number of tasks by job: `{"chief": 1, "worker": 2, "ps": 1,
            "evaluator": 1}`.
        args: The function's arguments, which must be picklable; or the strings of a
            script's command line.
        kwargs: Keyword arguments of the function.
        env: Environment variables of all tasks, besides those of this process.
        logical_devices: Number of CPU devices of each task. By default the program
            may call `rx.set_logical_devices`.
        deadline_seconds: Time after which all tasks are killed.

    Raises:
        ValueError: If `tasks` is no valid cluster, or the function is not at the top
            level of a module with a file.

    Example:
        >>> import platform
        >>> import replicax.testing
        >>> with replicax.testing.Cluster(platform.node, num_workers=2) as cluster:
        ...     results = cluster.wait().check()
        >>> sorted(results)
        ['worker:0', 'worker:1']
        >>> results["worker:1"].value == platform.node()
        True
    """

    def __init__(
        self,
        program: Callable[..., object] | str | Path,
        *,
        num_workers: int | None = None,
        tasks: Mapping[str, int] | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        logical_devices: int | None = None,
        deadline_seconds: float = 120,
    ) -> None:
        if (num_workers is None) == (tasks is None):
            raise ValueError(
                "Cluster: give either num_workers or tasks; got "
                f"num_workers={num_workers!r}, tasks={tasks!r}."
            )
        self._num_tasks = check_tasks(tasks or {"worker": num_workers or 0}, "Cluster")
        self._call = call_of(program, args, kwargs or {}, logical_devices)
        self._env = dict(env or {})
        self._deadline_s = deadline_seconds
        self._timer = threading.Timer(deadline_seconds, self._expire)
        self._timer.name = "replicax-deadline"
        self._timer.daemon = True
        self._stacks: dict[str, str] = {}
        self._expired = threading.Event()
        self._tasks: dict[str, RunningTask] = {}
        self._raw: dict[str, bytearray] = {}
        self._raw_lock = threading.Lock()
        self._folder: Path | None = None
        self._stack = contextlib.ExitStack()
        self._processes: TaskProcesses | None = None

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="replicax-")
            self._folder = Path(stack.enter_context(folder))
            self._processes = stack.enter_context(self._task_processes(self._folder))
            self._timer.start()
            stack.callback(self._timer.join)
            stack.callback(self._timer.cancel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the tasks that still run, and delete the cluster's files."""
        self._stack.close()

    def _task_processes(self, folder: Path) -> TaskProcesses:
        call_file = folder / runner.CALL
        call_file.write_bytes(pickle.dumps(self._call))
        (folder / "reports").mkdir()
        configs = tf_configs(self._num_tasks)
        for name in configs:
            self._task_folder(name).mkdir()
            self._raw[name] = bytearray()
        common = {
            **child_environment(),
            **self._env,
            REPORT_DIR: str(folder / "reports"),
        }
        common |= ps_token(self._num_tasks, common)
        run_call = [sys.executable, "-P", str(Path(runner.__file__).resolve())]
        return TaskProcesses(
            {
                name: [*run_call, str(call_file), str(self._task_folder(name))]
                for name in configs
            },
            {name: {**common, "TF_CONFIG": text} for name, text in configs.items()},
            on_output=self._add_output,
            folder=folder,
            new_task=self._new_task,
        )

    def _new_task(self, name: str, process: subprocess.Popen[bytes]) -> RunningTask:
        self._tasks[name] = RunningTask(self, name, process)
        return self._tasks[name]

    def _add_output(self, name: str, chunk: bytes) -> None:
        with self._raw_lock:
            self._raw[name] += chunk

    def _task_folder(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name.replace(":", "-")

    @property
    def tasks(self) -> dict[str, RunningTask]:
        """The tasks by name."""
        return {name: self._tasks[name] for name in self._running.tasks}

    @property
    def _running(self) -> TaskProcesses:
        if self._processes is None:
            raise RuntimeError(
                "The cluster does not run. Enter it: `with Cluster(...) as cluster:`."
            )
        return self._processes

    def task(self, name: str) -> RunningTask:
        """The task of this name, such as `"worker:1"`.

        Raises:
            KeyError: If the cluster has no such task.
        """
        if name not in self._tasks:
            raise KeyError(
                f"no task {name!r}; the cluster has {', '.join(self._tasks)}"
            )
        return self._tasks[name]

    def outputs(self) -> dict[str, str]:
        """The output of each task to stdout and stderr so far."""
        with self._raw_lock:
            raw = {name: bytes(output) for name, output in self._raw.items()}
        return {name: text.decode(errors="replace") for name, text in raw.items()}

    def has_written(self, name: str, text: str) -> bool:
        """Whether the output of the task `name` contains `text`."""
        with self._raw_lock:
            return text.encode() in self._raw[name]

    def wait(self) -> Results:
        """Wait until all tasks have ended.

        Terminates parameter servers that still run one second after all other tasks
        have ended.

        Returns:
            The tasks' results; its `check()` raises if a task failed.

        Raises:
            ClusterTimeout: At the deadline.
        """
        supervisor = _ServersLast(self._running, self._check_deadline)
        supervisor.run()
        self._check_deadline()
        reports = FailureReport.read_all(self._task_folder("reports"))
        return Results(
            {
                name: self._result(task, reports, name in supervisor.dismissed)
                for name, task in self._tasks.items()
            }
        )

    def wait_until(
        self,
        reached: Callable[[], bool],
        what: Callable[[], str],
        timeout_seconds: float | None = None,
        *,
        by: RunningTask | None = None,
    ) -> None:
        """Wait until `reached()` is true; check it after each output and end of a task.

        Args:
            reached: The condition.
            what: Returns a description of the condition, for the error message.
            timeout_seconds: The timeout; by default the cluster's deadline.
            by: The task that must reach the condition; if it ends, the wait fails.

        Raises:
            ClusterTimeout: If the condition was not reached in time.
        """

        def is_hopeless() -> bool:
            ended = by is not None and by.exit_code is not None
            return ended or self._expired.is_set()

        self._running.wait_until(lambda: reached() or is_hopeless(), timeout_seconds)
        self._check_deadline()
        if not reached():
            is_late = not is_hopeless() and timeout_seconds is not None
            seconds = f" {timeout_seconds:g} s" if is_late else ""
            end = "" if is_late else f", but {by!r}"
            raise ClusterTimeout(f"Waited{seconds} for {what()}{end}.\n{self._show()}")

    def _check_deadline(self) -> None:
        if self._expired.is_set():  # The deadline killed the tasks.
            raise ClusterTimeout(
                f"The deadline of {self._deadline_s:g} s found these tasks running: "
                f"{', '.join(self._stacks)}.\n{self._show()}"
            )

    def _show(self) -> str:
        outputs = self.outputs()
        for name, stacks in self._stacks.items():
            outputs[name] += f"\n--- stacks of {name} ---\n{stacks}"
        return show_outputs(outputs)

    def _expire(self) -> None:
        tasks = [task for task in self._tasks.values() if task.exit_code is None]
        if not tasks:
            return
        self._stacks = self._collect_stacks(tasks)
        self._expired.set()
        for task in tasks:
            task.kill()

    def _collect_stacks(self, tasks: Sequence[RunningTask]) -> dict[str, str]:
        """Collect the stacks of all threads of tasks, after resuming frozen tasks."""
        files = {task: self._task_folder(task.name) / runner.STACKS for task in tasks}
        for task, file in files.items():
            if file.exists():  # Without a handler the signal would end the task.
                task.signal(signal.SIGUSR1)
                task.resume()
        stacks: dict[str, str] = {}

        def all_written() -> bool | None:
            before = dict(stacks)
            for task, file in files.items():
                not_yet = "(Python has not started yet)"
                stacks[task.name] = file.read_text() if file.exists() else not_yet
            # Equal to the last read: no task is writing.
            is_written = stacks == before and all(stacks.values())
            return is_written or self._timer.finished.is_set() or None

        wait_for(
            all_written,
            _STACKS_S,
            late=lambda: False,
            pauses=(_PAUSE_S, _PAUSE_S),
            sleep=self._timer.finished.wait,
        )
        return {name: text or "(no answer)" for name, text in stacks.items()}

    def _result(
        self, task: RunningTask, reports: Sequence[FailureReport], dismissed: bool
    ) -> TaskResult:
        value = self._task_folder(task.name) / runner.VALUE
        assert task.exit_code is not None
        return TaskResult(
            exit_code=task.exit_code,
            output=self.outputs()[task.name],
            value=pickle.loads(value.read_bytes()) if value.exists() else None,
            report=next((r for r in reports if r.task == task.name), None),
            dismissed=dismissed,
        )


class _ServersLast(Supervisor):
    """A supervisor without restarts, which terminates parameter servers last.

    `check` may raise, to end the wait early.
    """

    def __init__(self, processes: TaskProcesses, check: Callable[[], None]) -> None:
        super().__init__(processes, say=lambda _: None, kill_after_seconds=math.inf)
        self._check = check
        self._has_others = self.running != self.running_of("ps")

    def act(self) -> None:
        """Terminate the servers, if no other task runs."""
        self._check()
        serving = self.running_of("ps")
        if self._has_others and serving == self.running:
            self.dismiss(serving, "training", _PS_GRACE_S)


def run(
    program: Callable[..., object] | str | Path,
    *,
    num_workers: int | None = None,
    tasks: Mapping[str, int] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    logical_devices: int | None = None,
    deadline_seconds: float = 120,
    check: bool = True,
) -> Results:
    """Run a function or script in every task of a cluster on this machine.

    Args:
        program: A function, or the path of a script. All arguments except `check` are
            those of `Cluster`.
        num_workers: Number of workers. Or give `tasks`.
        tasks: Number of tasks by job.
        args: The function's arguments, or the script's command line.
        kwargs: Keyword arguments of the function.
        env: Environment variables of all tasks.
        logical_devices: Number of CPU devices of each task.
        deadline_seconds: Time after which all tasks are killed.
        check: Whether to raise if a task fails.

    Returns:
        The tasks' results by name.

    Raises:
        TaskFailed: If a task's exit code is not 0, with all outputs.
        ClusterTimeout: At the deadline, with all outputs and stacks.

    Example:
        >>> import posixpath
        >>> from replicax.testing import run
        >>> results = run(posixpath.basename, num_workers=2, args=("a/b",))
        >>> results["worker:0"].value, results["worker:0"].exit_code
        ('b', 0)
    """
    with Cluster(
        program,
        num_workers=num_workers,
        tasks=tasks,
        args=args,
        kwargs=kwargs,
        env=env,
        logical_devices=logical_devices,
        deadline_seconds=deadline_seconds,
    ) as cluster:
        results = cluster.wait()
    return results.check() if check else results
