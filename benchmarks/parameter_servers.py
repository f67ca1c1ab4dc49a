"""Steps per second on parameter servers: replicax and TensorFlow, the same model.

An MLP, 784-2048-2048-10, or a small CNN; batches of 256, Adam. Or an embedding of 4,096
ids a batch, whose table has 5,000,000 rows of 16; Adagrad. Asynchronous workers and
servers are processes of this machine. Both libraries' clusters of a size run at the
same time and take turns, so that only numbers of one row are compared; the one that
waits is idle. Each row's clusters are started several times.

    python benchmarks/parameter_servers.py --peer-python /path/to/venv/bin/python

The peers' Python needs tensorflow and tf_keras; without it TensorFlow is left out. What
the servers' messages cost alone is measured by `flight_round_trip.py`.

With `--gbit RATE` each task has a network namespace of its own with a link of that rate
(`network_namespaces.py`), and workers share no memory with servers, as on machines of
their own. This needs Linux, root and iproute2.
"""

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterable
from statistics import median
from typing import Any

from network_namespaces import network, require_tools
from ps_cluster import Cluster

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--peer-python", help="a Python that has tensorflow and tf_keras")
parser.add_argument("--model", choices=["mlp", "cnn", "embedding"], default="mlp")
parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
parser.add_argument("--starts", type=int, default=3, help="of each cluster")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=40, help="steps of all in one timing")
parser.add_argument("--limit-seconds", type=float, default=300.0)
parser.add_argument("--gbit", type=float, help="Gbit/s of each task's own link")
options = parser.parse_args()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def measure(num_workers: int, num_servers: int) -> dict[str, Cluster]:
    """One start of the libraries' clusters of that size, and rounds in turns."""
    jobs = {"worker": num_workers, "ps": num_servers}
    found: dict[str, Cluster] = {}
    with contextlib.ExitStack() as stack:
        chiefs = 1 if options.peer_python else 0
        hosts = (
            stack.enter_context(network(chiefs + sum(jobs.values()), options.gbit))
            if options.gbit
            else ()
        )

        def start(library: str, *arguments: Any) -> None:
            found[library] = Cluster(
                *arguments,
                limit_seconds=options.limit_seconds,
                env={
                    "BENCH_MODEL": options.model,
                    "BENCH_NO_SHARED_MEMORY": "1" if hosts else "",
                },
                hosts=hosts[: sum(jobs.values())],
            )
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
    if options.gbit:
        require_tools()
    load = os.getloadavg()[0]
    print(f"{CORES} cores, load {load:.1f} before the first row", file=sys.stderr)
    print(
        "| workers | servers | replicax, steps/s | TensorFlow, steps/s "
        "| ratio (min to max) | CPU ms per step | losses |"
    )
    print("|---|---|---|---|---|---|---|")
    for num_workers, num_servers in itertools.product(options.workers, options.servers):
        starts = [measure(num_workers, num_servers) for _ in range(options.starts)]
        ours = [start["replicax"] for start in starts]
        theirs = [start.get("TensorFlow", start["replicax"]) for start in starts]
        ratios = sorted(
            a / b
            for mine, other in zip(ours, theirs, strict=True)
            for a, b in zip(mine.steps_per_second, other.steps_per_second, strict=True)
        )
        row = [
            str(num_workers),
            str(num_servers),
            *(
                f"{median_of(c.steps_per_second for c in x):.2f}"
                for x in (ours, theirs)
            ),
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            ", ".join(f"{median_of(c.cpu_ms for c in x):.0f}" for x in (ours, theirs)),
            ", ".join(f"{median(c.loss for c in x):.2f}" for x in (ours, theirs)),
        ]
        print("| " + " | ".join(row) + " |", flush=True)


def median_of(timings: Iterable[list[float]]) -> float:
    """The median of all starts' timings."""
    return median(itertools.chain.from_iterable(timings))


if __name__ == "__main__":
    main()
