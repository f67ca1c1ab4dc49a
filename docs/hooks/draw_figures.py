"""Draws the strategies' figures as SVG: `docs/figures/<name>.svg`.

python docs/hooks/draw_figures.py           # draws them again
python docs/hooks/draw_figures.py --check   # fails if a file is not what is drawn

The build of the site draws them too, and puts them into its pages. Colours are CSS
variables: in a file they follow the reader's system, in the site its own switch.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from strategy_figures import FIGURES, Box, Bus, Figure, Part

FOLDER = Path(__file__).resolve().parents[1] / "figures"

WIDTH = 500.0
MARGIN = 8.0
GAP = 8.0
BAR = 26.0
"""Height of the batch and of the buses."""
FALL = 34.0
"""Height of a row of arrows."""
ROW = 36.0
"""Height of one thing that a device holds, its name included."""
NARROW = 90.0
"""Boxes below this width do not name what they hold: the legend does."""
BETWEEN = 22.0
"""Height between two buses."""
HEADER = 24.0
"""Height of the name of a host or a device."""

KINDS = {
    "data": "data",
    "weights": "weights",
    "state": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
}
"""Colours, in the order of the legend, and what it calls them."""

LIGHT = {
    "ink": "#1f2933",
    "line": "#7b8794",
    "host": "#f2f4f7",
    "device": "#ffffff",
    "data": "#f7c873",
    "weights": "#9cc3f0",
    "state": "#cdb5ea",
    "gradients": "#98d8a8",
    "activations": "#f3b0c3",
}
DARK = {
    "ink": "#e4e7eb",
    "line": "#9aa5b1",
    "host": "#262b36",
    "device": "#333a48",
    "data": "#8a5f12",
    "weights": "#2c5f9e",
    "state": "#6a4a96",
    "gradients": "#2a7a43",
    "activations": "#9a3f5c",
}

Span = tuple[float, float]
"""Left and right end."""


def css(selector: str, colors: dict[str, str]) -> str:
    """A rule that sets the colours."""
    body = ";".join(f"--rx-{name}:{color}" for name, color in colors.items())
    return f"{selector}{{{body}}}"


STYLE = "".join(
    (
        css(".rx-figure", LIGHT),
        f"@media(prefers-color-scheme:dark){{{css('.rx-figure', DARK)}}}",
        ".rx-figure text{fill:var(--rx-ink);font-family:system-ui,sans-serif;"
        "font-size:13px;text-anchor:middle}",
        ".rx-figure .small{font-size:12px}.rx-figure .left{text-anchor:start}",
        ".rx-figure .name{font-weight:600}",
        ".rx-figure rect{stroke:var(--rx-line);stroke-width:1}",
        ".rx-figure .copy{stroke-dasharray:3 2}",
        ".rx-figure .absent{fill:none;stroke-dasharray:2 3}",
    )
)
SITE_STYLE = css("[data-md-color-scheme=default] svg.rx-figure", LIGHT) + css(
    "[data-md-color-scheme=slate] svg.rx-figure", DARK
)
"""What the site adds, so that figures follow its switch between light and dark."""


def number(value: float) -> str:
    """A coordinate, as short as it goes."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def rect(span: Span, y: float, height: float, kind: str, classes: str = "") -> str:
    """A rounded rectangle in the colour of `kind`; none: only its outline."""
    x, width = number(span[0]), number(span[1] - span[0])
    fill = f' style="fill:var(--rx-{kind})"' if kind else ""
    name = f' class="{classes}"' if classes else ""
    return (
        f'<rect x="{x}" y="{number(y)}" width="{width}" height="{number(height)}" '
        f'rx="4"{name}{fill}/>'
    )


def label(x: float, y: float, content: str, classes: str = "") -> str:
    """A line of text with its middle at `x` and its base at `y`."""
    name = f' class="{classes}"' if classes else ""
    return f'<text x="{number(x)}" y="{number(y)}"{name}>{escape(content)}</text>'


def arrow(x: float, top: float, bottom: float, kind: str, *, down: bool) -> str:
    """A vertical arrow in the colour of `kind`."""
    tip, back = (bottom, bottom - 7) if down else (top, top + 7)
    end = (top, back) if down else (back, bottom)
    color = f"var(--rx-{kind})"
    path = f"M{number(x)} {number(end[0])}V{number(end[1])}"
    head = f"M{number(x - 5)} {number(back)}H{number(x + 5)}L{number(x)} {number(tip)}Z"
    return (
        f'<path d="{path}" style="stroke:{color};stroke-width:4;fill:none"/>'
        f'<path d="{head}" style="fill:{color};stroke:{color};stroke-width:3;'
        'stroke-linejoin:round"/>'
    )


def columns(count: int, left: float, right: float, gap: float = GAP) -> list[Span]:
    """`count` equal spans between two ends."""
    width = (right - left - gap * (count - 1)) / count
    return [
        (left + i * (width + gap), left + i * (width + gap) + width)
        for i in range(count)
    ]


