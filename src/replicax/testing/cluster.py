"""A cluster on this machine for a test that looks at it while it runs."""

import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from replicax.cluster.failure import REPORT_DIR, FailureReport
from replicax.launch.local_tasks import check_tasks, tf_configs
from replicax.launch.processes import Task, TaskProcesses
from replicax.launch.ps_token import ps_token
from replicax.testing import runner
from replicax.testing.calls import call_of, child_environment
from replicax.testing.results import (
    ClusterTimeout,
    Results,
    TaskResult,
    show_outputs,
)
from replicax.testing.stacks import collect_stacks

__all__ = ["Cluster", "RunningTask"]

_PS_GRACE_S = 1.0


class RunningTask:
    """One task of a cluster that runs. `Cluster.task` gives it.

    Attributes:
        name: Such as `"worker:1"`.
        pid: The id of its process, and of its process group.
    """

    def __init__(self, cluster: "Cluster", task: Task) -> None:
        self.name = task.name
        self.pid = task.pid
        self._cluster = cluster
        self._task = task

    def __repr__(self) -> str:
        return repr(self._task)

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return self._cluster.outputs()[self.name]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; its exit status, negative for a signal."""
        return self._task.exit_code

    def wait_for(self, text: str, *, timeout_seconds: float = 60) -> None:
        """Wait until `text` stands in the output.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or when the task has ended without
                writing it, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self._cluster.has_written(self.name, text),
            lambda: f"{self.name} to write {text!r}",
            timeout_seconds,
            by=self._task,
        )

    def wait(self, *, timeout_seconds: float = 60) -> int:
        """Wait until the task has ended.

        Returns:
            Its exit status, negative for the signal that ended it.

        Raises:
            ClusterTimeout: After `timeout_seconds`, or at the cluster's deadline.
        """
        self._cluster.wait_until(
            lambda: self._task.exit_code is not None,
            lambda: f"{self.name} to end",
            timeout_seconds,
        )
        assert self._task.exit_code is not None
        return self._task.exit_code

    def terminate(self) -> None:
        """Ask the task to end (SIGTERM)."""
        self._task.terminate()

    def kill(self) -> None:
        """End the task and its children at once (SIGKILL), as a crash does."""
        self._task.kill()

    def stop(self) -> None:
        """Freeze the task and its children (SIGSTOP), as a machine that hangs."""
        self._task.stop()

    def resume(self) -> None:
        """Let a frozen task go on (SIGCONT)."""
        self._task.resume()

    def signal(self, number: int) -> None:
        """Send it any other signal."""
        self._task.signal(number)


