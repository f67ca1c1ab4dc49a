"""A cluster on this machine, for tests that look at it while it runs or at its end."""

import contextlib
import math
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from replicax.cluster.failure import REPORT_DIR, FailureReport
from replicax.launch.local_tasks import check_tasks, ps_token, tf_configs
from replicax.launch.processes import TaskProcesses
from replicax.launch.supervisor import Supervisor
from replicax.testing import runner
from replicax.testing.calls import call_of, child_environment
from replicax.testing.results import (
    ClusterTimeout,
    Results,
    TaskResult,
    show_outputs,
)
from replicax.testing.tasks import RunningTask, collect_stacks

__all__ = ["Cluster", "run"]

_PS_GRACE_S = 1.0


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the tasks that still run, and remove all that the cluster has made."""
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
            on_output=self._take,
            new_task=self._new_task,
        )

    def _new_task(self, name: str, process: subprocess.Popen[bytes]) -> RunningTask:
        self._tasks[name] = RunningTask(self, name, process)
        return self._tasks[name]

    def _take(self, name: str, chunk: bytes) -> None:
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
        """The task of that name, such as `"worker:1"`.

        Raises:
            KeyError: If there is none.
        """
        if name not in self._tasks:
            raise KeyError(
                f"no task {name!r}; the cluster has {', '.join(self._tasks)}"
            )
        return self._tasks[name]

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
        supervisor = Supervisor(
            self._running, say=lambda _: None, kill_after_seconds=math.inf
        )
        supervisor.run(_ServersLast(supervisor, self._check_deadline))
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
        self._check_deadline()
        if reached():
            return
        if given_up():
            raise ClusterTimeout(f"Waited for {what()}, but {by!r}.\n{self._show()}")
        raise ClusterTimeout(
            f"Waited {timeout_seconds:g} s for {what()}.\n{self._show()}"
        )

    def _check_deadline(self) -> None:
        if self._expired.is_set():  # Tasks may have ended then, but were not done.
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
        self._stacks = collect_stacks(
            {task: self._task_folder(task.name) for task in tasks},
            self._timer.finished,
        )
        self._expired.set()
        for task in tasks:
            task.kill()

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


class _ServersLast:
    """Restarts nothing; terminates parameter servers once all other tasks have ended.

    Args:
        supervisor: The tasks' supervisor.
        check: Raises what is to end the waiting early.
    """

    is_waiting = False

    def __init__(self, supervisor: Supervisor, check: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._check = check
        self._has_others = supervisor.running != supervisor.running_of("ps")

    def note_exits(self, codes: Mapping[str, int]) -> None:
        """Do nothing: the others may go on."""

    def act(self) -> None:
        """Terminate the servers, where only they run."""
        self._check()
        serving = self._supervisor.running_of("ps")
        if self._has_others and serving == self._supervisor.running:
            self._supervisor.dismiss(serving, "training", _PS_GRACE_S)


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
        program: As for `Cluster`, as is all else.
        num_workers: Number of workers. Or give `tasks`.
        tasks: Number of tasks by job.
        args: What the function is called with, or the script's command line.
        kwargs: Keyword arguments of the function.
        env: Environment variables of all tasks.
        logical_devices: Number of CPU devices of each task.
        deadline_seconds: After this time all tasks are killed.
        check: Whether to raise if a task fails. False: look at the exit codes yourself.

    Returns:
        How each task ended, by the name of the task.

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
