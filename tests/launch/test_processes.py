"""Tasks as processes: their output, their signals, and that nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.launch.jobs import alive, eventually, gone, state

from replicax.launch.processes import TaskProcesses

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc"),
]

SLEEP = ["sleep", "100"]


class Cluster(TaskProcesses):
    """Each task runs the code or the command that it is given."""

    def __init__(self, *programs: str | list[str], **options) -> None:
        commands = {
            f"worker:{i}": program
            if isinstance(program, list)
            else [sys.executable, "-c", textwrap.dedent(program)]
            for i, program in enumerate(programs)
        }
        self.raw: dict[str, bytes] = dict.fromkeys(commands, b"")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environments = dict.fromkeys(commands, environment)
        super().__init__(
            commands, environments, **{"on_output": self.collect, **options}
        )

    def collect(self, name: str, chunk: bytes) -> None:
        self.raw[name] += chunk

    def wait_for(self, name: str, text: bytes) -> None:
        assert self.wait_until(lambda: text in self.raw[name], 20), self.raw

    def wait_for_end(self) -> dict[str, int | None]:
        assert self.wait_until(lambda: not self.running, 20), self.running
        return {name: task.exit_code for name, task in self.tasks.items()}


def test_output_and_exit_codes() -> None:
    first = """
        import os, sys
        os.write(1, b"one\\n"), os.write(2, b"two \\xff no newline")
        sys.exit(3)
    """
    with Cluster(first, "print('x' * 1_000_000)", ["true"]) as cluster:
        codes = cluster.wait_for_end()
    assert codes == {"worker:0": 3, "worker:1": 0, "worker:2": 0}
    assert cluster.raw["worker:0"] == b"one\ntwo \xff no newline"
    assert cluster.raw["worker:1"] == b"x" * 1_000_000 + b"\n"


def test_the_end_of_the_output_comes_once_and_last() -> None:
    chunks: list[bytes] = []
    with Cluster("print('a')", on_output=lambda _, chunk: chunks.append(chunk)) as c:
        c.wait_for_end()
    assert chunks.count(b"") == 1
    assert chunks[-1] == b""


def test_a_program_that_is_not_there() -> None:
    with Cluster(["no-such-program"]) as cluster:
        assert cluster.wait_for_end() == {"worker:0": 127}
    assert b"Cannot start 'no-such-program': No such file" in cluster.raw["worker:0"]


def test_each_task_leads_a_session_of_its_own() -> None:
    code = "import os; print(os.getpid(), os.getsid(0), os.getpgrp())"
    with Cluster(code, code) as cluster:
        cluster.wait_for_end()
    ids = [set(map(int, raw.split())) for raw in cluster.raw.values()]
    assert ids == [{task.pid} for task in cluster.tasks.values()]


def test_stdin_is_empty() -> None:
    with Cluster("import sys; print(repr(sys.stdin.read()))") as cluster:
        cluster.wait_for_end()
    assert cluster.raw["worker:0"] == b"''\n"


def test_tasks_do_not_inherit_ignored_signals() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with Cluster(SLEEP, SLEEP) as cluster:
            assert eventually(lambda: exec_done(cluster, "sleep"))
            cluster.tasks["worker:0"].signal(signal.SIGINT)
            cluster.tasks["worker:1"].terminate()
            codes = cluster.wait_for_end()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, before)
    assert codes == {"worker:0": -signal.SIGINT, "worker:1": -signal.SIGTERM}


def exec_done(cluster: TaskProcesses, program: str) -> bool:
    return all(
        Path(f"/proc/{task.pid}/comm").read_text().strip() == program
        for task in cluster.tasks.values()
    )


def test_stop_and_resume() -> None:
    with Cluster(SLEEP) as cluster:
        task = cluster.tasks["worker:0"]
        assert eventually(lambda: exec_done(cluster, "sleep"))
        task.stop()
        assert eventually(lambda: state(task.pid) == "T")
        task.resume()
        assert eventually(lambda: state(task.pid) == "S")


def test_signals_to_a_task_that_has_ended_do_nothing() -> None:
    with Cluster(["true"]) as cluster:
        cluster.wait_for_end()
        task = cluster.tasks["worker:0"]
        for do in (task.terminate, task.kill, task.stop, task.resume):
            do()
        assert task.exit_code == 0


CHILD = """
    import subprocess, sys, time
    child = subprocess.Popen(["sleep", "100"], {options})
    print(child.pid, flush=True)
    {then}
