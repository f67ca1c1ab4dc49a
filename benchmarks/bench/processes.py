"""A peer's processes: started, told to train, ended."""

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from bench.entries import Entry
from replicax.engine.devices import cpu_pool_size
from replicax.launch.local_tasks import free_ports

__all__ = ["Answer", "Peer", "PeerError", "PeerHost", "close_all"]

# All entries of a table wait on one card, five of them JAX'. Each takes what it needs,
# but it doubles what it has when that is too little: this is where that ends, at 13 GB
# of 80. It leaves 10 GB for torch and 4 for the CUDA libraries of six processes.
_MEMORY_FRACTION = "0.165"
_FOLDER = Path(__file__).parent / "peers"


class PeerError(Exception):
    """A peer failed or did not answer in time; says what it printed last."""


@dataclass(frozen=True)
class Answer:
    """What a peer says of the steps it did.

    Attributes:
        seconds: What one step took, the slowest process'.
        cpu_seconds: Processor time of one step, all processes together.
        loss: The global loss.
        peak_bytes: The largest memory so far, of the process with the most.
        device_bytes: The same of its accelerator; 0 without one.
    """

    seconds: float
    cpu_seconds: float
    loss: float
    peak_bytes: float
    device_bytes: float = 0.0


class PeerHost(Protocol):
    """Where a process runs, if not on this machine itself."""

    @property
    def address(self) -> str:
        """The address at which other processes reach it."""
        ...

    @property
    def prefix(self) -> Sequence[str]:
        """What a command begins with to run there."""
        ...


class Peer:
    """The processes of one entry, waiting for orders.

    Args:
        entry: What runs.
        python: Its interpreter.
        case: The case's letter.
        batch: The global batch.
        limit_seconds: For each answer.
        tiny: Take small cases, on the CPU, to test the programs.
        hosts: Where each process runs; empty: on this machine.
        variables: Further environment variables.
        is_joined: Whether the processes train together. Otherwise each trains alone,
            with `batch` of its own.

    Attributes:
        entry: What runs.
        resident_bytes: Memory of a process before its model was made.
    """

    def __init__(
        self,
        entry: Entry,
        python: str,
        case: str,
        batch: int,
        limit_seconds: float,
        *,
        tiny: bool = False,
        hosts: Sequence[PeerHost] = (),
        variables: Mapping[str, str] | None = None,
        is_joined: bool = True,
    ) -> None:
        self.entry = entry
        self.resident_bytes = 0.0
        self._limit = limit_seconds
        ports = free_ports(entry.processes)
        names = [host.address for host in hosts] or ["localhost"] * entry.processes
        addresses = [f"{n}:{port}" for n, port in zip(names, ports, strict=True)]
        prefixes = [host.prefix for host in hosts] or [()] * entry.processes
        self._errors = [
            tempfile.TemporaryFile("w+")  # noqa: SIM115
            for _ in addresses
        ]
        self._processes = [
            _start(
                entry,
                [*prefixes[rank], "taskset", "--cpu-list", _cores_of(entry, rank)],
                python,
                _environment(entry, case, batch, tiny)
                | _world(addresses if is_joined else [addresses[rank]], rank)
                | dict(variables or {}),
                errors,
            )
            for rank, errors in enumerate(self._errors)
        ]
        self._texts = [b""] * entry.processes

    def wait_until_ready(self) -> None:
        """Wait for the imports.

        Raises:
            PeerError: If a process ends or does not answer in time.
        """
        self.resident_bytes = max(a["resident"] for a in self._answers())

    def train(self, steps: int) -> Answer:
        """Do so many steps.

        Raises:
            PeerError: If a process ends or does not answer in time.
        """
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # Reading says why.
                    process.stdin.write(f"{steps}\n".encode())
                    process.stdin.flush()
        answers = self._answers()
        return Answer(
            max(a["seconds"] for a in answers) / steps,
            sum(a["cpu"] for a in answers) / steps,
            answers[0]["loss"],
            max(a["peak"] for a in answers),
            max(a["device_peak"] for a in answers),
        )

    def finish(self) -> None:
        """Let the processes end by themselves."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        self.finish()
        deadline = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for stream in self._errors:
            stream.close()

    def _answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._limit
        return [self._answer(i, deadline) for i in range(len(self._processes))]

    def _answer(self, index: int, deadline: float) -> dict[str, Any]:
        """The next line of a process that is for us."""
        stream = self._processes[index].stdout
        if stream is None:
            raise PeerError(f"{self.entry.name}: no pipe.")
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._texts[index].partition(b"\n")
                if newline:
                    self._texts[index] = rest
                    if line.startswith(b"BENCH "):
                        return json.loads(line[6:])
                    continue
                if not selector.select(deadline - time.monotonic()):
                    raise PeerError(
                        f"{self.entry.name}: process {index} did not answer within "
                        f"{self._limit:.0f} s. {self._tail(index)}"
                    )
                chunk = os.read(stream.fileno(), 65536)
                if not chunk:
                    code = self._processes[index].wait()
                    raise PeerError(
                        f"{self.entry.name}: process {index} ended with {code}. "
                        f"{self._tail(index)}"
                    )
                self._texts[index] += chunk

    def _tail(self, index: int) -> str:
        stream = self._errors[index]
        stream.seek(0)
        lines = [line for line in stream.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def close_all(peers: Sequence[Peer]) -> None:
    """End the processes of several peers, which get the same time to exit."""
    for peer in peers:
        peer.finish()
    for peer in peers:
        peer.close()


def _on_gpu() -> dict[str, str]:
    """The first GPU, shared; who sets JAX' variables of memory keeps them."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    found = {
        "BENCH_PLATFORM": "cuda",
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_VISIBLE_DEVICES": gpus.partition(",")[0],
    }
    if "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(name in os.environ for name in names):
        found["XLA_CLIENT_MEM_FRACTION"] = _MEMORY_FRACTION
    return found