def middle(span: Span) -> float:
    """Half way between the ends."""
    return (span[0] + span[1]) / 2


def held(span: Span, y: float, name: str, part: Part, classes: str) -> Iterator[str]:
    """What a box holds of something: cells, of which those that are here are filled."""
    cells, here = part
    if span[1] - span[0] >= NARROW:
        words = f"copy of {name}" if classes == "copy" else name
        yield label(middle(span), y + 11, words, "small")
        y += 16
    for i, cell in enumerate(columns(cells, *span, gap=0)):
        kind = name if i in here else ""
        yield rect(cell, y, 15, kind, classes if kind else "absent")


def row_height(span: Span) -> float:
    """How high a row is in a box of that width."""
    return ROW if span[1] - span[0] - 14 >= NARROW else ROW - 16


def box_height(box: Box, span: Span, *, computes: bool) -> float:
    """How high a box has to be for what it holds."""
    parts = (box.weights is not None) + (box.state is not None) + computes
    return HEADER + parts * row_height(span) + 4


def draw_box(box: Box, span: Span, y: float, *, computes: bool) -> Iterator[str]:
    """A device or a store, and what it holds."""
    yield rect(span, y, box_height(box, span, computes=computes), "device")
    yield label(middle(span), y + 17, box.name, "name")
    inner = (span[0] + 7, span[1] - 7)
    y += HEADER
    row = row_height(span)
    if box.weights is not None:
        copies = "copy" if box.weights_are_copies else ""
        yield from held(inner, y, "weights", box.weights, copies)
        y += row
    if box.state is not None:
        yield from held(inner, y, "state", box.state, "")
        y += row
    if computes:
        yield from held(inner, y, "gradients", box.gradients, "")


def draw_batch(figure: Figure, spans: Sequence[Span], y: float) -> Iterator[str]:
    """The global batch, or each worker's own, above the devices that get it."""
    per_part = len(spans) // len(figure.batch)
    title = "batches" if figure.batches_are_apart else "global batch"
    yield label(WIDTH / 2, y + 12, title)
    y += 18
    for i, words in enumerate(figure.batch):
        own = spans[i * per_part : (i + 1) * per_part]
        part = (own[0][0], own[-1][1])
        if not figure.batches_are_apart:
            gap = GAP / 2 if len(figure.batch) > 1 else 0
            part = (part[0] - gap, part[1] + gap)
        yield rect(part, y, BAR, "data")
        yield label(middle(part), y + 17.5, words, "small")
        for span in own:
            # To the right of the middle: the host's name stands on the left.
            width = span[1] - span[0]
            x = span[0] + 0.8 * width if width >= NARROW else span[1] - 6
            yield arrow(x, y + BAR, y + BAR + FALL, "data", down=True)


def hosts(boxes: Sequence[Box], spans: Sequence[Span]) -> list[tuple[str, Span]]:
    """Neighbours of one host: its name, and where it begins and ends."""
    found: list[tuple[str, Span]] = []
    for box, span in zip(boxes, spans, strict=True):
        if found and found[-1][0] == box.host:
            found[-1] = (box.host, (found[-1][1][0], span[1]))
        else:
            found.append((box.host, span))
    return found


def spans_of(boxes: Sequence[Box]) -> list[Span]:
    """Where boxes stand: side by side, further apart where a host ends."""
    names = [box.host for box in boxes]
    breaks = sum(a != b for a, b in itertools.pairwise(names))
    wide = 16.0
    inner = WIDTH - 2 * (MARGIN + GAP) - breaks * wide
    width = min((inner - GAP * (len(boxes) - 1)) / len(boxes), 250.0)
    total = width * len(boxes) + GAP * (len(boxes) - 1) + breaks * wide
    x, found = (WIDTH - total) / 2, []
    for i, name in enumerate(names):
        if i and name != names[i - 1]:
            x += wide
        found.append((x, x + width))
        x += width + GAP
    return found


def places(count: int, number_of: int, spans: Sequence[Span]) -> list[float]:
    """Where the arrows of bus `number_of` of `count` leave each device."""
    share = (number_of + 1) / (count + 1)
    return [span[0] + share * (span[1] - span[0]) for span in spans]


def draw_bus(bus: Bus, spans: Sequence[Span], y: float) -> Iterator[str]:
    """The bar of something that moves, or one for each group of devices."""
    groups = bus.groups or (tuple(range(len(spans))),)
    for group in groups:
        span = (spans[group[0]][0], spans[group[-1]][1])
        yield rect(span, y, BAR, bus.kind)
        yield label(middle(span), y + 17.5, bus.label, "small")


