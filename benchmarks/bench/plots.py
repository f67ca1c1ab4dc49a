"""Measurements as pictures."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.entries import LAYOUTS
from bench.tables import comparable

__all__ = ["colour_of", "draw"]

_COLOURS = {
    "replicax": "#1565c0",
    "bare": "#90a4ae",
    "Keras": "#c62828",
    "TF": "#ef6c00",
    "torch": "#6a1b9a",
}


def draw(groups: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw step times for each layout and, where it was measured, scaling.

    Args:
        groups: What `measure` returned, of one or several groups.
        folder: Where PNG files are written.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    import matplotlib

    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        files = [
            _draw_steps(chosen, title, folder / f"step_time_{layout}.png")
            for layout, title in LAYOUTS.items()
            if (chosen := [g for g in groups if g["layout"] == layout])
        ]
        scaling = [g for g in groups if g["layout"] == "processes"]
        if scaling:
            files.append(_draw_scaling(scaling, folder / "scaling.png"))
    return files


def _draw_steps(groups: list[Mapping[str, Any]], title: str, path: Path) -> Path:
    """One panel for each case; bars are medians, with lowest and highest."""
    groups = sorted(groups, key=lambda g: g["case"])
    figure, panels = _panels(len(groups), 3)
    for group, panel in zip(groups, panels, strict=False):
        alike = {
            name: [1000 * s for s in entry["seconds"]]
            for name, entry in comparable(group).items()
        }
        middles = [statistics.median(times) for times in alike.values()]
        below = [m - min(t) for m, t in zip(middles, alike.values(), strict=True)]
        above = [max(t) - m for m, t in zip(middles, alike.values(), strict=True)]
        places = range(len(alike))
        panel.barh(
            places,
            middles,
            xerr=(below, above),
            color=[colour_of(name) for name in alike],
            error_kw={"elinewidth": 0.8, "ecolor": "#37474f"},
        )
        panel.set_yticks(places, list(alike))
        panel.invert_yaxis()
        name = textwrap.fill(f"({group['case']}) {group['title']}", 36)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("ms per step")
    figure.suptitle(f"Step time, {title}", x=0.01, ha="left")
    return _save(figure, path)


def _draw_scaling(groups: list[Mapping[str, Any]], path: Path) -> Path:
    """Examples per second of two one-core processes in multiples of one's."""
    groups = sorted(groups, key=lambda g: g["case"])
    figure, panels = _panels(2, 2)
    kinds = (
        ("the same global batch", {"replicax fit": "", "torch DDP": ""}, 1),
        ("twice the batch", {"replicax fit": ", twice the batch",
                             "torch DDP": ", twice the batch"}, 2),
    )  # fmt: skip
    for panel, (title, names, batches) in zip(panels, kinds, strict=False):
        for i, (name, suffix) in enumerate(names.items()):
            one = f"{name.removesuffix(' DDP')}, 1 process"
            pairs = [
                (g["case"], g["entries"][one], g["entries"][name + suffix])
                for g in groups
                if one in g["entries"] and name + suffix in g["entries"]
            ]
            heights = [
                batches
                * statistics.median(
                    a / b for a, b in zip(e1["seconds"], e2["seconds"], strict=True)
                )
                for _, e1, e2 in pairs
            ]
            places = [j + 0.4 * i for j in range(len(pairs))]
            panel.bar(places, heights, 0.38, color=colour_of(name), label=name)
            panel.set_xticks(
                [j + 0.2 for j in range(len(pairs))], [f"({c})" for c, *_ in pairs]
            )
        panel.axhline(2, color="#607d8b", linewidth=0.8, linestyle="--")
        panel.set_ylim(0, 2.6)
        panel.set_title(title, loc="left")
        panel.set_ylabel("examples/s, of one process")
    panels[0].legend(loc="upper left", ncols=2)
    figure.suptitle("From one one-core process to two", x=0.01, ha="left")
    return _save(figure, path)


def _panels(count: int, most: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(count, most)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels


def colour_of(name: str) -> str:
    """The colour of an entry, by its library."""
    return _COLOURS[name.split()[0]]


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
