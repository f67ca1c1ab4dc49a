"""Step time of two one-core workers: replicax, bare JAX, torch DDP and TensorFlow.

Every peer is a pair of processes, each pinned to a core of its own. They take turns
within each round, so that only ratios within one round are compared; a peer that waits
for its turn is idle. One-worker cases show the scaling.

    python benchmarks/two_workers.py --peer-python /path/to/venv/bin/python

The peers' Python needs torch, tensorflow and tf_keras; without it they are left out.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--peer-python", help="a Python that has torch and tensorflow")
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--steps", type=int, default=10, help="steps in one timing")
parser.add_argument("--limit-seconds", type=float, default=120.0)
options = parser.parse_args()
HERE = Path(__file__).parent / "peers"


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Peer:
    """The processes of one case.

    Args:
        name: What the table calls it.
        python: The interpreter.
        script: The peer's script and its arguments.
        world: Number of workers.
        batch: The global batch.
    """

    def __init__(
        self, name: str, python: str, script: list[str], world: int, batch: int = 256
    ) -> None:
        self.name = name
        self.batch = batch
        self.times: list[float] = []
        addresses = [f"localhost:{free_port()}" for _ in range(world)]
        self._processes = [
            self._start(python, script, addresses, rank, batch) for rank in range(world)
        ]
        for process in self._processes:
            self._read(process, "ready")

    @staticmethod
    def _start(
        python: str, script: list[str], addresses: list[str], rank: int, batch: int
    ) -> "subprocess.Popen[str]":
        world = len(addresses)
        task = {"type": "worker", "index": rank}
        config = {"cluster": {"worker": addresses}, "task": task}
        env = {
            **os.environ,
            "BENCH_RANK": str(rank),
            "BENCH_WORLD": str(world),
            "BENCH_BATCH": str(batch),
            "BENCH_ADDRESS": addresses[0],
            "TF_CONFIG": json.dumps(config) if world > 1 else "",
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        command = ["taskset", "-c", str(rank), python, str(HERE / script[0])]
        return subprocess.Popen(
            [*command, *script[1:]],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @staticmethod
    def _read(process: "subprocess.Popen[str]", word: str) -> str:
        for line in process.stdout or ():
            if line.startswith(word):
                return line
        raise RuntimeError(f"{process.args}: ended with {process.wait()}")

    def train(self, steps: int) -> tuple[float, float]:
        """Do so many steps; returns seconds per step and the last loss."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        answers = [self._read(p, "took").split() for p in self._processes]
        return float(answers[0][1]) / steps, float(answers[0][2])

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=options.limit_seconds)
            except subprocess.TimeoutExpired:
                process.kill()


def start_peers() -> list[Peer]:
    """All cases that can be run here."""
    here, there = sys.executable, options.peer_python
    wanted = [
        ("bare JAX, 2 workers", here, ["jax_peer.py"], 2, 256),
        ("replicax run, 2 workers", here, ["replicax_peer.py", "run"], 2, 256),
        ("replicax fit, 2 workers", here, ["replicax_peer.py", "fit"], 2, 256),
        ("torch DDP, 2 workers", there, ["torch_peer.py"], 2, 256),
        ("TF MultiWorkerMirrored, 2 workers", there, ["tf_peer.py"], 2, 256),
        ("bare JAX, 1 worker", here, ["jax_peer.py"], 1, 256),
        ("replicax fit, 1 worker", here, ["replicax_peer.py", "fit"], 1, 256),
        ("replicax fit, 2 w., batch 512", here, ["replicax_peer.py", "fit"], 2, 512),
        ("torch, 1 worker", there, ["torch_peer.py"], 1, 256),
    ]
    peers = []
    for name, python, script, world, batch in wanted:
        if python is None:
            print(f"left out: {name} (no --peer-python)", file=sys.stderr)
            continue
        try:
            peers.append(Peer(name, python, script, world, batch))
        except RuntimeError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    return peers


def main() -> None:
    """Run the rounds and print a Markdown table."""
    peers = start_peers()
    losses = {}
    for peer in peers:
        peer.train(2)  # Compile.
    for _ in range(options.rounds):
        for peer in peers:
            seconds, losses[peer.name] = peer.train(options.steps)
            peer.times.append(seconds)
    reference = peers[0]
    print("| case | ms per step | ratio to bare JAX, 2 workers (min to max) | loss |")
    print("|---|---|---|---|")
    for peer in peers:
        pairs = zip(peer.times, reference.times, strict=True)
        ratios = sorted(a / b for a, b in pairs)
        middle = statistics.median(ratios)
        ms = 1000 * statistics.median(peer.times)
        print(
            f"| {peer.name} | {ms:.1f} | {middle:.3f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {losses[peer.name]:.6f} |"
        )
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