class Cluster:
    """A cluster whose tasks all run one function or script, each in its own process.

    A context manager: entering starts the tasks, leaving kills what still runs. Nothing
    is left behind, also when this process is killed.

    Each task has a `TF_CONFIG` with addresses on free ports of this machine. Tasks run
    on the CPU (`JAX_PLATFORMS=cpu`) unless this process' environment or `env` says
    otherwise.

    Args:
        program: A function at the top level of a module, which is imported in each task
            from its file; or the path of a script.
        num_workers: Number of workers. Or give `tasks`.
        tasks: Number of tasks by job: `{"chief": 1, "worker": 2, "ps": 1,
            "evaluator": 1}`.
        args: What the function is called with; must be picklable. For a script its
            command line, of strings.
        kwargs: Keyword arguments of the function.
        env: Environment variables of all tasks, on top of those of this process.
        logical_devices: Number of CPU devices of each task, made before the program
            starts. None: JAX makes one, unless the program asks for more.
        deadline_seconds: After this time all tasks are killed, whatever the test does.

    Raises:
        ValueError: If the tasks are no cluster, or the function is not at the top level
            of a module that has a file.

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
        program: Callable[..., Any] | str | Path,
        *,
        num_workers: int | None = None,
        tasks: Mapping[str, int] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        logical_devices: int | None = None,
        deadline_seconds: float = 120,
    ) -> None:
        if (num_workers is None) == (tasks is None):
            raise ValueError(
                "Cluster: give either num_workers or tasks; got "
                f"num_workers={num_workers!r}, tasks={tasks!r}."
            )
        if deadline_seconds <= 0:
            raise ValueError(
                f"Cluster: deadline_seconds must be positive; got {deadline_seconds!r}."
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
        self._dismissed: set[str] = set()
        self._raw: dict[str, bytearray] = {}
        self._raw_lock = threading.Lock()
        self._folder: Path | None = None
        self._processes: TaskProcesses | None = None

    def __enter__(self) -> "Cluster":
        self._folder = Path(tempfile.mkdtemp(prefix="replicax-"))
        try:
            self._start(self._folder)
        except BaseException:
            self.close()
            raise
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, folder: Path) -> None:
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
        self._processes = TaskProcesses(
            {
                name: [
                    *(sys.executable, "-P", str(Path(runner.__file__).resolve())),
                    *(str(call_file), str(self._task_folder(name))),
                ]
                for name in configs
            },
            {name: {**common, "TF_CONFIG": text} for name, text in configs.items()},
            on_output=self._take,
        )
        self._processes.__enter__()

    def _take(self, name: str, chunk: bytes) -> None:
        with self._raw_lock:
            self._raw[name] += chunk

    def _task_folder(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name.replace(":", "-")

    @property
    def tasks(self) -> dict[str, RunningTask]:
        """The tasks by name."""
        return {
            name: RunningTask(self, task) for name, task in self._running.tasks.items()
        }

    @property
    def _running(self) -> TaskProcesses:
        if self._processes is None:
            raise RuntimeError(
                "The cluster does not run. Enter it: `with Cluster(...) as cluster:`."
            )
        return self._processes

    def task(self, name: str) -> RunningTask:
        """The task of that name, such as `"worker:1"`.

        Raises:
            KeyError: If there is none.
        """
        if name not in self._running.tasks:
            raise KeyError(
                f"no task {name!r}; the cluster has {', '.join(self._running.tasks)}"
            )
        return self.tasks[name]

    def outputs(self) -> dict[str, str]:
        """What each task has written to stdout and stderr so far."""
        with self._raw_lock:
            raw = {name: bytes(output) for name, output in self._raw.items()}
        return {name: text.decode(errors="replace") for name, text in raw.items()}

    def has_written(self, name: str, text: str) -> bool:
        """Whether `text` stands in the output of the task of that name."""
        with self._raw_lock:
            return text.encode() in self._raw[name]

    def wait(self) -> Results:
        """Wait until all tasks have ended.

        Parameter servers that still serve when all other tasks have ended get one
        second more, and are terminated then.

        Returns:
            How they ended; `check()` of it raises if one failed.

        Raises:
            ClusterTimeout: At the deadline.
        """
        others = [n for n in self._running.tasks if not n.startswith("ps:")]
        if others:
            self._wait_for_end(others)
        servers = [n for n in self._running.tasks if n.startswith("ps:")]
        if others and servers:
            self._dismiss(servers)
        self._wait_for_end(servers)
        return Results({name: self._result(name) for name in self._running.tasks})

    def _wait_for_end(self, names: Sequence[str]) -> None:
        def running() -> list[str]:
            return [name for name in names if name in self._running.running]

        self.wait_until(lambda: not running(), lambda: f"{', '.join(running())} to end")

    def _dismiss(self, servers: Sequence[str]) -> None:
        tasks = self._running.tasks
        ended = self._running.wait_until(
            lambda: all(tasks[name].exit_code is not None for name in servers),
            _PS_GRACE_S,
        )
        if ended:
            return
        for name in servers:
            if tasks[name].exit_code is None:
                self._dismissed.add(name)
                tasks[name].resume()
                tasks[name].terminate()

    def wait_until(
        self,
        reached: Callable[[], bool],
        what: Callable[[], str],
        timeout_seconds: float | None = None,
        *,
        by: Task | None = None,
    ) -> None:
        """Wait until `reached()`; tested whenever output comes or a task ends.

        Args:
            reached: The condition.
            what: What is waited for, in words, for the error.
            timeout_seconds: How long at most; None: until the cluster's deadline.
            by: A task that must run for it: its end ends the waiting.

        Raises:
            ClusterTimeout: If it was not reached in time.
        """

        def given_up() -> bool:
            ended = by is not None and by.exit_code is not None
            return ended or self._expired.is_set()

        self._running.wait_until(lambda: reached() or given_up(), timeout_seconds)
        if self._expired.is_set():  # Tasks have ended then, but were not done.
            raise ClusterTimeout(
                f"The deadline of {self._deadline_s:g} s found these tasks running: "
                f"{', '.join(self._stacks)}.\n{self._show()}"
            )
        if reached():
            return
        if given_up():
            raise ClusterTimeout(f"Waited for {what()}, but {by!r}.\n{self._show()}")
        raise ClusterTimeout(
            f"Waited {timeout_seconds:g} s for {what()}.\n{self._show()}"
        )

    def _show(self) -> str:
        outputs = self.outputs()
        for name, stacks in self._stacks.items():
            outputs[name] += f"\n--- stacks of {name} ---\n{stacks}"
        return show_outputs(outputs)

    def _expire(self) -> None:
        tasks = [self._running.tasks[name] for name in self._running.running]
        if not tasks:
            return
        self._stacks = collect_stacks(
            {task: self._task_folder(task.name) for task in tasks},
            self._timer.finished,
        )
        self._expired.set()
        for task in tasks:
            task.kill()

    def _result(self, name: str) -> TaskResult:
        assert self._folder is not None
        reports = FailureReport.read_all(self._folder / "reports")
        value = self._task_folder(name) / runner.VALUE
        exit_code = self._running.tasks[name].exit_code
        assert exit_code is not None
        return TaskResult(
            exit_code=exit_code,
            output=self.outputs()[name],
            value=pickle.loads(value.read_bytes()) if value.exists() else None,
            report=next((r for r in reports if r.task == name), None),
            dismissed=name in self._dismissed,
        )

    def close(self) -> None:
        """Kill the tasks that still run, and remove all that the cluster has made."""
        self._timer.cancel()
        try:
            if self._timer.ident is not None:
                self._timer.join()
            if self._processes is not None:
                self._processes.close()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder)
                self._folder = None
