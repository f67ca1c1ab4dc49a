"""Real workers and servers on this machine beside the simulation of them.

Clusters of one to four workers take turns. A worker's step is a small one on the cores
and a sleep, which stands for an accelerator. Before each round the service times are
measured anew, and the work of a step is that of the cluster of one worker. During each
turn short bursts of work find out how much other programs are in the way, and the
simulation has as many threads; so both are about the same moment of the same machine.

    python benchmarks/ps_validation.py --rounds 5
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import time
from statistics import mean, median

from ps_cluster import Cluster
from ps_model import Job, Times
from ps_service_times import measured
from ps_simulation import simulate

CORES = len(os.sched_getaffinity(0))
_PROBE_SECONDS = 0.005  # As long as most of what makes a step takes.
_PROBE_EVERY_SECONDS = 0.3


class Others:
    """How many threads of other programs a burst of work finds, while a block runs.

    They are not counted: a scheduler lets a thread that has slept go first for a while.
    What a short burst takes says what they are worth.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._found = cluster, list[float]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def __enter__(self) -> "Others":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def number(self) -> float:
        """On average."""
        return max(0.0, mean(self._found or [0.0]))

    def _probe(self) -> None:
        while not self._ended.wait(_PROBE_EVERY_SECONDS):
            ours = self._cluster.num_runnable()
            wall, cpu = time.perf_counter(), time.thread_time()
            while time.thread_time() - cpu < _PROBE_SECONDS:
                pass
            slower = (time.perf_counter() - wall) / _PROBE_SECONDS
            # With n threads each gets a share of cores / n, at most all of one.
            self._found.append(max(0.0, CORES * slower - 1 - ours))


@dataclasses.dataclass
class Turn:
    """What a cluster did in one turn."""

    updates: float
    staleness: float
    others: float
    worker_cpu: float
    server_cpu: float


def turn(cluster: Cluster, workers: int, steps: int) -> Turn:
    """Have a cluster do its steps."""
    before = cluster.cpu_seconds()
    with Others(cluster) as others:
        said = cluster.train(steps)
    spent = {task: x - before[task] for task, x in cluster.cpu_seconds().items()}
    _, _, begins, ends, staleness = zip(*said, strict=True)
    seconds = max(ends) - min(begin for begin in begins if begin)

    def cpu(job: str) -> float:
        return sum(x for (name, _), x in spent.items() if name == job) / steps

    return Turn(steps / seconds, staleness[0], others.number, cpu("worker"), cpu("ps"))


def with_step(times: Times, alone: Turn, num_bytes: int) -> Times:
    """The times with a step's own work: of one worker what messages do not explain."""
    messages = (
        times.call_client
        + times.message_client
        + (times.send_client + times.receive_client) * num_bytes
    )
    return dataclasses.replace(times, step=max(0.0, alone.worker_cpu - messages))


def main() -> None:
    """Print a Markdown table, one row for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=20, help="of each worker in a turn"
    )
    parser.add_argument(
        "--most-others",
        type=float,
        default=4.0,
        help="leave out turns with more threads of other programs: what a scheduler "
        "does with many is not simulated",
    )
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    width = options.width
    num_bytes = 4 * (784 * width + width + width * width + width + width * 10 + 10)
    env = {
        "BENCH_WIDTH": str(width),
        "BENCH_BATCH": str(options.batch),
        "BENCH_DEVICE_SECONDS": str(options.step_seconds),
    }
    rows: dict[int, list[tuple[Turn, float, float]]] = {n: [] for n in options.workers}
    with contextlib.ExitStack() as stack:
        clusters = {}
        for workers in options.workers:
            cluster = Cluster(
                sys.executable,
                "ps_replicax_peer.py",
                {"worker": workers, "ps": options.servers},
                "worker",
                limit_seconds=600,
                env=env,
            )
            stack.callback(cluster.close)
            cluster.wait_until_ready()
            cluster.train(20 * workers)  # Compile.
            clusters[workers] = cluster
            print(f"{workers} workers are ready", file=sys.stderr, flush=True)
        for _ in range(options.rounds):
            times = measured(num_bytes / 1e6, 12, shares_memory=True)
            turns = {
                n: turn(cluster, n, options.steps * n)
                for n, cluster in clusters.items()
            }
            alone = turns[min(turns)]
            whole = with_step(times, alone, num_bytes)
            for workers, real in turns.items():
                job = Job(
                    workers=workers,
                    servers=options.servers,
                    bytes=num_bytes,
                    step_seconds=options.step_seconds,
                    jitter=0.0,
                    cores=CORES,
                    one_machine=True,
                    others=real.others,
                )
                found = simulate(job, whole, rounds=options.steps)
                rows[workers].append((real, found.updates, found.staleness))
                print(workers, rows[workers][-1], file=sys.stderr, flush=True)
    print(
        "| workers | turns | real updates/s | simulated | ratio (min to max) "
        "| real staleness | simulated | others' threads |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for workers, found in rows.items():
        quiet = [row for row in found if row[0].others <= options.most_others]
        if not quiet:
            print(f"| {workers} | 0 of {len(found)} |" + " |" * 6)
            continue
        real, updates, staleness = (list(x) for x in zip(*quiet, strict=True))
        ratios = sorted(u / t.updates for t, u in zip(real, updates, strict=True))
        cells = [
            f"{workers}",
            f"{len(quiet)} of {len(found)}",
            f"{median(t.updates for t in real):.2f}",
            f"{median(updates):.2f}",
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{median(t.staleness for t in real):.2f}",
            f"{median(staleness):.2f}",
            f"{median(t.others for t in real):.1f}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
