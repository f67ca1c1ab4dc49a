"""Measurements as pictures."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.entries import LAYOUTS

__all__ = ["colour_of", "draw", "panels_of"]

_COLOURS = {
    "replicax": "#1565c0",
    "bare": "#90a4ae",
    "jax.jit": "#90a4ae",
    "Keras": "#c62828",
    "TF": "#ef6c00",
    "torch": "#6a1b9a",
}


def draw(groups: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw step times for each layout that was measured.

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
        return [
            _draw_steps(chosen, title, folder / f"step_time_{layout}.png")
            for layout, title in LAYOUTS.items()
            if (chosen := [g for g in groups if g["layout"] == layout])
        ]


def _draw_steps(groups: list[Mapping[str, Any]], title: str, path: Path) -> Path:
    """One panel for each case; bars are medians, with lowest and highest."""
    groups = sorted(groups, key=lambda g: g["case"])
    figure, panels = panels_of(len(groups), 3)
    for group, panel in zip(groups, panels, strict=False):
        times = {
            name: [1000 * s for s in entry["seconds"]]
            for name, entry in group["entries"].items()
        }
        middles = [statistics.median(t) for t in times.values()]
        below = [m - min(t) for m, t in zip(middles, times.values(), strict=True)]
        above = [max(t) - m for m, t in zip(middles, times.values(), strict=True)]
        places = range(len(times))
        panel.barh(
            places,
            middles,
            xerr=(below, above),
            color=[colour_of(name) for name in times],
            error_kw={"elinewidth": 0.8, "ecolor": "#37474f"},
        )
        panel.set_yticks(places, list(times))
        panel.invert_yaxis()
        name = textwrap.fill(f"({group['case']}) {group['title']}", 36)
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("ms per step")
    figure.suptitle(f"Step time, {title}", x=0.01, ha="left")
    return _save(figure, path)


def panels_of(count: int, most: int) -> tuple[Any, list[Any]]:
    """A figure with this many panels, at most `most` of them in a row."""
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
