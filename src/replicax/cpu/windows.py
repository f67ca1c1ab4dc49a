"""Arithmetic of a convolution's windows, one spatial dimension at a time."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Phase", "Window", "phases", "trimmed", "widened", "windows_of"]


@dataclasses.dataclass(frozen=True)
class Window:
    """One spatial dimension: output `p` reads `p * stride + tap * dilation - low`.

    A negative `low` or `high` is the number of elements that are cut off.
    """

    size: int  # Number of elements of the input.
    taps: int  # Number of elements of the kernel.
    stride: int = 1  # Distance of two outputs in the input.
    low: int = 0  # Number of zeros before the input.
    high: int = 0  # Number of zeros after the input.
    input_dilation: int = 1  # Distance of the input's elements, with zeros between.
    dilation: int = 1  # Distance of the kernel's elements.

    @property
    def padded(self) -> int:
        """Number of elements of the input with its zeros."""
        return (self.size - 1) * self.input_dilation + 1 + self.low + self.high

    @property
    def outputs(self) -> int:
        """Number of positions of the window."""
        span = (self.taps - 1) * self.dilation + 1
        return max(0, (self.padded - span) // self.stride + 1)


class Phase(NamedTuple):
    """Every `input_dilation`-th output from `first` on, computed from some taps.

    `window` has no input dilation, and is None if no tap meets the input.
    """

    first: int
    taps: slice
    window: Window | None


def windows_of(
    input_shape: Sequence[int],
    kernel_shape: Sequence[int],
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    input_dilation: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Window, ...]:
    """Make the windows of all spatial dimensions."""
    columns = (strides, padding, input_dilation, dilation)
    rows = zip(input_shape, kernel_shape, *columns, strict=True)
    return tuple(
        Window(size, taps, stride, low, high, of_input, of_kernel)
        for size, taps, stride, (low, high), of_input, of_kernel in rows
    )


def widened(dtype: Any) -> np.dtype:
    """Return the dtype in which floats are summed: `float32` for 16-bit floats.

    `jnp.promote_types` would raise under strict dtype promotion.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def trimmed(window: Window) -> tuple[slice, Window]:
    """Drop outer taps that never meet the input; return the kept taps and their window.

    For example, one tap in nine of a 3x3 kernel meets a 1x1 image. At least one tap
    is kept.

    Example:
        >>> trimmed(Window(size=1, taps=3, low=1, high=1))[0]
        slice(1, 2, None)
    """
    last = (window.size - 1) * window.input_dilation
    meeting = [
        tap
        for tap in range(window.taps)
        if any(
            0 <= p * window.stride + tap * window.dilation - window.low <= last
            for p in range(window.outputs)
        )
    ]
    first, end = (meeting[0], meeting[-1] + 1) if meeting else (0, 1)
    before = first * window.dilation
    after = (window.taps - end) * window.dilation
    return slice(first, end), dataclasses.replace(
        window, taps=end - first, low=window.low - before, high=window.high - after
    )


def phases(window: Window) -> Iterator[Phase]:
    """Divide a window of stride 1 over a dilated input into phases.

    A phase does not multiply by the zeros of the dilated input, which would be 3/4 of
    the work in the gradient of a layer with strides 2x2. There are
    `window.input_dilation` phases, or fewer if there are fewer outputs.
    """
    spread = window.input_dilation
    step = spread // math.gcd(spread, window.dilation)
    for first in range(min(spread, window.outputs)):
        offsets = (
            (tap, first + tap * window.dilation - window.low)
            for tap in range(min(step, window.taps))
        )
        start = next((pair for pair in offsets if pair[1] % spread == 0), None)
        if start is None:
            yield Phase(first, slice(0, 0), None)
            continue
        tap, offset = start
        taps = len(range(tap, window.taps, step))
        outputs = len(range(first, window.outputs, spread))
        gap = step * window.dilation // spread
        length = outputs + (taps - 1) * gap
        low = -(offset // spread)
        yield Phase(
            first,
            slice(tap, None, step),
            Window(
                window.size, taps, 1, low, length - window.size - low, 1, max(1, gap)
            ),
        )
