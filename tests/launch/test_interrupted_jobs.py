"""One interrupt ends a job with 130 and few words.

The jobs are real ones of `replicax run`, each with a limit.
"""

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
from tests.launch.jobs import REPLICAX

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


SYNC = """
import os, sys, time
import replicax as rx
import keras
import numpy as np

here = sys.argv[1]
task = rx.cluster_resolver.TFConfigClusterResolver()
name = f"{task.task_type}:{task.task_id}"
with open(f"{here}/{name}", "w") as file:
    file.write(str(os.getpid()))
strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        if batch == 3:
            open(f"{here}/ready-{name}", "w").close()


x = np.ones((160, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=10**4, verbose=0,
          callbacks=[Slow()])
print("END")
"""

LOOP = """
import os, sys, time
import replicax as rx
import jax.numpy as jnp

here = sys.argv[1]
task = rx.cluster_resolver.TFConfigClusterResolver()
name = f"{task.task_type}:{task.task_id}"
with open(f"{here}/{name}", "w") as file:
    file.write(str(os.getpid()))
if name.startswith("evaluator"):
    open(f"{here}/ready-{name}", "w").close()
    while True:
        time.sleep(0.05)
strategy = rx.MultiWorkerMirroredStrategy()
while True:
    strategy.run(lambda: rx.get_replica_context().all_reduce("sum", jnp.ones(())))
    open(f"{here}/ready-{name}", "w").close()
    time.sleep(0.02)
"""

SERVED = SYNC.replace(
    "rx.MultiWorkerMirroredStrategy()", "rx.ParameterServerStrategy()"
)


@contextmanager
def job(
    folder: Path, code: str, *options: str, ready: int
) -> Iterator[subprocess.Popen[str]]:
    """The launcher, once so many tasks have made steps."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code))
    with subprocess.Popen(
        [*REPLICAX, "run", *options, script, folder],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            end = time.monotonic() + 60
            while len(list(folder.glob("ready-*"))) < ready:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end, "the tasks did not start"
                time.sleep(0.05)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def to_the_launcher(process: subprocess.Popen[str], folder: Path) -> None:
    process.send_signal(signal.SIGINT)


def to_its_group(process: subprocess.Popen[str], folder: Path) -> None:
    os.killpg(process.pid, signal.SIGINT)


def to(name: str) -> Callable[[subprocess.Popen[str], Path], None]:
    def send(process: subprocess.Popen[str], folder: Path) -> None:
        os.kill(int((folder / name).read_text()), signal.SIGINT)

    return send


def assert_ended(process: subprocess.Popen[str], folder: Path) -> str:
    """With 130, within seconds, in few lines, and nothing is left of it."""
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 130, output
    assert "END" not in output
    assert "Restart" not in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 25, output
    for name in ("worker:0", "worker:1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / name).read_text()), 0)
    return output


@pytest.mark.parametrize(
    ("code", "send"),
    [
        (SYNC, to_the_launcher),
        pytest.param(LOOP, to("worker:0"), marks=pytest.mark.slow),
        pytest.param(SYNC, to("worker:0"), marks=pytest.mark.slow),
        pytest.param(SYNC, to("worker:1"), marks=pytest.mark.slow),
        pytest.param(LOOP, to("worker:1"), marks=pytest.mark.slow),
        pytest.param(LOOP, to_its_group, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_ends_the_job(
    tmp_path: Path,
    code: str,
    send: Callable[[subprocess.Popen[str], Path], None],
) -> None:
    with job(tmp_path, code, "--workers", "2", ready=2) as process:
        send(process, tmp_path)
        output = assert_ended(process, tmp_path)
    assert re.search(r"worker:[01]: interrupted.*train.py:\d+", output), output


@pytest.mark.slow
def test_an_interrupted_evaluator_ends_the_job(tmp_path: Path) -> None:
    options = ("--workers", "2", "--evaluator")
    with job(tmp_path, LOOP, *options, ready=3) as process:
        to("evaluator:0")(process, tmp_path)
        assert_ended(process, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "send",
    [to_the_launcher, to("worker:0"), to("worker:1"), to("chief:0"), to("ps:0")],
)
def test_an_interrupt_ends_a_job_with_servers(
    tmp_path: Path, send: Callable[[subprocess.Popen[str], Path], None]
) -> None:
    options = ("--workers", "2", "--ps", "1", "--chief")
    with job(tmp_path, SERVED, *options, ready=1) as process:
        send(process, tmp_path)
        assert_ended(process, tmp_path)