"""


@pytest.mark.parametrize("how", ["kill", "exit", "close"])
def test_children_of_a_task_end_with_it(how: str) -> None:
    then = "pass" if how == "exit" else "time.sleep(100)"
    with Cluster(CHILD.format(options="", then=then)) as cluster:
        cluster.wait_for("worker:0", b"\n")
        child = int(cluster.raw["worker:0"])
        if how == "kill":
            assert alive(child)
            cluster.tasks["worker:0"].kill()
        if how != "close":
            cluster.wait_for_end()
    assert gone([child])


def test_a_detached_child_does_not_keep_the_output_open() -> None:
    with Cluster(CHILD.format(options="start_new_session=True", then="pass")) as c:
        try:
            assert c.wait_for_end() == {"worker:0": 0}
        finally:
            os.kill(int(c.raw["worker:0"]), signal.SIGKILL)


def test_leaving_the_context_kills_what_runs() -> None:
    with contextlib.suppress(KeyboardInterrupt), Cluster(SLEEP, SLEEP) as cluster:
        cluster.tasks["worker:1"].stop()
        raise KeyboardInterrupt
    assert [task.exit_code for task in cluster.tasks.values()] == [-9, -9]
    assert not any(alive(task.pid) for task in cluster.tasks.values())


def test_an_exception_while_starting_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = TaskProcesses._start

    def interrupted(self: TaskProcesses, name: str) -> None:
        start(self, name)
        started.append(self.tasks[name]._process)
        if name == "worker:1":
            # As an interrupt that comes before the process is known here.
            del self.tasks[name]
            raise KeyboardInterrupt

    monkeypatch.setattr(TaskProcesses, "_start", interrupted)
    cluster = Cluster(SLEEP, SLEEP, SLEEP)
    with pytest.raises(KeyboardInterrupt):
        cluster.__enter__()
    assert [process.wait(10) for process in started] == [-9, -9]
    for process in started:
        process.stdout.close()


def test_an_error_of_on_output_is_raised_by_waits() -> None:
    def full(name: str, chunk: bytes) -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(OSError, match="No space left"),
        Cluster("print(1)", SLEEP, on_output=full) as cluster,
    ):
        cluster.wait_for_end()
    assert not any(alive(task.pid) for task in cluster.tasks.values())
    assert cluster.tasks["worker:1"].exit_code == -9


STARTER = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from test_processes import CHILD, Cluster
    with Cluster(CHILD.format(options="", then="time.sleep(100)"), {sleep}) as cluster:
        cluster.tasks["worker:1"].stop()
        cluster.wait_for("worker:0", b"\\n")
        pids = [task.pid for task in cluster.tasks.values()]
        print(*pids, int(cluster.raw["worker:0"]), flush=True)
        time.sleep(100)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_a_starter_that_is_killed(number: int) -> None:
    code = STARTER.format(tests=str(Path(__file__).parent), sleep=SLEEP)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        starter.send_signal(number)
        assert starter.wait(20) == -number
    assert gone(pids)


def descendants() -> set[int]:
    """The processes that this one has started, running or not yet reaped."""
    mine = {os.getpid()}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
    while more := {p for p, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine - {os.getpid()}


def test_twenty_clusters_leave_no_thread_process_or_file() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Cluster(["true"]):
        pass  # What is opened once and for all is open now.
    before = descendants(), threading.active_count(), open_files()
    pids = []
    for i in range(20):
        with Cluster(["true"], SLEEP, CHILD.format(options="", then="")) as cluster:
            pids += [task.pid for task in cluster.tasks.values()]
            if i % 2:
                assert cluster.wait_until(lambda: len(cluster.running) == 1, 20)
    assert (descendants(), threading.active_count(), open_files()) == before
    assert not any(map(alive, pids))
