"""`replicax.testing`: functions and scripts as the tasks of a cluster."""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from replicax.cluster.failure import FailureReport
from replicax.testing import Cluster, ClusterTimeout, Results, TaskFailed, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]


class Found:
    """A value of a class of this module."""

    def __init__(self, **found) -> None:
        self.found = found


def describe(*args, **kwargs) -> Found:
    import json

    import jax
    import keras

    return Found(
        task=json.loads(os.environ["TF_CONFIG"])["task"],
        arguments=(args, kwargs),
        array=np.arange(3) * args[0],
        devices=jax.device_count(),
        backends=(keras.config.backend(), jax.default_backend()),
        environment=os.environ.get("OF_THE_TEST"),
    )


def test_a_function_runs_in_every_task() -> None:
    results = run(
        describe,
        tasks={"chief": 1, "worker": 1},
        args=(2,),
        kwargs={"name": Found},
        env={"OF_THE_TEST": "yes"},
        logical_devices=3,
        deadline_seconds=60,
    )
    assert list(results) == ["chief:0", "worker:0"]
    assert results.exit_codes == {"chief:0": 0, "worker:0": 0}
    values = [value.found for value in results.returned.values()]
    assert [v["task"]["type"] for v in values] == ["chief", "worker"]
    for value in values:
        assert value["arguments"] == ((2,), {"name": Found})
        np.testing.assert_array_equal(value["array"], [0, 2, 4])
        assert value["devices"] == 3
        assert value["backends"] == ("jax", "cpu")
        assert value["environment"] == "yes"


def test_a_script_with_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside; print(__name__, sys.argv[1:], beside.WORD)")
    results = run(script, num_workers=1, args=["--steps", "3"], deadline_seconds=60)
    result = results["worker:0"]
    assert result.output == "__main__ ['--steps', '3'] found\n"
    assert result.value is None


def fails_in_one() -> str:
    if '"index": 1' in os.environ["TF_CONFIG"]:
        FailureReport(
            task="worker:1",
            culprit="worker:1",
            kind="exception",
            message="Oh.",
            exit_code=1,
        ).write()
        raise ValueError("this one fails")
    return "fine"


def test_a_task_that_fails() -> None:
    results = run(fails_in_one, num_workers=2, deadline_seconds=60, check=False)
    assert results.exit_codes == {"worker:0": 0, "worker:1": 1}
    assert results.returned == {"worker:0": "fine", "worker:1": None}
    assert results["worker:0"].report is None
    report = results["worker:1"].report
    assert report is not None
    assert report.message == "Oh."
    with pytest.raises(TaskFailed) as caught:
        results.check()
    message = str(caught.value)
    assert message.startswith("Failed: worker:1 with exit code 1.\n")
    assert re.search(
        r"--- output of worker:1 ---\nTraceback.*\nValueError: this one fails",
        message,
        re.DOTALL,
    )


def returns_a_lock() -> object:
    return threading.Lock()


def exits() -> None:
    sys.exit(138)


@pytest.mark.slow
def test_an_exit_code_and_an_unpicklable_value() -> None:
    results = run(exits, num_workers=1, deadline_seconds=60, check=False)
    assert results["worker:0"].exit_code == 138
    match = r"returns_a_lock returned <.*lock.*cannot be pickled.* Return numbers"
    with pytest.raises(TaskFailed, match=match):
        run(returns_a_lock, num_workers=1, deadline_seconds=60)


def waits_for_ever(word: str) -> None:
    def in_a_thread() -> None:
        print(word, flush=True)
        time.sleep(100)

    thread = threading.Thread(target=in_a_thread, daemon=True)
    thread.start()
    thread.join()


@pytest.mark.slow
def test_the_deadline_shows_outputs_and_stacks_of_all_threads() -> None:
    with pytest.raises(ClusterTimeout) as caught:
        run(waits_for_ever, num_workers=2, args=["here I am"], deadline_seconds=15)
    message = str(caught.value)
    assert "deadline of 15 s found these tasks running: worker:0, worker:1" in message
    for i in range(2):
        part = message.partition(f"--- output of worker:{i} ---\n")[2]
        assert part.startswith("here I am\n")
        stacks = part.partition("--- stacks of")[2].partition("--- output")[0]
        assert "in in_a_thread" in stacks
        assert "in waits_for_ever" in stacks


def test_the_deadline_kills_tasks_while_the_test_polls() -> None:
    start = time.monotonic()
    with Cluster(waits_for_ever, num_workers=2, args=["x"], deadline_seconds=3) as c:
        c.task("worker:0").stop()  # A frozen one has its stacks too.
        while c.task("worker:0").exit_code is None:
            assert time.monotonic() < start + 20
            time.sleep(0.1)
        with pytest.raises(ClusterTimeout, match="deadline of 3 s"):
            c.task("worker:1").wait_for("anything")


def steps() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(138))
    print(f"process {os.getpid()}", flush=True)
    for step in range(10_000):
        print(f"step {step}", flush=True)
        time.sleep(0.02)
    return step