def _cores_of(entry: Entry, rank: int) -> str:
    """The cores of a process, as `taskset` names them."""
    cores = sorted(os.sched_getaffinity(0))
    if entry.cores is not None:
        first = rank * entry.cores % len(cores)
        cores = cores[first : first + entry.cores]
    return ",".join(map(str, cores))


def _world(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """Variables that name the processes that train together."""
    if len(addresses) == 1:
        return {"BENCH_RANK": "0", "BENCH_WORLD": "1", "BENCH_ADDRESSES": addresses[0]}
    task = {"type": "worker", "index": rank}
    return {
        "BENCH_RANK": str(rank),
        "BENCH_WORLD": str(len(addresses)),
        "BENCH_ADDRESSES": " ".join(addresses),
        "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
    }


def _environment(entry: Entry, case: str, batch: int, tiny: bool) -> dict[str, str]:
    """Variables that all processes of an entry have."""
    environment = {
        **os.environ,
        "BENCH_CASE": case,
        "BENCH_BATCH": str(batch),
        "BENCH_LOOP": entry.loop,
        "BENCH_DEVICES": str(entry.devices),
        "BENCH_KERAS": str(entry.keras),
        "BENCH_SHARD_UPDATE": str(int(entry.shard_update)),
        "BENCH_ACCELERATED": str(int(entry.accelerated)),
        "BENCH_TINY": str(int(tiny)),
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": str(len(_cores_of(entry, 0).split(","))),
        # Every first step compiles.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "REPLICAX_COMPILATION_CACHE": "off",
        "REPLICAX_CPU": "tuned" if entry.tuned else "on",
    }
    if entry.accelerated and not tiny:
        environment |= _on_gpu()
    environment.pop("TF_CONFIG", None)
    if entry.devices > 1 and entry.script != "replicax_peer.py":
        # For those that make their own JAX devices: as many threads as we give ours.
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={entry.devices}"
        )
        environment["NPROC"] = str(cpu_pool_size(entry.devices))
    return environment


def _start(
    entry: Entry,
    prefix: Sequence[str],
    python: str,
    environment: Mapping[str, str],
    errors: IO[str],
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*prefix, python, str(_FOLDER / entry.script)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
