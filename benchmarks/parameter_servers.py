"""Steps per second on parameter servers: replicax and TensorFlow, the same model.

784-2048-2048-10, batches of 256, Adam; asynchronous workers and servers as processes of
this machine. Both libraries' clusters of a size run at the same time and take turns, so
that only numbers of one row are compared; the one that waits is idle.

    python benchmarks/parameter_servers.py --peer-python /path/to/venv/bin/python

The peers' Python needs tensorflow and tf_keras; without it TensorFlow is left out. What
the servers' messages cost alone is measured by `flight_round_trip.py`.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--peer-python", help="a Python that has tensorflow and tf_keras")
parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=40, help="steps of all in one timing")
parser.add_argument("--limit-seconds", type=float, default=300.0)
options = parser.parse_args()
HERE = Path(__file__).parent / "peers"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [s.getsockname()[1] for s in sockets]


class Cluster:
    """The processes of one library.

    Args:
        python: The interpreter.
        script: What every task runs.
        jobs: Number of tasks by job.
        trainers: The job whose tasks read how many steps to do.
    """

    def __init__(
        self, python: str, script: str, jobs: dict[str, int], trainers: str
    ) -> None:
        self.steps_per_second: list[float] = []
        self.cpu_ms: list[float] = []
        self.loss = float("nan")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it.
        ports = iter(free_ports(sum(jobs.values())))
        cluster = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for job, count in jobs.items()
        }
        token = secrets.token_urlsafe(32)
        tasks = [(job, i) for job, count in jobs.items() for i in range(count)]
        self._processes = {
            task: self._start(python, script, cluster, task, token) for task in tasks
        }
        self._trainers = [task for task in tasks if task[0] == trainers]
        self._lines: dict[tuple[str, int], queue.Queue[str | None]] = {}
        for task in self._trainers:
            self._lines[task] = queue.Queue()
            threading.Thread(target=self._listen, args=(task,), daemon=True).start()

    def _start(
        self,
        python: str,
        script: str,
        cluster: dict[str, list[str]],
        task: tuple[str, int],
        token: str,
    ) -> "subprocess.Popen[str]":
        job, index = task
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        env = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "REPLICAX_PS_TOKEN": token,
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
        }
        return subprocess.Popen(
            [python, str(HERE / script)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def _listen(self, task: tuple[str, int]) -> None:
        for line in self._processes[task].stdout or ():
            self._lines[task].put(line)
        self._lines[task].put(None)

    def _read(self, task: tuple[str, int], word: str) -> str:
        end = time.monotonic() + options.limit_seconds
        while True:
            try:
                line = self._lines[task].get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(
                    f"{task}: no {word!r} in time{self._tail()}"
                ) from None
            if line is None:
                raise RuntimeError(f"{task} ended before {word!r}{self._tail()}")
            if line.startswith(word):
                return line

    def _tail(self) -> str:
        self._log.seek(0)
        return "\n" + self._log.read()[-3000:]

    def wait_until_ready(self) -> None:
        """Wait for all tasks that train."""
        for task in self._trainers:
            self._read(task, "ready")

    def train(self, steps: int) -> None:
        """Have so many steps done by all together, and note how long it took."""
        begin, cpu = time.perf_counter(), self._cpu_seconds()
        for task in self._trainers:
            stdin = self._processes[task].stdin
            assert stdin is not None
            stdin.write(f"{steps}\n")
            stdin.flush()
        answers = [self._read(task, "took") for task in self._trainers]
        self.loss = float(answers[0].split()[2])
        self.steps_per_second.append(steps / (time.perf_counter() - begin))
        self.cpu_ms.append(1000 * (self._cpu_seconds() - cpu) / steps)

    def forget(self) -> None:
        """Begin to measure anew."""
        self.steps_per_second.clear()
        self.cpu_ms.clear()

    def _cpu_seconds(self) -> float:
        """What all processes have used of all cores until now."""
        ticks = 0
        for process in self._processes.values():
            text = Path(f"/proc/{process.pid}/stat").read_text()
            user, system = text.rpartition(")")[2].split()[11:13]
            ticks += int(user) + int(system)
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._log.close()


def measure(num_workers: int, num_servers: int) -> dict[str, Cluster]:
    """Rounds in which the libraries' clusters of that size take turns."""
    jobs = {"worker": num_workers, "ps": num_servers}
    found: dict[str, Cluster] = {}
    with contextlib.ExitStack() as stack:

        def start(library: str, *arguments: Any) -> None:
            found[library] = Cluster(*arguments)
            stack.callback(found[library].close)

        start("replicax", sys.executable, "ps_replicax_peer.py", jobs, "worker")
        if options.peer_python:
            # TensorFlow's chief does not train: it tells the workers what to do.
            jobs = {"chief": 1, **jobs}
            start("TensorFlow", options.peer_python, "ps_tf_peer.py", jobs, "chief")
        for cluster in found.values():
            cluster.wait_until_ready()
            for _ in range(2):  # Compile, on every worker.
                cluster.train(max(4 * num_workers, options.steps // 2))
            cluster.forget()
        for _ in range(options.rounds):
            for cluster in found.values():
                cluster.train(options.steps)
    return found


def main() -> None:
    """Print a Markdown table, one row for each size."""
    load = os.getloadavg()[0]
    print(f"{CORES} cores, load {load:.1f} before the first row", file=sys.stderr)
    print(
        "| workers | servers | replicax, steps/s | TensorFlow, steps/s "
        "| ratio (min to max) | CPU ms per step | losses |"
    )
    print("|---|---|---|---|---|---|---|")
    for num_workers, num_servers in itertools.product(options.workers, options.servers):
        found = measure(num_workers, num_servers)
        ours, theirs = found["replicax"], found.get("TensorFlow", found["replicax"])
        pairs = zip(ours.steps_per_second, theirs.steps_per_second, strict=True)
        ratios = sorted(a / b for a, b in pairs)
        row = [
            str(num_workers),
            str(num_servers),
            f"{median(ours.steps_per_second):.2f}",
            f"{median(theirs.steps_per_second):.2f}",
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{median(ours.cpu_ms):.0f}, {median(theirs.cpu_ms):.0f}",
            f"{ours.loss:.2f}, {theirs.loss:.2f}",
        ]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
