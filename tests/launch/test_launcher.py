"""The launcher: one attempt after the other, until the tasks are done or it is no use.

Most tests call it in this process. Those of signals start it as a process of its own.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.launch.jobs import HEAD, REPLICAX, eventually, gone
from typer.testing import CliRunner, Result

from replicax.cli import app
from replicax.launch.gang import ClusterCommand
from replicax.launch.launcher import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

REPORT = """
def report(steps, code, culprit=name, kind="exception"):
    fields = dict(task=name, culprit=culprit, kind=kind, message="It broke.",
        exit_code=code, traceback="Traceback: line " + str(attempt), steps=steps,
        time=time.time())
    folder = os.environ["REPLICAX_REPORT_DIR"]
    open(folder + "/" + name.replace(":", "-") + ".json", "w").write(json.dumps(fields))
    sys.exit(code)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run code as the tasks of a cluster; its first argument is a folder for files."""

    def run_code(code: str, *options: str) -> Result:
        return CliRunner().invoke(
            app, ["run", *options, write_script(tmp_path, code), str(tmp_path)]
        )

    return run_code


def write_script(folder: Path, code: str) -> str:
    script = folder / "train.py"
    script.write_text(HEAD + REPORT + textwrap.dedent(code))
    return str(script)


def lines_of(result: Result) -> list[str]:
    return sorted(result.stdout.splitlines())


def test_tasks_run_with_prefixes_and_all_are_done(run: Callable[..., Result]) -> None:
    code = "print('I am', name, attempt, sys.argv[2:], end='')"
    options = ("--workers", "2", "--chief", "--evaluator")
    result = run(code, *options)
    assert result.exit_code == 0, result.output
    assert lines_of(result) == [
        "chief:0     | I am chief:0 0 []",
        "evaluator:0 | I am evaluator:0 0 []",
        "worker:0    | I am worker:0 0 []",
        "worker:1    | I am worker:1 0 []",
    ]
    assert result.stderr == ""


def test_gpus_per_worker(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr("replicax._util.gpus._DRIVER", tmp_path / "gpus")
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    result = run("print(os.environ['CUDA_VISIBLE_DEVICES'])", "--workers", "2")
    assert lines_of(result) == ["worker:0 | 0", "worker:1 | 1"], result.output
    assert "own: ['worker:0: 0', 'worker:1: 1']" in result.stderr


def test_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "-m", "trainer", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "worker:0 | __main__ ['--steps', '3']\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-file.py"], "There is no script 'no-such-file.py'"),
        (["python", "train.py"], "without `python` before it, or -m"),
        (["--workers", "0", "-m", "x"], "needs a worker or a chief"),
        (["--workers", "900", "--cores-per-worker", "9", "-m", "x"], "need 8100 cores"),
        (["--workers", "-1", "-m", "x"], "Invalid value for '--workers'"),
    ],
)
def test_what_cannot_be_run(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["run", *options])
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.stderr)


def test_options_after_the_script_go_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    late = CliRunner().invoke(app, ["run", "train.py", "--workers=2", "--epochs", "3"])
    assert late.stdout == "worker:0 | ['--workers=2', '--epochs', '3']\n"
    note = "replicax run: after the script, --workers goes to the script."
    assert note in late.stderr
    both = CliRunner().invoke(app, ["run", "--workers", "1", "train.py", "--workers=2"])
    assert both.stdout == "worker:0 | ['--workers=2']\n"
    assert both.stderr == ""


def test_no_restart_after_a_permanent_failure(run: Callable[..., Result]) -> None:
    result = run(
        "sys.exit(3) if name == 'worker:1' else time.sleep(100)", "--workers", "3"
    )
    assert result.exit_code == 3
    assert "exit code 3. Ending worker:0 and worker:2." in result.stderr
    last = result.stderr.splitlines()[-1]
    assert "worker:1 failed first, with exit code 3 (permanent" in last
    assert "after 0 restarts" in last


def test_the_cause_is_shown_once(run: Callable[..., Result]) -> None:
    """An exception before replicax knows of the task: its output has the cause."""
    code = """
        if name == "worker:0":
            time.sleep(100)
        print("reading flags")
        raise ValueError("--steps is -1")
    """
    result = run(code, "--workers", "2")
    assert result.exit_code == 1
    begin, *trace, last = result.stderr.splitlines()[1:]
    assert begin == "replicax: The last lines of worker:1:"
    assert trace[0] == "replicax:   Traceback (most recent call last):"
    assert trace[-1] == "replicax:   ValueError: --steps is -1"
    assert "reading flags" not in result.stderr
    assert "worker:1 failed first, with exit code 1 (permanent" in last
    assert result.stderr.count("ValueError: --steps") == 1


def test_restart_on_any_failure(run: Callable[..., Result]) -> None:
    code = "sys.exit(3) if attempt < 2 else print('done')"
    result = run(code, "--restart-on", "any", "--backoff-seconds", "0.1")
    assert result.exit_code == 0, result.output
    assert "worker:0 ended with exit code 3. Restart 2 of 3" in result.stderr


def test_no_restart_after_an_interrupt(run: Callable[..., Result]) -> None:
    result = run("sys.exit(130)", "--restart-on", "any", "--backoff-seconds", "0.1")
    assert result.exit_code == 130, result.output
    assert "after 0 restarts" in result.stderr


def test_exit_code_of_a_script_that_ended_early(
    run: Callable[..., Result],
) -> None:
    code = """
        if name == "worker:1":
            time.sleep(1)
            sys.exit(5)
        report({}, 1, culprit="worker:1", kind="exited")
    """
    result = run(code, "--workers", "2")
    assert result.exit_code == 5, result.output
    assert "worker:1 failed first, with exit code 5 (permanent" in result.stderr


def test_restarts_after_retryable_failures(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    code = """
        ports = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        if name == "worker:0":
            print(attempt, *ports)
            sys.exit(138 if attempt < 2 else 0)
    """
    result = run(code, "--workers", "2", "--backoff-seconds", "0.2")
    assert result.exit_code == 0, result.output
    attempts = [line.split()[2:] for line in lines_of(result)]
    assert [words[0] for words in attempts] == ["0", "1", "2"]
    assert len({tuple(words[1:]) for words in attempts}) == 3, "the same ports again"
    waits = re.findall(r"Restart (\d) of 3 in (\d\.\d) s", result.stderr)
    assert [number for number, _ in waits] == ["1", "2"]
    assert 0.1 <= float(waits[0][1]) <= 0.3 <= float(waits[1][1]) <= 0.5
    assert result.stderr.splitlines()[-1].endswith("done, after 2 restarts.")


def test_max_restarts(run: Callable[..., Result]) -> None:
    code = "report({name: attempt}, 140)"
    result = run(code, "--max-restarts", "2", "--backoff-seconds", "0")
    assert result.exit_code == 140
    last = result.stderr.splitlines()[-1]
    assert "(retryable, but no restart is left), after 2 restarts." in last
    assert "It broke." in last


def test_a_crash_loop_is_ended_and_shows_how_it_began(
    run: Callable[..., Result],
) -> None:
    code = "report({name: min(attempt, 2)}, 138)"
    result = run(code, "--max-restarts", "50", "--backoff-seconds", "0")
    assert result.exit_code == 138
    assert "three attempts in a row got no further" in result.stderr
    assert "after 5 restarts" in result.stderr.splitlines()[-1]
    assert re.search(
        r"first failure of the first attempt:\n.*It broke\.\n.*Traceback: line 0\n",
        result.stderr,
    )


def test_tasks_that_ignore_sigterm_are_killed(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicax.launch.supervisor.KILL_AFTER_S", 0.3)
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if name == "worker:0":
            open(here + "/pid", "w").write(str(os.getpid()))
            time.sleep(100)
        if name == "worker:1":  # Frozen: it cannot even ignore.
            open(here + "/frozen", "w")
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(100)
        while not all(os.path.exists(here + f) for f in ("/pid", "/frozen")):
            time.sleep(0.01)
        sys.exit(1)
    """
    start = time.monotonic()
    result = run(code, "--workers", "3")
    assert result.exit_code == 1
    assert time.monotonic() - start < 10


