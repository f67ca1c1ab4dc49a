"""Curves as SVG inside of HTML, and the numbers that they show as tables.

The plot is stretched to the page's width, whatever that is; its labels are HTML around
it, so that they stay as large as other text.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from html import escape

__all__ = ["Series", "chart", "plain", "thinned", "ticks"]

_MOST_POINTS = 240
_MOST_ROWS = 60
_FEW_POINTS = 40  # So few get a dot each.
_NUM_COLORS = 8
_SIZE = 1000.0
_LOG_FROM = 100.0  # Ratio of the largest value to the smallest.
_HUGE = 1e300  # So that differences and powers of ten are numbers, too.
_FLAT = 1e-9  # Values that differ by less, relative to the largest, are equal.

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A curve.

    Attributes:
        name: What it is.
        parts: Its points `(x, y)`, each `fit` apart; a y that is not finite is a gap.
    """

    name: str
    parts: Sequence[Sequence[Point]]

    @property
    def points(self) -> list[Point]:
        """Those of all parts."""
        return [point for part in self.parts for point in part]


def plain(value: float) -> str:
    """A number as people read it."""
    if not math.isfinite(value):
        return {math.inf: "+inf", -math.inf: "-inf"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


def chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: Callable[[float], str] = plain,
    from_zero: bool = False,
    borders: Sequence[tuple[float, str]] = (),
    note: str = "",
) -> str:
    """A figure of curves over epochs, as HTML; "" where nothing is to be drawn.

    Args:
        title: What is drawn.
        series: The curves.
        unit: Writes a value.
        from_zero: Whether the axis begins at 0.
        borders: Where another `fit` begins, and its name.
        note: A sentence below the title.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    scale = _Scale(
        [y for s in series for _, y in s.points if math.isfinite(y)],
        [x for s in series for x, _ in s.points],
        from_zero,
    )
    drawn = "".join(_curve(s, i, scale, unit) for i, s in enumerate(series))
    y_labels = "".join(
        f'<span style="bottom:{100 * scale.up(y):.2f}%">{escape(unit(y))}</span>'
        for y in scale.y_ticks
    )
    x_labels = "".join(
        f'<span style="left:{100 * scale.across(x):.2f}%">{plain(x)}</span>'
        for x in scale.x_ticks
    )
    is_log = " (logarithmic)" if scale.is_log else ""
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}{is_log}</h3>'
        f"{f'<p>{escape(note)}</p>' if note else ''}{_legend(series)}</figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(_in_words(title, series))}">'
        f'<div class="ys">{y_labels}</div>'
        f'<svg viewBox="0 0 {_SIZE:.0f} {_SIZE:.0f}" preserveAspectRatio="none">'
        f"{_grid(scale, borders)}{drawn}</svg>"
        f'<div class="xs">{x_labels}<b>epoch</b></div></div>'
        f"{_numbers(series, unit, title)}</figure>"
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` and one.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(f * size for f in (1, 2, 5, 10) if f * size >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Rounded, so that 3 * 0.1 is 0.3.
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most so many of the points; of each stretch the lowest and the highest stay.

    What is not finite stays where a stretch has nothing else.
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [p for p in stretch if math.isfinite(p[1])]
        ends = [min(finite, key=_height), max(finite, key=_height)] if finite else []
        kept += sorted(set(ends)) or [stretch[0]]
    return kept


def _height(point: Point) -> float:
    return point[1]


class _Scale:
    """Where values lie in a plot, from 0 to 1.

    Args:
        ys: All finite values.
        xs: All places.
        from_zero: Whether the axis begins at 0.
    """

    def __init__(
        self, ys: Sequence[float], xs: Sequence[float], from_zero: bool
    ) -> None:
        low = max(-_HUGE, min(ys, default=0.0))
        high = min(_HUGE, max(ys, default=1.0))
        self.is_log = not from_zero and low > 0 and high / low >= _LOG_FROM
        if self.is_log:
            self._low = math.log10(max(low, 1 / _HUGE))
            self._high = math.log10(high)
            self.y_ticks = self._powers()
        else:
            low = min(0.0, low) if from_zero else low
            size = high - low
            largest = max(abs(low), abs(high), 1e-12)
            room = 0.05 * size if size > _FLAT * largest else 0.1 * largest
            self._low = low if from_zero and low == 0 else low - room
            self._high = high + room
            self.y_ticks = ticks(self._low, self._high)
        self._first, self._last = min(xs), max(xs)
        self.x_ticks = self._epochs()

    def up(self, y: float) -> float:
        value = math.log10(max(y, 1 / _HUGE)) if self.is_log else y
        height = (value - self._low) / (self._high - self._low)
        return min(1.0, max(0.0, height))

    def across(self, x: float) -> float:
        if self._last == self._first:
            return 0.5
        return (x - self._first) / (self._last - self._first)

    def _powers(self) -> list[float]:
        first, last = math.floor(self._low), math.ceil(self._high)
        self._low, self._high = float(first), float(last)
        stride = max(1, (last - first) // 5)
        return [10.0**power for power in range(first, last + 1, stride)]

    def _epochs(self) -> list[float]:
        whole = [x for x in ticks(self._first, self._last, 6) if x == int(x)]
        return whole or sorted({self._first, self._last})


def _grid(scale: _Scale, borders: Sequence[tuple[float, str]]) -> str:
    lines = []
    for y in scale.y_ticks:
        at = _SIZE * (1 - scale.up(y))
        lines.append(f'<path class="grid" d="M0 {at:.1f}H{_SIZE:.0f}"/>')
    for x, name in borders:
        at = _SIZE * scale.across(x)
        if 0 < at < _SIZE:
            lines.append(
                f'<path class="border" d="M{at:.1f} 0V{_SIZE:.0f}">'
                f"<title>{escape(name)} begins</title></path>"
            )
    return "".join(lines)


def _curve(
    series: Series, index: int, scale: _Scale, unit: Callable[[float], str]
) -> str:
    color = f"s{index % _NUM_COLORS}"
    is_few = len(series.points) <= _FEW_POINTS
    lines, dots = [], []
    for part in series.parts:
        for run in _runs(thinned(part)):
            places = [
                f"{_SIZE * scale.across(x):.1f} {_SIZE * (1 - scale.up(y)):.1f}"
                for x, y in run
            ]
            lines.append("M" + "L".join(places))
            dots += [
                f'<path class="dot" d="M{place}h0">'
                f"<title>{escape(series.name)}, epoch {plain(x)}: {escape(unit(y))}"
                "</title></path>"
                for place, (x, y) in zip(places, run, strict=True)
            ]
    return (
        f'<g class="{color}{" few" if is_few else ""}">'
        f'<path class="line" d="{"".join(lines)}"/>{"".join(dots)}</g>'
    )


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches between gaps."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    items = "".join(
        f'<li class="s{i % _NUM_COLORS}"><i></i>{escape(s.name)}</li>'
        for i, s in enumerate(series)
    )
    return f'<ul class="legend">{items}</ul>'


def _in_words(title: str, series: Sequence[Series]) -> str:
    said = []
    for s in series:
        first, last = s.points[0], s.points[-1]
        said.append(
            f"{s.name} from {plain(first[1])} in epoch {plain(first[0])} "
            f"to {plain(last[1])} in epoch {plain(last[0])}"
        )
    return f"{title}: {'; '.join(said)}"


def _numbers(series: Sequence[Series], unit: Callable[[float], str], title: str) -> str:
    """The table below a chart. An epoch that is there twice has a row for each."""
    rows: dict[tuple[int, float], dict[int, float]] = {}
    for column, s in enumerate(series):
        for number, part in enumerate(s.parts):
            for x, y in part:
                rows.setdefault((number, x), {})[column] = y
    keys = sorted(rows)
    shown = keys
    if len(keys) > _MOST_ROWS:
        stride = (len(keys) - 1) / (_MOST_ROWS - 1)
        shown = [keys[round(i * stride)] for i in range(_MOST_ROWS)]
    head = "".join(f'<th scope="col">{escape(s.name)}</th>' for s in series)
    body = "".join(
        f'<tr><th scope="row">{plain(key[1])}</th>'
        + "".join(_cell(rows[key].get(i), unit) for i in range(len(series)))
        + "</tr>"
        for key in shown
    )
    left_out = len(keys) - len(shown)
    more = f" ({len(shown)} of {len(keys)} epochs)" if left_out else ""
    return (
        f"<details><summary>Numbers{more}</summary>"
        f'<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(title)}, numbers"><table><thead><tr>'
        f'<th scope="col">epoch</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _cell(value: float | None, unit: Callable[[float], str]) -> str:
    if value is None:
        return "<td></td>"
    text = unit(value) if math.isfinite(value) else plain(value)
    return f"<td>{escape(text)}</td>"