def arrows(bus: Bus, xs: Sequence[float], top: float, bottom: float) -> Iterator[str]:
    """Those between a row of boxes and a bus below it."""
    for x in xs:
        if bus.heads == "both":
            yield arrow(x - 7, top, bottom, bus.kind, down=True)
            yield arrow(x + 7, top, bottom, bus.kind, down=False)
        else:
            yield arrow(x, top, bottom, bus.kind, down=bus.heads == "down")


def legend(figure: Figure, y: float) -> Iterator[str]:
    """The colours that the figure uses."""
    boxes = (*figure.devices, *figure.stores)
    used = {"data", "gradients", *(bus.kind for bus in figure.buses)}
    used |= {"weights"} | ({"state"} if any(b.state for b in boxes) else set())
    entries = [(kind, text) for kind, text in KINDS.items() if kind in used]
    widths = [32 + 6.8 * len(text) for _, text in entries]
    x = (WIDTH - sum(widths)) / 2
    for (kind, text), width in zip(entries, widths, strict=True):
        yield rect((x, x + 14), y, 14, kind)
        yield label(x + 19, y + 11.5, text, "small left")
        x += width


def draw_stores(figure: Figure, top: float, buses: Sequence[float]) -> Iterator[str]:
    """The places of variables below the buses, and the arrows to them."""
    spans = spans_of(figure.stores)
    count = len(figure.buses)
    height = box_height(figure.stores[0], spans[0], computes=False) + HEADER + 6
    outside = [] if figure.encloses_stores else hosts(figure.stores, spans)
    for host, span in outside:
        yield rect((span[0] - 6, span[1] + 6), top - HEADER, height, "host")
        yield label(span[0] + 2, top - 7, host, "small left")
    for i, (bus, y) in enumerate(zip(figure.buses, buses, strict=True)):
        yield from arrows(bus, places(count, i, spans), y + BAR, top)
    for box, span in zip(figure.stores, spans, strict=True):
        yield from draw_box(box, span, top, computes=False)


def body(figure: Figure) -> tuple[list[str], float]:
    """Everything in the figure, and its height."""
    spans = spans_of(figure.devices)
    parts = list(draw_batch(figure, spans, 4))
    top = 4 + 18 + BAR + FALL
    height = box_height(figure.devices[0], spans[0], computes=True)
    bottom = top + height
    bus_ys = [bottom + FALL + i * (BAR + BETWEEN) for i in range(len(figure.buses))]
    end = bus_ys[-1] + BAR if bus_ys else bottom + 6
    store_top = end + FALL + (0 if figure.encloses_stores else HEADER)
    if figure.stores:
        store, span = figure.stores[0], spans_of(figure.stores)[0]
        end = store_top + box_height(store, span, computes=False) + 6
    frames: list[str] = []
    for host, span in hosts(figure.devices, spans):
        frame = (span[0] - 6, span[1] + 6)
        if figure.encloses_stores:
            frame = (MARGIN, WIDTH - MARGIN)
        lowest = end if figure.encloses_stores else bottom + 6
        frames.append(rect(frame, top - HEADER, lowest - top + HEADER, "host"))
        frames.append(label(frame[0] + 8, top - 7, host, "small left"))
    links: list[str] = []
    for i, (bus, y) in enumerate(zip(figure.buses, bus_ys, strict=True)):
        links += arrows(bus, places(len(bus_ys), i, spans), bottom, y)
    stores = list(draw_stores(figure, store_top, bus_ys)) if figure.stores else []
    bars = [part for bus, y in zip(figure.buses, bus_ys, strict=True)
            for part in draw_bus(bus, spans, y)]  # fmt: skip
    devices = [part for box, span in zip(figure.devices, spans, strict=True)
               for part in draw_box(box, span, top, computes=True)]  # fmt: skip
    # Frames lie below everything; bars above the arrows that pass behind them.
    drawn = [*frames, *parts, *links, *stores, *bars, *devices]
    drawn.append(label(WIDTH / 2, end + 22, figure.note))
    drawn.extend(legend(figure, end + 36))
    return drawn, end + 58


def draw(figure: Figure) -> str:
    """The figure as one SVG element, with its style and a text for screen readers."""
    parts, height = body(figure)
    name = f"rx-{figure.name}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="rx-figure" role="img" '
            f'viewBox="0 0 {number(WIDTH)} {number(height)}" '
            f'aria-labelledby="{name}-title {name}-text">',
            f'<title id="{name}-title">{escape(figure.title)}</title>',
            f'<desc id="{name}-text">{escape(figure.text)}</desc>',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def drawings() -> dict[str, str]:
    """All figures: file names and SVG."""
    return {f"{figure.name}.svg": draw(figure) for figure in FIGURES}


def main(arguments: Sequence[str]) -> int:
    """Write the files, or compare them; the exit status."""
    stale = []
    for name, svg in drawings().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == svg:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(svg, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"not what is drawn: {', '.join(stale)}; run {Path(__file__).name}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