EVALUATOR = """
    if name == "evaluator:0":
        time.sleep({seconds})
        print("evaluated")
"""


def test_the_evaluator_may_finish(run: Callable[..., Result]) -> None:
    result = run(EVALUATOR.format(seconds=0.7), "--evaluator")
    assert result.exit_code == 0, result.output
    assert result.stdout == "evaluator:0 | evaluated\n"


def test_the_evaluator_has_a_deadline(run: Callable[..., Result]) -> None:
    options = ("--evaluator", "--evaluator-seconds", "0.3")
    result = run(EVALUATOR.format(seconds=100), *options)
    assert result.exit_code == 0, result.output
    assert "evaluator:0 did not end within 0.3 s after the training" in result.stderr


def test_a_failed_evaluator_fails_the_job(run: Callable[..., Result]) -> None:
    code = "sys.exit(4) if name == 'evaluator:0' else time.sleep(100)"
    assert run(code, "--evaluator").exit_code == 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot pin here")
def test_cores_per_worker(run: Callable[..., Result]) -> None:
    count = min(2, len(os.sched_getaffinity(0)))
    # The server would be ended before it has printed, if workers came first.
    code = "print(*os.sched_getaffinity(0), flush=True); time.sleep(name[0] == 'w')"
    options = ("--workers", str(count), "--ps", "1", "--cores-per-worker", "1")
    result = run(code, *options)
    assert result.exit_code == 0, result.output
    cores = {line.split()[0]: set(line.split()[2:]) for line in lines_of(result)}
    workers = [cores[f"worker:{i}"] for i in range(count)]
    assert all(len(mine) == 1 for mine in workers)
    assert len(set.union(*workers)) == count
    assert cores["ps:0"] == {str(core) for core in os.sched_getaffinity(0)}


