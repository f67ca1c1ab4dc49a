"""Two hosts, as network namespaces with a cable between them, which is cut."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicax.cluster.failure import REPORT_DIR, FailureReport

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(150),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and the `ip` command",
    ),
]

ADDRESSES = ["10.213.7.1", "10.213.7.2"]
PORT = 2222
START_S = 90.0
LATEST_S = 25.0

TRAIN = """
import time
import keras
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy(
    timeouts=rx.Timeouts(startup=80, step=8, heartbeat=4, shutdown=10),
)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
for epoch in range(100_000):
    loss = model.fit(x, y, batch_size=8, epochs=1, verbose=0).history["loss"][0]
    if epoch == 5:
        print(f"trained to {loss:.6f}", flush=True)
    if epoch == 60:
        print(f"went on to {loss:.9f}", flush=True)
    time.sleep(0.05)
"""


def ip(*words: str) -> None:
    subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=10
    )


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces; the end of the cable is `eth0` in each."""
    names = [f"replicax-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            first, second = names
            peer = ("peer", "name", "eth0", "netns", second)
            ip("link", "add", "eth0", "netns", first, "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


class Worker:
    """One worker's process on its host."""

    def __init__(
        self, host: str, index: int, folder: Path, variables: dict[str, str]
    ) -> None:
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.host = host
        self._output = folder / f"output-{index}"
        self._file = self._output.open("w")
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, str(script)],
            env={
                **os.environ,
                **variables,
                "JAX_PLATFORMS": "cpu",
                "KERAS_BACKEND": "jax",
                "JAX_NUM_CPU_DEVICES": "1",
                REPORT_DIR: str(folder),
            },
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def processes(self) -> list[int]:
        """What runs on its host."""
        command = ["ip", "netns", "pids", self.host]
        return [int(word) for word in subprocess.check_output(command).split()]

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError, ProcessLookupError):
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(timeout=10)
        self._file.close()


def tf_config(index: int) -> dict[str, str]:
    addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    task = {"type": "worker", "index": index}
    config = {"cluster": {"worker": addresses}, "task": task}
    return {"TF_CONFIG": json.dumps(config)}


def one_address(index: int) -> dict[str, str]:
    return {
        "RANK": str(index),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
    }


@contextlib.contextmanager
def started(
    hosts: list[str],
    folder: Path,
    variables: Callable[[int], dict[str, str]] = tf_config,
) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = []
        for index, host in enumerate(hosts):
            workers.append(Worker(host, index, folder, variables(index)))
            stack.callback(workers[-1].end)
        wait_for(
            lambda: all("trained to" in w.output for w in workers), START_S, workers
        )
        yield workers


def wait_for(
    reached: Callable[[], bool], timeout_seconds: float, workers: list[Worker]
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not reached():
        if time.monotonic() > deadline:
            shown = "\n".join(f"--- {w.host}\n{w.output[-3000:]}" for w in workers)
            pytest.fail(f"not reached within {timeout_seconds} s:\n{shown}")
        time.sleep(0.1)


def cut_the_cable(hosts: list[str], workers: list[Worker]) -> None:
    """Cut it once both have trained to the same weights; wait for both to end."""
    told = [re.findall(r"trained to (\S+)", w.output) for w in workers]
    assert told[0] == told[1]
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    wait_for(
        lambda: all(w.process.poll() is not None for w in workers), LATEST_S, workers
    )


@pytest.mark.slow
def test_two_hosts_meet_at_one_known_address(hosts: list[str], tmp_path: Path) -> None:
    with started(hosts, tmp_path, one_address) as workers:
        cut_the_cable(hosts, workers)
        # Process 0 has learnt the address of the other one.
        assert f"worker:0 ends: worker:1 ({ADDRESSES[1]}:" in workers[0].output


@pytest.mark.slow
def test_the_cable_between_two_hosts_is_cut(hosts: list[str], tmp_path: Path) -> None:
    with started(hosts, tmp_path) as workers:
        cut_the_cable(hosts, workers)
        for worker in workers:
            assert worker.process.returncode == 138, worker.output
            assert "Exit code 138 (retryable)." in worker.output
            assert "Last steps: worker:0 " in worker.output
        first, second = (worker.output for worker in workers)
        # Worker 0 reaches the coordination service, which is beside it, and misses the
        # other one there. Worker 1 misses the service.
        assert (
            f"worker:0 ends: worker:1 ({ADDRESSES[1]}:{PORT}) has given no sign of life"
        ) in first
        assert (
            "worker:1 ends: the coordination service beside worker:0 "
            f"({ADDRESSES[0]}:{PORT}) has not answered for"
        ) in second
        reports = {r.task: r for r in FailureReport.read_all(tmp_path)}
        assert reports["worker:0"].culprit == "worker:1"
        assert reports["worker:1"].culprit == "worker:0"
        assert {r.kind for r in reports.values()} == {"lost"}


@pytest.mark.slow
def test_a_short_cut_of_the_cable_is_survived(hosts: list[str], tmp_path: Path) -> None:
    with started(hosts, tmp_path) as workers:
        ip("-n", hosts[1], "link", "set", "eth0", "down")
        time.sleep(2.0)  # Less than `heartbeat`.
        assert not any("went on to" in w.output for w in workers)
        ip("-n", hosts[1], "link", "set", "eth0", "up")
        wait_for(
            lambda: all("went on to" in w.output for w in workers), LATEST_S, workers
        )
        losses = [re.findall(r"went on to (\S+)", w.output) for w in workers]
        assert losses[0] == losses[1]
        assert all(w.process.poll() is None for w in workers)


@pytest.mark.slow
def test_the_host_of_the_coordination_service_dies(
    hosts: list[str], tmp_path: Path
) -> None:
    """All its processes die at once. JAX itself ends who loses its service."""
    with started(hosts, tmp_path) as workers:
        for pid in workers[0].processes():
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: workers[1].process.poll() is not None, LATEST_S, workers)
        assert workers[1].process.returncode in (138, -signal.SIGABRT)
