"""Loss curves on parameter servers: replicax and TensorFlow, the same model.

Both libraries' clusters take turns, some updates each, from the same initial weights,
which each seed draws anew. Counted are the mean loss of the updates of a turn, the time
that turns took until the loss was below a target, and the staleness: how many updates
of others came between the values that a gradient is of and its own.

    python benchmarks/ps_convergence.py --peer-python /path/to/venv/bin/python \\
        --data fashion_mnist.npz --figure docs/figures/ps_convergence.png

The data are an `.npz` file as `keras.datasets` keeps MNIST. What steps cost is measured
by `parameter_servers.py`.
"""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from ps_cluster import Cluster

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--peer-python", required=True, help="has tf_keras")
parser.add_argument("--data", type=Path, required=True, help="images, as .npz")
parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
parser.add_argument("--clusters", nargs="+", default=["1/1", "2/1", "2/2", "4/2"])
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--turns", type=int, default=8)
parser.add_argument("--updates", type=int, default=40, help="in a turn")
parser.add_argument("--target", type=float, default=0.5, help="mean loss of a turn")
parser.add_argument("--max-staleness", default="", help="of replicax")
parser.add_argument("--figure", type=Path)
parser.add_argument("--limit-seconds", type=float, default=300.0)
options = parser.parse_args()
COLOURS = {"replicax": "#1565c0", "TensorFlow": "#ef6c00"}


@dataclasses.dataclass
class Curve:
    """What one cluster did: one entry of each list for a turn."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    staleness: list[float] = dataclasses.field(default_factory=list)

    def seconds_to(self, target: float) -> float:
        """Training time until a turn's mean loss was below the target; or infinite."""
        # The first turn has compiling in it: it counts as long as the second.
        seconds = [self.seconds[1], *self.seconds[1:]]
        for i, loss in enumerate(self.losses):
            if loss < target:
                return sum(seconds[: i + 1])
        return float("inf")


def trained(size: str, seed: int) -> dict[str, Curve]:
    """Both libraries' clusters of a size, trained from the weights of a seed."""
    workers, servers = map(int, size.split("/"))
    jobs = {"worker": workers, "ps": servers}
    entries = {
        "replicax": (sys.executable, "ps_replicax_peer.py", jobs, "worker"),
        "TensorFlow": (
            options.peer_python,
            "ps_tf_peer.py",
            {"chief": 1, **jobs},
            "chief",
        ),
    }
    env = {
        "BENCH_MODEL": options.model,
        "BENCH_DATA": str(options.data.resolve()),
        "BENCH_SEED": str(seed),
        "BENCH_MAX_STALENESS": options.max_staleness,
    }
    curves = {name: Curve() for name in entries}
    with contextlib.ExitStack() as stack:
        clusters = {
            name: Cluster(*entry, limit_seconds=options.limit_seconds, env=env)
            for name, entry in entries.items()
        }
        for cluster in clusters.values():
            stack.callback(cluster.close)
        for cluster in clusters.values():
            cluster.wait_until_ready()
        for _ in range(options.turns):
            for name, cluster in clusters.items():
                answers = cluster.train(options.updates)
                curves[name].seconds.append(max(answer[0] for answer in answers))
                curves[name].losses.append(answers[0][1])
                curves[name].staleness.append(answers[0][4])
    return curves


def spread(values: list[float]) -> str:
    """The median, lowest and highest."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def mean_staleness(seeds: list[dict[str, Curve]]) -> dict[str, float]:
    """The mean staleness of each library, of all turns of all seeds."""
    return {n: mean(x for s in seeds for x in s[n].staleness) for n in COLOURS}


def title(size: str) -> str:
    """A cluster's size in words, such as "2 workers, 1 server"."""
    pairs = zip(size.split("/"), ("worker", "server"), strict=True)
    return ", ".join(f"{n} {what}{'s' * (n != '1')}" for n, what in pairs)


def draw(found: dict[str, list[dict[str, Curve]]], path: Path) -> None:
    """A panel for each size of cluster: medians, with lowest and highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, panels = plt.subplots(
            1, len(found), figsize=(3 * len(found), 2.8), sharey=True, squeeze=False
        )
        for (size, seeds), panel in zip(found.items(), panels[0], strict=True):
            for name, colour in COLOURS.items():
                losses = list(zip(*(s[name].losses for s in seeds), strict=True))
                steps = [options.updates * (i + 1) for i in range(len(losses))]
                panel.plot(steps, list(map(median, losses)), color=colour, label=name)
                lows, highs = list(map(min, losses)), list(map(max, losses))
                panel.fill_between(steps, lows, highs, color=colour, alpha=0.2, lw=0)
            stale = ", ".join(f"{x:.2f}" for x in mean_staleness(seeds).values())
            panel.set_title(f"{title(size)}\nmean staleness {stale}", fontsize=9)
            panel.set_xlabel("updates")
            # The first panel's scale for all: with several workers the losses of the
            # first turn are far above it.
            panel.set_ylim(bottom=0)
        panels[0][0].set_ylabel("loss")
        panels[0][0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=150)


def main() -> None:
    """Print a Markdown table, one row for each size; draw the curves."""
    print(
        "| workers | servers | loss after "
        f"{options.turns * options.updates} updates: replicax | TensorFlow "
        f"| seconds to a loss of {options.target}: replicax | TensorFlow "
        "| mean staleness |"
    )
    print("|---|---|---|---|---|---|---|")
    found: dict[str, list[dict[str, Curve]]] = {}
    for size in options.clusters:
        found[size] = [trained(size, seed) for seed in range(options.seeds)]
        row = size.split("/")
        for values in (
            lambda curve: curve.losses[-1],
            lambda curve: curve.seconds_to(options.target),
        ):
            row += [spread([values(s[name]) for s in found[size]]) for name in COLOURS]
        stale = mean_staleness(found[size]).values()
        row.append(", ".join(f"{x:.2f}" for x in stale))
        print("| " + " | ".join(row) + " |", flush=True)
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
