"""Draws `mechanism.svg`, the figure of `docs/architecture.md`.

python docs/figures/mechanism.py            # writes mechanism.svg beside this file
python docs/figures/mechanism.py out.png    # a preview
"""

import io
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FRAME = "#1f2933", "#52606d"
STAGE, DEVICE, VARIABLES, BATCH, SEAM = (
    "#f2f4f7",
    "#ffffff",
    "#dbe7f6",
    "#fdebd0",
    "#d8f0df",
)
REPLICAS = [(3.55, "replica 0"), (5.75, "replica 1"), (7.95, "replica R-1")]
WIDTH = 1.95


def box(ax: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    """A rounded rectangle with its lower left corner at `(x, y)`."""
    style = "round,pad=0,rounding_size=0.06"
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, fc=color, ec=FRAME, lw=1))


def text(
    ax: Axes, x: float, y: float, content: str, size: float = 9, **kw: str
) -> None:
    """Centred text, unless `kw` says otherwise."""
    settings = {"ha": "center", "va": "center", "color": INK, **kw}
    ax.text(x, y, content, fontsize=size, **settings)


def labelled(
    ax: Axes, place: tuple[float, float, float, float], color: str, content: str
) -> None:
    """A box at `place = (x, y, w, h)` with text in its middle."""
    x, y, w, h = place
    box(ax, x, y, w, h, color)
    text(ax, x + w / 2, y + h / 2, content, 8.5)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from `start` to `end`."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            lw=1.1,
            color=FRAME,
            shrinkA=0,
            shrinkB=0,
        )
    )


def stage(ax: Axes, y: float, h: float, number: int, title: str, body: str) -> None:
    """One of the three stages: its frame, and what it does, on the left."""
    box(ax, 0.1, y, 10.0, h, STAGE)
    top = y + h - 0.2
    text(ax, 0.25, top, f"{number}  {title}", 10.5, ha="left", weight="bold")
    text(ax, 0.25, top - 0.22, body, 8.5, ha="left", va="top")


def draw(ax: Axes) -> None:
    """The figure, from top to bottom as a step runs."""
    labelled(ax, (3.55, 8.0, 6.35, 0.45), DEVICE, "")
    text(ax, 6.72, 8.225, "strategy.run(step, args=(batch,))", family="monospace")
    text(ax, 0.25, 8.225, "Your replica function", 10.5, ha="left", weight="bold")
    arrow(ax, (6.72, 8.0), (6.72, 7.72))

    discover = "once per signature,\nabstract: no arithmetic"
    stage(ax, 6.75, 0.97, 1, "Discover", discover)
    labelled(
        ax,
        (3.55, 6.9, 6.35, 0.67),
        DEVICE,
        "trace once in a recording scope: which variables are read, which written;\n"
        "variables that the function creates are initialised when the scope closes",
    )
    arrow(ax, (6.72, 6.75), (6.72, 6.5))

    compiled = (
        "jax.jit(jax.shard_map(...)):\none program, one dispatch;\n"
        "old values are donated"
    )
    stage(ax, 2.5, 4.0, 2, "Compile and run", compiled)
    own_rows = "each device runs the function\non its own rows"
    text(ax, 0.25, 5.19, own_rows, 8.5, ha="left")
    seam = "the optimizer seam: every\noptimizer.apply comes through here"
    text(ax, 0.25, 3.71, seam, 8.5, ha="left")
    for x, name in REPLICAS:
        middle = x + WIDTH / 2
        box(ax, x, 4.22, WIDTH, 2.13, DEVICE)
        text(ax, middle, 6.2, name, 9, weight="bold")
        labelled(ax, (x + 0.1, 5.55, 0.84, 0.5), VARIABLES, "variables,\nmirrored")
        rows = "rows of\nthe batch"
        labelled(ax, (x + 1.01, 5.55, 0.84, 0.5), BATCH, rows)
        arrow(ax, (x + 0.52, 5.55), (x + 0.52, 5.32))
        arrow(ax, (x + 1.43, 5.55), (x + 1.43, 5.32))
        text(ax, middle, 5.19, "forward and backward", 8.5)
        arrow(ax, (middle, 5.06), (middle, 4.84))
        labelled(ax, (x + 0.35, 4.37, 1.25, 0.47), BATCH, "local gradients")
        arrow(ax, (middle, 4.37), (middle, 3.92))
        arrow(ax, (middle, 3.5), (middle, 3.17))
        labelled(ax, (x, 2.65, WIDTH, 0.52), DEVICE, "same update\non every copy")
        arrow(ax, (middle, 2.65), (middle, 2.3))
    labelled(
        ax,
        (3.55, 3.5, 6.35, 0.42),
        SEAM,
        "all-reduce: sum over the replicas in run, mean in fit",
    )

    write_back = "in the same program: each written\nvariable by its own aggregation"
    stage(ax, 0.8, 1.5, 3, "Write back", write_back)
    rules = [
        ("sum", "shares in, Σ out", "metrics"),
        ("mean", "Σ new / R", "moving statistics"),
        ("only_first_replica", "replica 0's", "counters"),
        ("none", "must be equal,\nelse DivergenceError", "weights"),
    ]
    for i, (name, rule, use) in enumerate(rules):
        x, w = 3.55 + i * 1.62, 1.49
        box(ax, x, 0.95, w, 1.21, DEVICE)
        text(ax, x + w / 2, 1.98, name, 8.5, family="monospace")
        text(ax, x + w / 2, 1.58, rule, 8.5)
        text(ax, x + w / 2, 1.12, use, 8, color=FRAME)
    arrow(ax, (5.1, 0.8), (5.1, 0.55))
    arrow(ax, (8.34, 0.8), (8.34, 0.55))
    labelled(ax, (3.55, 0.1, 3.1, 0.45), VARIABLES, "variables: new values, mirrored")
    labelled(ax, (6.79, 0.1, 3.11, 0.45), BATCH, "results: PerReplica, one entry each")


def main(path: Path) -> None:
    """Draw the figure to `path`; the suffix says in which format."""
    mpl.rcParams["svg.hashsalt"] = "mechanism"  # The same file every time.
    figure = plt.figure(figsize=(10.2, 8.6), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, 10.2), ylim=(0, 8.6))
    ax.axis("off")
    draw(ax)
    if path.suffix != ".svg":
        figure.savefig(path, dpi=110)
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Creator": None, "Date": None})
    lines = (line.rstrip() for line in svg.getvalue().splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    default = Path(__file__).with_name("mechanism.svg")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