def test_a_test_freezes_and_kills_tasks() -> None:
    with Cluster(steps, num_workers=3, deadline_seconds=60) as cluster:
        tasks = [cluster.task(f"worker:{i}") for i in range(3)]
        for task in tasks:
            task.wait_for("step 3", timeout_seconds=30)
            assert f"process {task.pid}\n" in task.output
            assert task.exit_code is None

        tasks[0].stop()
        time.sleep(0.1)
        before = tasks[0].output
        time.sleep(0.3)
        assert tasks[0].output == before
        tasks[0].resume()
        step = int(before.split()[-1])
        tasks[0].wait_for(f"step {step + 3}", timeout_seconds=10)

        tasks[0].terminate()
        assert tasks[0].wait(timeout_seconds=10) == 138
        tasks[1].kill()
        tasks[2].signal(signal.SIGINT)
        results = cluster.wait()
    assert results.exit_codes == {
        "worker:0": 138,
        "worker:1": -signal.SIGKILL,
        "worker:2": -signal.SIGINT,
    }
    assert "KeyboardInterrupt" in results["worker:2"].output


@pytest.mark.slow
def test_waits_that_time_out() -> None:
    with Cluster(steps, num_workers=2, deadline_seconds=60) as cluster:
        first = cluster.task("worker:0")
        first.wait_for("step 1\n")
        with pytest.raises(
            ClusterTimeout, match=r"^Waited 0\.2 s for worker:0 to write 'no such'"
        ):
            first.wait_for("no such", timeout_seconds=0.2)
        with pytest.raises(ClusterTimeout, match=r"Waited 0\.2 s for worker:0 to end"):
            first.wait(timeout_seconds=0.2)
        first.kill()
        with pytest.raises(ClusterTimeout, match=r"exit code -9(.|\n)*step 1\n"):
            first.wait_for("no such")
        with pytest.raises(KeyError, match="cluster has worker:0, worker:1"):
            cluster.task("worker:2")


def serves_or_works() -> str:
    if '"ps"' in os.environ["TF_CONFIG"].partition("task")[2]:
        time.sleep(100)
    return "done"


@pytest.mark.slow
def test_parameter_servers_are_dismissed() -> None:
    tasks = {"worker": 1, "ps": 1}
    results = run(serves_or_works, tasks=tasks, deadline_seconds=60)
    assert results.returned == {"worker:0": "done", "ps:0": None}
    assert results["ps:0"].dismissed
    assert not results["worker:0"].dismissed


@pytest.mark.slow
def test_the_end_of_a_long_output_is_shown() -> None:
    results = Results({})
    assert results.check() is results
    with pytest.raises(TaskFailed) as caught:
        run(writes_much, num_workers=1, deadline_seconds=60)
    assert "(41 lines before)\nline 41\n" in str(caught.value)
    assert "line 99\nenough" in str(caught.value)


def writes_much() -> None:
    for i in range(100):
        print("line", i)
    sys.exit("enough")


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (platform.node, {}, "either num_workers or tasks"),
        (platform.node, {"num_workers": 1, "tasks": {"worker": 1}}, "either"),
        (platform.node, {"tasks": {"master": 1}}, "no job 'master'"),
        (lambda: 1, {"num_workers": 1}, "top level of a module"),
        (partial(print, 1), {"num_workers": 1}, "top level of a module"),
        (print, {"num_workers": 1}, "module 'builtins' has no file"),
        ("no-such.py", {"num_workers": 1}, "no script no-such.py"),
    ],
)
def test_what_cannot_be_run(program: object, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(program, **options)


def test_arguments_of_scripts_are_strings(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    with pytest.raises(TypeError, match=r"arguments are strings.*args=\[3\]"):
        Cluster(script, num_workers=1, args=[3])
    with pytest.raises(TypeError, match="must be a function or the path"):
        Cluster(3, num_workers=1)


def test_an_unpicklable_argument() -> None:
    lock = threading.Lock()
    match = r"Cluster: args=\[1, <.*lock.*cannot be pickled.*lock.*Pass numbers"
    with pytest.raises(TypeError, match=match):
        Cluster(platform.node, num_workers=1, args=[1, lock])
    with pytest.raises(TypeError, match=r"Cluster: .*kwargs={'f': <function.*lambda"):
        Cluster(platform.node, num_workers=1, kwargs={"f": lambda: 1, "n": 2})


def test_a_cluster_must_be_entered() -> None:
    with pytest.raises(RuntimeError, match="Enter it"):
        Cluster(platform.node, num_workers=1).wait()


def test_leaving_ends_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = Cluster(steps, num_workers=2, deadline_seconds=60)
    with contextlib.suppress(ZeroDivisionError), cluster:
        pids = [task.pid for task in cluster.tasks.values()]
        assert list(tmp_path.iterdir())
        raise ZeroDivisionError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.iterdir())


MAIN = """
    import os, sys
    import replicax.testing

    class Pair:
        def __init__(self, *values):
            self.values = values

    def work(number):
        return Pair(number, os.environ["TF_CONFIG"][:1])

    if __name__ == "__main__":
        results = replicax.testing.run(work, num_workers=1, args=[3])
        print(type(results["worker:0"].value) is Pair, results["worker:0"].value.values)
"""


@pytest.mark.slow
def test_a_function_of_the_main_script(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(MAIN))
    process = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.stdout == "True (3, '{')\n", process.stderr
