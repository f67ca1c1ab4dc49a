"""Computes gradients of max and min pooling on CPUs, without select-and-scatter.

XLA expands select-and-scatter to a slow reduction of windows and a scatter. Here one
pass over the taps finds the chosen tap of each window, its maximum or minimum. Each
element of the input gathers its gradient from the windows that chose it.

In comments, `44 -> 2.0` are the milliseconds of XLA and of this module, on two cores
with JAX 0.10.2, for float32 of shape `[batch, height, width, channels]`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.cpu.windows import Window, widened, windows_of

__all__ = ["gradient", "replaces_xla"]

_KEEPS = {lax.ge_p: lax.ge, lax.le_p: lax.le}
# The program has a few operations for each tap. [16, 32, 32, 64] with 3x3, strides 1:
# 44 -> 2.0, [2, 24, 24, 64] with 11x11: 60 -> 3.2; more was not measured.
_MOST_TAPS = 128
# Maximal product of the strides: overlapping windows have operations for each phase.
# At [16, 24, 24, 64], disjoint windows of 3x3: 6.6 -> 0.5, of 6x6: 5.6 -> 3.0, and of
# 8x8 (a quarter of the batch): 0.9 -> 1.6.
_MOST_PHASES = 32


def replaces_xla(source: Any, operand: Any, params: Mapping[str, Any]) -> bool:
    """Whether `gradient` supports these types, and is faster than XLA."""
    if not jnp.issubdtype(operand.dtype, jnp.floating) or operand.dtype.itemsize < 2:
        return False
    edges = [n for pair in params["padding"] for n in pair]
    return (
        source.dtype == operand.dtype
        and params["select_prim"] in _KEEPS
        and 0 not in (*source.shape, *operand.shape)
        and all(n >= 0 for n in edges)
        and math.prod(params["window_dimensions"]) <= _MOST_TAPS
        and math.prod(params["window_strides"]) <= _MOST_PHASES
    )


def gradient(
    source: jax.Array, operand: jax.Array, *, params: Mapping[str, Any]
) -> jax.Array:
    """Compute the gradient with respect to the input of the pooling.

    `source` is the gradient with respect to the pooling's output. As in XLA's
    select-and-scatter, the first of equal elements of a window gets the whole gradient,
    any element after a NaN replaces the NaN, and padding gets no gradient.
    """
    ones = [1] * operand.ndim
    windows = windows_of(
        operand.shape,
        params["window_dimensions"],
        strides=params["window_strides"],
        padding=params["padding"],
        input_dilation=ones,
        dilation=ones,
    )
    # Sums of 16-bit gradients are in float32, which is also faster to transpose:
    # [16, 64, 28, 28] with 3x3 and strides 2 takes 4.8, with bfloat16 17.
    wide = widened(operand.dtype)
    dy = source.astype(wide)
    squares = _squared_taps(operand.astype(wide), windows, params["select_prim"])
    # XLA adds gradients to +0, so that -0 becomes +0.
    taps = _stored_roots(jnp.where(dy == 0, 0, squares))
    overlap = any(w.taps > w.stride for w in windows)
    # Windows over the innermost dimension, as of layers with channels first:
    # [64, 32, 26, 26] with 2x2 takes 41 by XLA, 7.9 by broadcasts, 2.7 by phases.
    by = _by_phases if overlap or windows[-1].stride > 1 else _by_broadcasts
    return by(taps, dy, windows).astype(operand.dtype)


def _taps(windows: Sequence[Window]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(w.taps) for w in windows)))


def _squared_taps(x: jax.Array, windows: Sequence[Window], select: Any) -> jax.Array:
    """Choose a tap for each window; return the squares of their numbers, from 1.

    A window of padding only has a tap in the padding.
    """
    edges = [(w.low, w.high, 0) for w in windows]
    if any(itertools.chain(*edges)):
        # Any element after a NaN replaces the NaN, so padding is never chosen.
        x = lax.pad(x, x.dtype.type(np.nan), edges)
    best: jax.Array | None = None
    squares = jnp.ones([w.outputs for w in windows], jnp.float32)
    for number, tap in enumerate(_taps(windows), start=1):
        ends = [
            t + (w.outputs - 1) * w.stride + 1
            for t, w in zip(tap, windows, strict=True)
        ]
        candidate = lax.slice(x, tap, ends, [w.stride for w in windows])
        if best is None:
            best = candidate
            continue
        keeps_best = _KEEPS[select](best, candidate)
        for dim in range(x.ndim):
            if (outside := _in_padding(windows, dim, tap[dim])) is not None:
                keeps_best = keeps_best | outside
        best = jnp.where(keeps_best, best, candidate)
        squares = jnp.where(keeps_best, squares, float(number**2))
    return squares


def _stored_roots(squares: jax.Array) -> jax.Array:
    """Take square roots of squares, so that XLA writes the numbers to memory.

    XLA repeats cheap operations in each operation that reads them, but no square roots.
    A step of the benchmark's CNN, which pools [256, 26, 26, 32], takes 9.3, and 11.9
    without the roots.
    """
    return jnp.round(lax.sqrt(squares)).astype(jnp.int32)


def _in_padding(windows: Sequence[Window], dim: int, tap: int) -> jax.Array | None:
    """Mask the windows whose tap is in a dimension's padding; None: no such window."""
    w = windows[dim]
    first = max(0, -((tap - w.low) // w.stride))
    end = min(w.outputs, max(0, -((tap - w.low - w.size) // w.stride)))
    if first == 0 and end == w.outputs:
        return None
    shape = [w.outputs if i == dim else 1 for i in range(len(windows))]
    position = lax.broadcasted_iota(jnp.int32, shape, dim)
    return (position < first) | (position >= end)


def _by_broadcasts(
    taps: jax.Array, dy: jax.Array, windows: Sequence[Window]
) -> jax.Array:
    """Compute the gradient for disjoint windows: one loop, without sums.

    [64, 26, 26, 32] with 2x2: 36 -> 0.4, [64, 11, 11, 64]: 3.1 -> 0.15.
    """
    # Elements between two windows keep -1, the number of no tap.
    numbers = np.full([w.stride for w in windows], -1, np.int32)
    for number, tap in enumerate(_taps(windows), start=1):
        numbers[tap] = number
    # Dimensions without windows are not split: XLA's loops over them stay simple.
    split = [w.stride > 1 for w in windows]
    of_windows, of_taps = [], []
    for w, is_split in zip(windows, split, strict=True):
        of_windows += [w.outputs, 1] if is_split else [w.outputs]
        of_taps += [1, w.stride] if is_split else [1]
    dx = jnp.where(
        taps.reshape(of_windows) == numbers.reshape(of_taps),
        dy.reshape(of_windows),
        jnp.zeros((), dy.dtype),
    )
    return _cut(dx.reshape([w.outputs * w.stride for w in windows]), windows)


def _by_phases(taps: jax.Array, dy: jax.Array, windows: Sequence[Window]) -> jax.Array:
    """Compute the gradient for overlapping windows: sums over an element's windows.

    Elements of the input that lie a stride apart, a phase, meet the same taps. The
    function computes phase by phase, and interleaves them. [16, 32, 32, 64] with 3x3
    and strides 2: 17 -> 0.9.
    """
    lengths = [-(-(w.size + w.low) // w.stride) for w in windows]
    reaches = [-(-w.taps // w.stride) for w in windows]
    # Element `i` of a phase lies in the windows `i - reach + 1` to `i`.
    edges = [
        (reach - 1, length - w.outputs, 0)
        for reach, length, w in zip(reaches, lengths, windows, strict=True)
    ]
    # Without the barrier XLA would pad both arrays again for each phase.
    taps, dy = lax.optimization_barrier(
        (
            lax.pad(taps, jnp.zeros((), taps.dtype), edges),
            lax.pad(dy, jnp.zeros((), dy.dtype), edges),
        )
    )
    phases: dict[tuple[int, ...], jax.Array] = {}
    for number, tap in enumerate(_taps(windows), start=1):
        starts = [
            reach - 1 - t // w.stride
            for t, reach, w in zip(tap, reaches, windows, strict=True)
        ]
        ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        term = jnp.where(
            lax.slice(taps, starts, ends) == number, lax.slice(dy, starts, ends), 0
        )
        phase = tuple(t % w.stride for t, w in zip(tap, windows, strict=True))
        phases[phase] = phases[phase] + term if phase in phases else term
    # Phases between two windows have no tap.
    nothing = jnp.zeros(lengths, dy.dtype)
    all_phases = itertools.product(*(range(w.stride) for w in windows))
    dx = jnp.stack([phases.get(phase, nothing) for phase in all_phases])
    dx = dx.reshape([w.stride for w in windows] + lengths)
    dims = len(windows)
    dx = dx.transpose([i for dim in range(dims) for i in (dims + dim, dim)])
    shape = [n * w.stride for n, w in zip(lengths, windows, strict=True)]
    return _cut(dx.reshape(shape), windows)


def _cut(dx: jax.Array, windows: Sequence[Window]) -> jax.Array:
    """Remove the padding, and add zeros for elements after the last window."""
    edges = [
        (-w.low, w.low + w.size - length, 0)
        for w, length in zip(windows, dx.shape, strict=True)
    ]
    if not any(itertools.chain(*edges)):
        return dx
    return lax.pad(dx, jnp.zeros((), dx.dtype), edges)
