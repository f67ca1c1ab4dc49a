"""The picture of a plan: what a step is made of, and how it scales."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax._util.units import seconds
from replicax.planning.roofline import StepTime
from replicax.planning.types import Scale

__all__ = ["draw"]

_INK = "#1f2933"
_COLORS = {
    "compute": "#2f6fab",
    "memory": "#d98b2b",
    "communication": "#b23a48",
    "step": "#52606d",
}


def draw(
    path: str | Path,
    *,
    title: str,
    time: StepTime,
    limit: str,
    scaling: Sequence[Scale],
    here: tuple[str, int],
) -> None:
    """Draw a plan to a file whose ending says the format.

    Args:
        path: The file.
        title: What is above the picture.
        time: Of a step.
        limit: What limits it.
        scaling: Efficiencies by number of devices; without any only times are drawn.
        here: Name of the hardware, and its number of devices.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plan: drawing needs matplotlib. Install it with: "
            "pip install 'replicax[plan]'"
        ) from error
    with mpl.rc_context({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK}):
        columns = 2 if scaling else 1
        figure = Figure(figsize=(5.2 * columns, 3.6), layout="constrained", dpi=160)
        axes = figure.subplots(1, columns, squeeze=False)[0]
        _draw_times(axes[0], time, limit)
        if scaling:
            _draw_scaling(axes[1], scaling, here)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path)


def _draw_times(ax: Any, time: StepTime, limit: str) -> None:
    values = {
        "compute": time.compute,
        "memory": time.memory,
        "communication": time.links + time.network,
        "step": time.total,
    }
    labels = {
        "compute": "compute",
        "memory": "memory traffic",
        "communication": "communication",
        "step": "step",
    }
    longest = max(values.values()) or 1.0
    for row, (name, value) in enumerate(values.items()):
        ax.barh(row, value / longest, color=_COLORS[name], height=0.6)
        ax.text(value / longest + 0.02, row, seconds(value), va="center")
    ax.set_yticks(range(len(values)), [labels[name] for name in values])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3)
    ax.set_xticks([])
    ax.set_title(f"One step. First limit: {limit}", size=9)
    ax.set_xlabel(
        "step = the longer one of compute and memory traffic,\n"
        "and the communication that computation does not hide"
    )
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)


def _draw_scaling(ax: Any, scaling: Sequence[Scale], here: tuple[str, int]) -> None:
    name, num_devices = here
    sizes = [s.num_devices for s in scaling]
    percent = [100 * s.efficiency for s in scaling]
    ax.plot(sizes, percent, marker="o", markersize=4, color=_COLORS["compute"])
    own = sizes.index(num_devices)
    ax.plot(
        sizes[own],
        percent[own],
        marker="o",
        markersize=9,
        fillstyle="none",
        color=_COLORS["communication"],
        linestyle="none",
        label=f"{name}: {percent[own]:.1f} %",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{s.num_devices}\n{s.hardware}" for s in scaling])
    ax.set_ylim(0, 105)
    ax.set_ylabel("efficiency, %")
    ax.set_xlabel("devices, and how they lie; same batch on each")
    ax.grid(axis="y", color="#e4e7eb")
    ax.legend(frameon=False, loc="lower left")
    ax.set_title("Predicted weak scaling", size=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
