"""Parameter servers with up to thousands of workers, simulated on one core.

`ps_model.py` says what is simulated, and which code is the real one.

    python benchmarks/ps_service_times.py > times.json
    python benchmarks/ps_simulation.py times.json --figure scale.png

A row is one job: each worker computes a step on an accelerator of its own, pushes to
all servers, and waits for the new values (with `--overlap` it computes the next step
meanwhile). Each has a machine of its own.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from ps_model import Cluster, Job, Times

_LOOK_SECONDS = 0.05
_WARM_ROUNDS = 4  # Steps of each worker before the measurement.


@dataclasses.dataclass(frozen=True)
class Found:
    """What a job does in a second, and how busy its parts are.

    Attributes:
        updates: Of all workers.
        staleness: Updates between a gradient's values and its own, on average.
        load: The share of the time that each part is in use.
    """

    updates: float
    staleness: float
    load: dict[str, float]

    @property
    def busiest(self) -> str:
        """What is in use most."""
        return max(self.load, key=lambda name: self.load[name])


def simulate(
    job: Job,
    times: Times,
    *,
    rounds: int = 4,
    limit: float = 1e4,
) -> Found:
    """Run a job, and look at it once it is under way.

    Args:
        job: What is simulated.
        times: The service times.
        rounds: Steps of each worker, on average, during which it is looked at.
        limit: At most so many simulated seconds each.

    Raises:
        RuntimeError: If workers make no steps.
    """
    cluster = Cluster(job, times)
    cluster.start()

    def run(rounds: int) -> None:
        goal = sum(worker.steps for worker in cluster.workers) + rounds * job.workers
        end = cluster.world.now + limit
        while sum(worker.steps for worker in cluster.workers) < goal:
            if cluster.world.now > end:
                raise RuntimeError(f"{job}: no {goal} steps in {limit:g} s")
            cluster.world.run(cluster.world.now + _LOOK_SECONDS)

    run(_WARM_ROUNDS)
    before, began = _counters(cluster), cluster.world.now
    run(rounds)
    seconds = cluster.world.now - began
    spent = {name: x - before[name] for name, x in _counters(cluster).items()}
    steps, pushes, stale = (spent.pop(name) for name in ("steps", "pushes", "stale"))
    load = {name: value / seconds for name, value in spent.items()}
    return Found(steps / seconds, stale / max(1.0, pushes), load)


def _counters(cluster: Cluster) -> dict[str, float]:
    job, first = cluster.job, cluster.servers[0]

    def card(machine: Any) -> float:
        return max(machine.sends.used, machine.receives.used) / machine.card_bytes

    return {
        "a worker's card": card(cluster.workers[0].machine),
        "a server's card": max(card(server.machine) for server in cluster.servers),
        "a server's cores": first.machine.cores.used / job.cores,
        "a server's updates": cluster.servers[-1].updates_used,
        "a server's interpreter": cluster.servers[-1].python_used,
        "server 0's interpreter": first.python_used,
        "board": first.board_used,
        "steps": sum(worker.steps for worker in cluster.workers),
        "pushes": cluster.staleness.total(),
        "stale": sum(k * n for k, n in cluster.staleness.items()),
    }


def draw(rows: list[tuple[Job, Found]], path: Path) -> None:
    """A picture: updates per second, staleness and the board's load."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    shown = {
        "updates per second": lambda found: found.updates,
        "mean staleness": lambda found: found.staleness,
        "board: share of one core": lambda found: found.load["board"],
    }
    for ax, (title, value) in zip(axes, shown.items(), strict=True):
        for servers in sorted({job.servers for job, _ in rows}):
            line = [
                (job.workers, value(f)) for job, f in rows if job.servers == servers
            ]
            label = "1 server" if servers == 1 else f"{servers} servers"
            ax.plot(*zip(*line, strict=True), "o-", ms=3, label=label)
        ax.set(title=title, xlabel="workers", xscale="log", yscale="log")
        ax.grid(alpha=0.3)
    axes[0].plot(
        *zip(*{(j.workers, j.workers / j.step_seconds) for j, _ in rows}, strict=True),
        "k+",
        label="no waiting",
    )
    axes[2].axhline(0.5, color="k", lw=0.8, ls=":")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print a Markdown table, one row for each job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("times", type=Path, help="what ps_service_times.py printed")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--megabytes", type=float, default=100.0, help="of the model")
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--gigabits", type=float, default=25.0, help="of each card")
    parser.add_argument("--latency-us", type=float, default=50.0, help="one way")
    parser.add_argument("--cores", type=int, default=16, help="of each machine")
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--figure", type=Path, help="where to draw it, such as a.png")
    options = parser.parse_args()
    times = Times(**json.loads(options.times.read_text()))
    print("| workers | servers | updates/s | of most | staleness | busiest | board |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for workers, servers in itertools.product(options.workers, options.servers):
        job = Job(
            workers=workers,
            servers=servers,
            bytes=options.megabytes * 1e6,
            step_seconds=options.step_seconds,
            max_staleness=options.max_staleness,
            overlap=options.overlap,
            cores=options.cores,
            gigabits=options.gigabits,
            latency=options.latency_us * 1e-6,
        )
        found = simulate(job, times, rounds=options.rounds)
        rows.append((job, found))
        cells = [
            str(workers),
            str(servers),
            f"{found.updates:.1f}",
            f"{found.updates * job.step_seconds / workers:.2f}",
            f"{found.staleness:.1f}",
            f"{found.busiest} {found.load[found.busiest]:.0%}",
            f"{found.load['board']:.3f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
