"""Computes charts of curves over epochs: SVG paths, axis labels, and a description.

The plot stretches to the page's width; its labels are HTML around the SVG, so they keep
the size of other text.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

__all__ = ["Chart", "Point", "Series", "chart_of", "plain", "ticks"]

_MAX_DOTS = 500  # Longer curves have no tooltips.
_SIZE = 1000  # Width and height of the plot, in units of SVG paths.
_LOG_FROM = 100.0  # Ratio of the largest value to the smallest.
_HUGE = 1e300  # Limit of the axis: differences and powers of ten stay finite.
_FLAT = 1e-9  # Values that differ by less, relative to the largest, are equal.

Point = tuple[float, float]

Chart = dict[str, object]
"""The values of the template `chart.html`, which describes them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A curve's points `(x, y)`, for each `fit`; a y that is not finite is a gap."""

    name: str
    parts: Sequence[Sequence[Point]]

    @property
    def points(self) -> list[Point]:
        """The points of all parts."""
        return [point for part in self.parts for point in part]


def plain(value: float) -> str:
    """Format a number for people."""
    if not math.isfinite(value):
        return {math.inf: "+inf", -math.inf: "-inf"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"


def chart_of(
    title: str,
    series: Sequence[Series],
    *,
    unit: Callable[[float], str] = plain,
    from_zero: bool = False,
    borders: Sequence[tuple[float, str]] = (),
    note: str = "",
) -> Chart | None:
    """Make a chart of curves over epochs; None without points.

    `unit` formats a y. With `from_zero` the y axis begins at 0 and is linear. `borders`
    has the x at which each `fit` but the first begins, and the name of that `fit`.
    `note` is a sentence below the title.
    """
    series = [s for s in series if s.points]
    if not series:
        return None
    points = [point for s in series for point in s.points]
    scale = _AxisScale(
        [y for _, y in points if math.isfinite(y)], [x for x, _ in points], from_zero
    )
    at_borders = [(scale.across(x), name) for x, name in borders]
    return {
        "title": f"{title} (logarithmic)" if scale.is_log else title,
        "note": note,
        "in_words": f"{title}: {'; '.join(map(_in_words, series))}",
        "curves": [_curve(s, scale, unit) for s in series],
        "y_labels": [(scale.up(y), unit(y)) for y in scale.y_ticks],
        "x_labels": [(scale.across(x), plain(x)) for x in scale.x_ticks],
        "borders": [(at, name) for at, name in at_borders if 0 < at < 1],
        "size": _SIZE,
    }


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round tick values from `low` to `high`, at most `most + 1`.

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


class _AxisScale:
    """Maps values to positions in a plot, from 0 to 1."""

    def __init__(
        self, ys: Sequence[float], xs: Sequence[float], from_zero: bool
    ) -> None:
        low = max(-_HUGE, min(ys, default=0.0))
        high = min(_HUGE, max(ys, default=1.0))
        self.is_log = not from_zero and low > 0 and high / low >= _LOG_FROM
        if self.is_log:
            self._low = float(math.floor(math.log10(max(low, 1 / _HUGE))))
            self._high = float(math.ceil(math.log10(high)))
            powers = range(int(self._low), int(self._high) + 1)
            self.y_ticks = [10.0**p for p in powers[:: max(1, (len(powers) - 1) // 5)]]
        else:
            low = min(0.0, low) if from_zero else low
            size = high - low
            largest = max(abs(low), abs(high), 1e-12)
            room = 0.05 * size if size > _FLAT * largest else 0.1 * largest
            self._low = low if from_zero and low == 0 else low - room
            self._high = high + room
            self.y_ticks = ticks(self._low, self._high)
        self._first, self._last = min(xs), max(xs)
        epochs = [x for x in ticks(self._first, self._last, 6) if x == int(x)]
        self.x_ticks = epochs or sorted({self._first, self._last})

    def up(self, y: float) -> float:
        value = math.log10(max(y, 1 / _HUGE)) if self.is_log else y
        height = (value - self._low) / (self._high - self._low)
        return min(1.0, max(0.0, height))

    def across(self, x: float) -> float:
        if self._last == self._first:
            return 0.5
        return (x - self._first) / (self._last - self._first)


def _curve(
    series: Series, scale: _AxisScale, unit: Callable[[float], str]
) -> dict[str, object]:
    path = ""
    dots: list[tuple[str, str]] = []
    for part in series.parts:
        command = "M"
        for x, y in part:
            if not math.isfinite(y):
                command = "M"  # The line is interrupted.
                continue
            place = f"{_SIZE * scale.across(x):.1f} {_SIZE * (1 - scale.up(y)):.1f}"
            path += command + place
            command = "L"
            dots.append((place, f"{series.name}, epoch {plain(x)}: {unit(y)}"))
    dots = dots if len(dots) <= _MAX_DOTS else []
    return {"name": series.name, "path": path, "dots": dots}


def _in_words(series: Series) -> str:
    (first, low), (last, high) = series.points[0], series.points[-1]
    return (
        f"{series.name} from {plain(low)} in epoch {plain(first)} "
        f"to {plain(high)} in epoch {plain(last)}"
    )
