"""Tables and pictures of `networks.py`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plots import colour_of, panels_of

__all__ = ["draw", "rows_of", "tables"]

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """An entry of a group, over all its starts; times are in seconds.

    Attributes:
        name: The entry's name.
        steps: A step's time for each round.
        alone: The same step without communication.
        wire: The time to send the gradients.
        ratios: For each round, the step's time over the larger of both.
    """

    name: str
    steps: Sequence[float]
    alone: float
    wire: float
    ratios: Sequence[float]


def rows_of(groups: Sequence[Group]) -> Iterator[Row]:
    """The entries of one case, number of workers and rate that communicate."""
    names = dict.fromkeys(name for group in groups for name in group["entries"])
    for name in names:
        steps: list[float] = []
        alone: list[float] = []
        wires: list[float] = []
        for group in groups:
            entry = group["entries"].get(name)
            own = group["entries"].get(entry["alone"]) if entry else None
            if entry is None or own is None:
                continue  # It is alone itself, or failed.
            wire = group["wire_seconds"] / (2 if entry["compression"] else 1)
            steps += entry["seconds"]
            alone += own["seconds"]
            wires += [wire] * len(entry["seconds"])
        limits = [max(pair) for pair in zip(alone, wires, strict=True)]
        if steps:
            ratios = [a / b for a, b in zip(steps, limits, strict=True)]
            yield Row(name, steps, statistics.median(alone), wires[0], ratios)


def tables(groups: Sequence[Group]) -> str:
    """All groups as Markdown."""
    lines = []
    for together in _by_network(groups):
        first = together[0]
        link = statistics.median(g["link_gbit"] for g in together)
        trip = statistics.median(g["round_trip_ms"] for g in together)
        rounds = max(len(x["seconds"]) for x in first["entries"].values())
        lines += [
            f"({first['case']}) {first['title']}, {first['workers']} workers, "
            f"{first['gbit']:g} Gbit/s; {first['gradient_bytes'] / 1e6:.1f} MB of "
            f"gradients. Plain sockets: {link:.2f} Gbit/s each way, round trip "
            f"{trip:.2f} ms. Medians (lowest to highest) of {len(together)} starts of "
            f"{rounds} rounds of {first['steps']} steps; {first['cores']} cores.",
            "",
            "| | step, ms | alone, ms | wire, ms | step over the larger |",
            "|---|---|---|---|---|",
        ]
        for row in rows_of(together):
            lines.append(
                f"| {row.name} | {_spread([1e3 * x for x in row.steps], 0)} "
                f"| {1e3 * row.alone:.0f} | {1e3 * row.wire:.0f} "
                f"| {_spread(row.ratios, 2)} |"
            )
        reasons = {k: v for group in together for k, v in group["left_out"].items()}
        lines += ["", *(f"Left out: {k}, {v}" for k, v in reasons.items()), ""]
    return "\n".join(lines)


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draw steps and limits, a panel for each case, number of workers and rate."""
    networks = _by_network(groups)
    figure, panels = panels_of(len(networks), 2)
    for panel, together in zip(panels, networks, strict=False):
        entries = list(rows_of(together))
        middles = [1e3 * statistics.median(row.steps) for row in entries]
        limits = [1e3 * max(row.alone, row.wire) for row in entries]
        places = range(len(entries))
        panel.barh(places, middles, color=[colour_of(row.name) for row in entries])
        panel.plot(limits, places, "|", color="black", markersize=14, markeredgewidth=2)
        panel.set_yticks(places, [row.name for row in entries], fontsize=8)
        panel.invert_yaxis()
        panel.set_xlabel("ms per step", fontsize=8)
        first = together[0]
        network = f"{first['workers']} workers, {first['gbit']:g} Gbit/s"
        panel.set_title(f"{first['title']}\n{network}", loc="left", fontsize=9)
    figure.suptitle(
        "Steps; a tick is the larger of compute and wire time", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=150)


def _by_network(groups: Sequence[Group]) -> list[list[Group]]:
    together: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        key = group["workers"], group["gbit"], group["case"]
        together.setdefault(key, []).append(group)
    return [together[key] for key in sorted(together)]


def _spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
