"""Parameter servers and their workers as processes of this machine, for benchmarks."""

import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from network_namespaces import Host

__all__ = ["Cluster", "free_ports"]

HERE = Path(__file__).parent / "peers"


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
        limit_seconds: For an answer.
        env: More variables of the environment.
        hosts: Where each task runs; empty: all on this machine.
    """

    def __init__(
        self,
        python: str,
        script: str,
        jobs: dict[str, int],
        trainers: str,
        *,
        limit_seconds: float,
        env: dict[str, str] | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self._limit_seconds, self._env = limit_seconds, env or {}
        self.steps_per_second: list[float] = []
        self.cpu_ms: list[float] = []
        self.loss = float("nan")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it.
        tasks = [(job, i) for job, count in jobs.items() for i in range(count)]
        ports = free_ports(len(tasks))
        names = [host.address for host in hosts] or ["127.0.0.1"] * len(tasks)
        prefixes = [host.prefix for host in hosts] or [()] * len(tasks)
        cluster: dict[str, list[str]] = {job: [] for job in jobs}
        for (job, _), name, port in zip(tasks, names, ports, strict=True):
            cluster[job].append(f"{name}:{port}")
        token = secrets.token_urlsafe(32)
        self._processes = {
            task: self._start([*prefix, python], script, cluster, task, token)
            for task, prefix in zip(tasks, prefixes, strict=True)
        }
        self._trainers = [task for task in tasks if task[0] == trainers]
        self._lines: dict[tuple[str, int], queue.Queue[str | None]] = {}
        for task in self._trainers:
            self._lines[task] = queue.Queue()
            threading.Thread(target=self._listen, args=(task,), daemon=True).start()

    def _start(
        self,
        command: Sequence[str],
        script: str,
        cluster: dict[str, list[str]],
        task: tuple[str, int],
        token: str,
    ) -> "subprocess.Popen[str]":
        job, index = task
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        env = {
            **os.environ,
            **self._env,
            "TF_CONFIG": json.dumps(config),
            "REPLICAX_PS_TOKEN": token,
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
        }
        return subprocess.Popen(
            [*command, str(HERE / script)],
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
        end = time.monotonic() + self._limit_seconds
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

    def train(self, steps: int) -> list[list[float]]:
        """Have so many steps done by all together; what each trainer says of it."""
        begin, cpu = time.perf_counter(), sum(self.cpu_seconds().values())
        for task in self._trainers:
            stdin = self._processes[task].stdin
            assert stdin is not None
            stdin.write(f"{steps}\n")
            stdin.flush()
        answers = [self._read(task, "took") for task in self._trainers]
        self.loss = float(answers[0].split()[2])
        self.steps_per_second.append(steps / (time.perf_counter() - begin))
        spent = sum(self.cpu_seconds().values()) - cpu
        self.cpu_ms.append(1000 * spent / steps)
        return [[float(x) for x in answer.split()[1:]] for answer in answers]

    def forget(self) -> None:
        """Begin to measure anew."""
        self.steps_per_second.clear()
        self.cpu_ms.clear()

    def cpu_seconds(self) -> dict[tuple[str, int], float]:
        """What each process has used of all cores until now."""
        found = {}
        for task, process in self._processes.items():
            text = Path(f"/proc/{process.pid}/stat").read_text()
            user, system = text.rpartition(")")[2].split()[11:13]
            found[task] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return found

    def num_runnable(self) -> int:
        """Threads of all processes that run, or wait for a core."""
        count = 0
        for process in self._processes.values():
            for path in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(OSError):  # It has ended.
                    state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                    count += state == "R"
        return count

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._log.close()
