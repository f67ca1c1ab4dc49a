"""The launcher with parameter servers: a task that ends takes no other with it.

Scripts that only look like a cluster show what the launcher does with exit codes; the
last tests train, and kill workers in the middle of `fit`.
"""

import json
import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.launch.jobs import HEAD, REPLICAX, gone
from typer.testing import CliRunner, Result

from replicax.cli import app

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(170)]

# A server that ends when the chief has ended, as the real ones do.
SERVER = """
if name[0] == "p":
    wait_for("over")
    print("served")
    sys.exit()
"""
QUICK = ("--workers", "3", "--ps", "1", "--backoff-seconds", "0.1")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run code as the tasks of a cluster with servers that end by themselves."""

    def run_code(code: str, *options: str, head: str = HEAD + SERVER) -> Result:
        script = tmp_path / "train.py"
        script.write_text(head + textwrap.dedent(code))
        return CliRunner().invoke(
            app, ["run", *QUICK, *options, str(script), str(tmp_path)]
        )

    return run_code


def test_one_worker_is_restarted_and_the_others_go_on(
    run: Callable[..., Result],
) -> None:
    code = """
        print("attempt", attempt)
        if name == "worker:1" and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "worker:1":
            mark("back")
        wait_for("back")
        if name == "worker:0":
            mark("over")
    """
    result = run(code)
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == [
        "ps:0     | served",
        "worker:0 | attempt 0",
        "worker:1 | attempt 0",
        "worker:1 | attempt 1",
        "worker:2 | attempt 0",
    ]
    assert "worker:1 was killed by SIGKILL (out of memory?). Restart 1 of 3" in (
        result.stderr
    )
    assert result.stderr.splitlines()[-1].endswith("The job is done, after 1 restart.")


def test_the_same_address_after_a_restart(run: Callable[..., Result]) -> None:
    code = """
        print("cluster", os.environ["TF_CONFIG"].partition(', "task"')[0])
        if name == "ps:0" and attempt == 0:
            sys.exit(138)
        if name == "ps:0":
            mark("back")
            wait_for("over")
        wait_for("back")
        if name == "worker:0":
            mark("over")
    """
    result = run(code, head=HEAD)
    assert result.exit_code == 0, result.output
    lines = [line.partition("| ")[2] for line in result.stdout.splitlines()]
    assert len(lines) == 5
    assert len(set(lines)) == 1
    assert "ps:0 ended with exit code 138. Restart 1 of 3" in result.stderr


def test_an_exception_of_a_worker_ends_the_job(run: Callable[..., Result]) -> None:
    code = """
        if name == "worker:2":
            raise ImportError("no module polars")
        time.sleep(100)
    """
    began = time.monotonic()
    result = run(code)
    assert time.monotonic() - began < 60
    assert result.exit_code == 1, result.output
    first, *trace, last = result.stderr.splitlines()
    assert first.endswith(
        "worker:2 ended with exit code 1. No restart follows (permanent: another "
        "attempt would fail again): the job cannot go on."
    )
    assert trace[-1] == "replicax:   ImportError: no module polars"
    assert "worker:2 failed first, with exit code 1, after 0 restarts" in last


def test_no_restart_after_a_consequence_of_a_permanent_failure(
    run: Callable[..., Result],
) -> None:
    """worker:1 has lost the chief, which has reported an exception and still saves."""
    code = """
        fields = dict(task=name, culprit=name, kind="exception", message="It broke.",
            exit_code=1, traceback="ValueError: no", steps={}, time=0.0)
        if name == "worker:0":
            open(os.environ["REPLICAX_REPORT_DIR"] + "/worker-0.json", "w").write(
                json.dumps(fields))
            mark("reported")
            time.sleep(2)
            sys.exit(1)
        wait_for("reported")
        if name == "worker:1":
            sys.exit(138)
        time.sleep(100)
    """
    result = run(code)
    assert result.exit_code == 1, result.output
    assert "Restart" not in result.stderr
    assert "worker:0 failed first, with exit code 1, after 0 restarts. It broke." in (
        result.stderr
    )


def test_without_restarts_the_others_finish(run: Callable[..., Result]) -> None:
    code = """
        if name == "worker:2":
            mark("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("killed")
        time.sleep(0.5)
        print("done")
        if name == "worker:0":
            mark("over")
    """
    result = run(code, "--max-restarts", "0")
    assert result.exit_code == 137, result.output
    assert result.stdout.count("| done") == 2
    assert "no restart is left): the others go on." in result.stderr
    assert "The job is done, but worker:2 failed first" in result.stderr


CRASHES = """
    if name == "worker:1":
        if attempt == 3:
            mark("given-up")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for("given-up")
    time.sleep(0.5)
    if name == "worker:0":
        mark("over")
    print("done")
"""


def test_a_crash_loop_of_a_worker_is_ended(run: Callable[..., Result]) -> None:
    result = run(CRASHES, "--max-restarts", "50")
    assert result.exit_code == 137, result.output
    assert result.stdout.count("| done") == 2
    assert "three attempts in a row got no further" in result.stderr
    assert "after 3 restarts" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "chief", [pytest.param("worker:0", marks=pytest.mark.slow), "chief:0"]
)
def test_an_exception_of_the_chief_ends_the_job(
    run: Callable[..., Result], chief: str
) -> None:
    code = f"""
        if name == {chief!r}:
            sys.exit(7)
        time.sleep(100)
    """
    options = ("--chief",) if chief == "chief:0" else ()
    result = run(code, *options)
    assert result.exit_code == 7, result.output
    assert f"{chief} ended with exit code 7. No restart follows" in result.stderr
    assert "would fail again): the job cannot go on." in result.stderr
    assert f"{chief} failed first, with exit code 7" in result.stderr.splitlines()[-1]


def test_a_server_that_fails_ends_the_job(run: Callable[..., Result]) -> None:
    code = """
        if name == "ps:0":
            sys.exit(5)
        time.sleep(100)
    """
    assert run(code, head=HEAD).exit_code == 5


def test_a_server_that_ends_before_the_culprit(
    run: Callable[..., Result],
) -> None:
    """Servers end with 1 when the chief has told them that it fails."""
    code = """
        if name == "ps:0":
            mark("gone")
            sys.exit(1)
        wait_for("gone")
        time.sleep(0.5)
        sys.exit(3 if name == "worker:0" else 138)
    """
    result = run(code, head=HEAD)
    assert result.exit_code == 3, result.output
    assert "worker:0 failed first, with exit code 3" in result.stderr


def test_the_chief_is_restarted(run: Callable[..., Result]) -> None:
    code = """
        if name == "worker:0" and attempt == 0:
            sys.exit(138)
        if name == "worker:0":
            mark("over")
        wait_for("over")
        print("attempt", attempt)
    """
    result = run(code)
    assert result.exit_code == 0, result.output
    assert "worker:0 | attempt 1" in result.stdout
    assert result.stdout.count("| attempt 0") == 2


def test_nothing_is_restarted_when_the_chief_is_done(
    run: Callable[..., Result],
) -> None:
    code = """
        if name == "worker:0":
            sys.exit()
        time.sleep(1)
        mark("over")
        print("attempt", attempt)
        sys.exit(138)
    """
    result = run(code)
    assert result.exit_code == 0, result.output
    assert "attempt 1" not in result.stdout
    assert "The job is done without it." in result.stderr


def test_workers_that_outlast_the_servers_are_ended(run: Callable[..., Result]) -> None:
    code = """
        if name == "worker:0":
            mark("over")
        else:
            time.sleep(100)
    """
    assert run(code, "--grace-seconds", "0.5").exit_code == 0


def test_servers_that_do_not_end_are_ended(run: Callable[..., Result]) -> None:
    code = "time.sleep(100 * (name[0] == 'p'))"
    result = run(code, "--grace-seconds", "0.5", head=HEAD)
    assert result.exit_code == 0, result.output
    assert "ps:0 did not end within 0.5 s after the last worker" in result.stderr


TOKEN = """
    print("token", os.environ.get("REPLICAX_PS_TOKEN"))
    mark("over")
"""


def test_all_tasks_have_a_secret_token(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAX_PS_TOKEN", raising=False)
    result = run(TOKEN, head=HEAD)
    (token,) = set(re.findall(r"token (\S+)", result.stdout))
    assert len(token) == 43
    assert token not in result.stderr
    again = run(TOKEN, head=HEAD)
    assert token not in again.stdout, "the same token again"


# Training.

TRAIN = """
import replicax as rx
import keras
import numpy as np
from replicax.ps.strategy import ParameterServerStrategy

plan = json.loads(sys.argv[2])
killed = plan.get("killed", {})
mark(f"begun-{name}-{attempt}")
strategy = ParameterServerStrategy(
    timeouts=rx.Timeouts(heartbeat=6, step=60),
    snapshot_dir=plan.get("snapshots"),
    snapshot_every_updates=10,
)
mark(f"joined-{name}-{attempt}")


class Course(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        steps = strategy.session.steps
        if steps == 3 and attempt < killed.get(name, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == 3 and name == plan.get("raises"):
            raise ValueError("no such thing")
        if steps == 3:
            mark(f"trains-{name}-{attempt}")
        wanted = [f"trains-{who}-{count}" for who, count in killed.items()]
        wanted.append(plan.get("until", f"trains-{name}-{attempt}"))
        if strategy.is_chief:
            if all(os.path.exists(f"{here}/{text}") for text in wanted):
                self.model.stop_training = True
        time.sleep(0.02)


keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(plan.get("rows", 640), 8)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
weights = np.linspace(-1, 1, 8, dtype="float32")[:, None]
model.fit(x, x @ weights, batch_size=32, epochs=10_000, verbose=0,
          callbacks=[Course()])
if strategy.is_chief:
    print("weights off by", float(np.abs(model.weights[0].numpy() - weights).max()))
print("made", strategy.session.steps, "updates")
print("done")
"""


@contextmanager
def training(
    folder: Path, *options: str, **plan: object
) -> Iterator[subprocess.Popen[str]]:
    """A launcher with real workers and servers, as a process of its own."""
    script = folder / "train.py"
    script.write_text(HEAD + TRAIN)
    with subprocess.Popen(
        [
            *(*REPLICAX, "run", "--ps", "2", *options),
            *(str(script), str(folder), json.dumps(plan)),
        ],
        env={
            **{k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"},
            "JAX_PLATFORMS": "cpu",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=140)
    return output


def nobody_is_left(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("begun-*")]
    return bool(pids) and gone(pids)


def error_of(output: str) -> float:
    (error,) = re.findall(r"weights off by (\S+)", output)
    return float(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "killed"),
    [
        pytest.param("2", {"worker:1": 1}, id="one"),
        pytest.param("2", {"worker:1": 2}, id="the same twice"),
        pytest.param("3", {"worker:1": 1, "worker:2": 1}, id="two"),
        pytest.param("2", {"worker:0": 1}, id="the chief"),
    ],
)
def test_killed_workers_rejoin(
    tmp_path: Path, workers: str, killed: dict[str, int]
) -> None:
    with training(tmp_path, "--workers", workers, killed=killed) as process:
        output = finished(process)
    assert process.returncode == 0, output
    num = sum(killed.values())
    assert output.count("was killed by SIGKILL") == num
    assert re.search(rf"The job is done, after {num} restarts?\.", output), output
    for worker in range(int(workers)):
        assert f"worker:{worker} | done" in output
    assert error_of(output) < 0.1
    assert "did not end within" not in output, "the servers end by themselves"
    assert nobody_is_left(tmp_path)


def when_marked(folder: Path, text: str, process: subprocess.Popen[str]) -> int:
    """The process id in a file that a task makes."""
    end = time.monotonic() + 60
    while not (folder / text).exists():
        assert process.poll() is None, finished(process)
        assert time.monotonic() < end, text
        time.sleep(0.05)
    return int((folder / text).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("server", ["ps:0", "ps:1"])
def test_a_killed_server_goes_on_from_its_snapshot(tmp_path: Path, server: str) -> None:
    with training(
        tmp_path,
        *("--workers", "2"),
        snapshots=str(tmp_path / "snapshots"),
        until="enough",
        rows=64_000,
    ) as process:
        when_marked(tmp_path, "trains-worker:1-0", process)
        time.sleep(1)
        os.kill(when_marked(tmp_path, f"begun-{server}-0", process), signal.SIGKILL)
        when_marked(tmp_path, f"begun-{server}-1", process)
        time.sleep(6)
        (tmp_path / "enough").touch()
        output = finished(process)
    assert process.returncode == 0, output
    assert f"{server} was killed by SIGKILL (out of memory?). Restart 1 of 3" in output
    assert "goes on from its snapshot" in output
    assert error_of(output) < 0.1
    counts = re.findall(
        rf"{server} ends with (\d+) updates in its values; (\d+) others", output
    )
    applied, lost = map(int, counts[0])
    made = sum(map(int, re.findall(r"made (\d+) updates", output)))
    assert applied + lost == made, output


@pytest.mark.slow
@pytest.mark.parametrize("server", ["ps:0", "ps:1"])
def test_a_killed_server_without_snapshots_ends_the_job(
    tmp_path: Path, server: str
) -> None:
    with training(tmp_path, "--workers", "2", until="never") as process:
        when_marked(tmp_path, "trains-worker:1-0", process)
        os.kill(when_marked(tmp_path, f"begun-{server}-0", process), signal.SIGKILL)
        output = finished(process)
    # Who of them sees it first is a matter of chance.
    assert process.returncode in (1, 137), output
    assert "weights off" not in output
    assert nobody_is_left(tmp_path)


@pytest.mark.slow
def test_sigterm_ends_all(tmp_path: Path) -> None:
    with training(tmp_path, "--workers", "2", killed={"worker:1": 99}) as process:
        when_marked(tmp_path, "joined-worker:1-1", process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=40)
    assert process.returncode != 0
    assert "SIGTERM: the tasks have 30 s to end." in output
    assert "after SIGTERM" in output.splitlines()[-1]
    assert nobody_is_left(tmp_path)