def test_logical_devices(run: Callable[..., Result]) -> None:
    code = """
        import jax
        print(jax.device_count(), os.environ["NPROC"])
    """
    result = run(code, "--logical-devices", "3")
    assert result.exit_code == 0, result.output
    devices, threads = map(int, result.stdout.split()[-2:])
    assert devices == 3
    assert threads >= 6


@contextmanager
def launcher(folder: Path, code: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher as a process, once its tasks have made a file each."""
    ready = "open(here + '/ready-' + name, 'w').write(str(os.getpid()))\n"
    script = write_script(folder, textwrap.dedent(code).replace("READY", ready))
    with subprocess.Popen(
        [*REPLICAX, "run", "--workers", "2", *options, script, folder],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + 40
            while len(list(folder.glob("ready-*"))) < 2:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end, "the tasks did not start"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def task_pids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.glob("ready-*")]
    return [int(text) for text in texts if text]  # One may be about to be written.


SAVES = """
def save(number, _):
    print("saved after", signal.Signals(number).name)
    sys.exit(138)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
READY
time.sleep(100)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_forwarded_and_no_restart_follows(
    tmp_path: Path, number: signal.Signals
) -> None:
    with launcher(tmp_path, SAVES) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    # After Ctrl-C nobody is to start it again, whatever the tasks make of it.
    assert process.returncode == (130 if number == signal.SIGINT else 138), output
    assert f"worker:0 | saved after {number.name}" in output
    assert f"worker:1 | saved after {number.name}" in output
    assert f"(after {number.name}), after 0 restarts" in output


STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("no", flush=True))
READY
while True:
    time.sleep(100)
"""


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    with launcher(tmp_path, STUBBORN) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert output.count("| no") == 2
    assert gone(task_pids(tmp_path))


@pytest.mark.slow
def test_tasks_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    with launcher(tmp_path, STUBBORN, "--grace-seconds", "0.5") as process:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 143, output
    assert "SIGTERM: the tasks have 0.5 s to end." in output
    assert "did not end after SIGTERM" in output


def test_a_killed_launcher_leaves_neither_tasks_nor_folders(tmp_path: Path) -> None:
    with launcher(tmp_path, STUBBORN) as process:
        pids = task_pids(tmp_path)
        assert len(list(tmp_path.glob("replicax-*"))) == 1
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        process.wait(10)
        assert gone(pids)
    assert eventually(lambda: not list(tmp_path.glob("replicax-*")))


def test_a_job_is_restarted_where_the_disk_of_its_reports_is_full(
    run: Callable[..., Result],
    mounted: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = str(mounted("nr_inodes=8"))
    monkeypatch.setattr("tempfile.tempdir", disk)
    result = run(f"""
        try:
            for number in range(8 * (attempt == 0)):
                open({disk!r} + f"/{{number}}", "w")
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)
        print("attempt", attempt)
    """)
    assert result.exit_code == 0, result.output
    assert result.stdout == "worker:0 | attempt 1\n"


@pytest.mark.slow
def test_a_closed_output_ends_the_tasks(tmp_path: Path) -> None:
    code = """
        def save(*_):
            open(here + "/saved-" + name, "w")
            sys.exit(138)
        signal.signal(signal.SIGTERM, save)
        READY
        while True:
            print("step", flush=True)
            time.sleep(0.05)
    """
    with launcher(tmp_path, code) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 138
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_signal_during_the_wait_ends_it(tmp_path: Path) -> None:
    code = """
        READY
        if name == "worker:1":
            time.sleep(100)
        while not os.path.exists(here + "/ready-worker:1"):
            time.sleep(0.01)
        sys.exit(138)
    """
    with launcher(tmp_path, code, "--backoff-seconds", "50") as process:
        assert process.stdout is not None
        lines = []
        while "Restart 1 of 3" not in (line := process.stdout.readline()):
            assert line, lines
            lines.append(line)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 138, output
    assert "a signal came before the restart" in output


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert launch(command("pass")) == 0
    assert [signal.getsignal(number) for number in numbers] == before


def command(code: str) -> ClusterCommand:
    return ClusterCommand(
        command=[sys.executable, "-c", code],
        num_tasks={"worker": 1},
        environment=dict(os.environ),
    )
