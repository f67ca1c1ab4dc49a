"""Computes convolutions as matrix products or as sums of products.

Arrays have one order here, for any layout of the layer: the input
`[batch, *space, features]`, the kernel `[*taps, features / groups, outputs]` and the
result `[batch, *space, outputs]`.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.cpu.windows import Window, phases, trimmed

__all__ = [
    "by_groups",
    "by_patches",
    "by_taps",
    "has_phases",
    "in_phases",
    "pad",
    "slice_window",
    "without_zeros",
]

Form = Callable[
    [jax.Array, jax.Array, Sequence[Window], int, lax.PrecisionLike], jax.Array
]

# Patches of 3x3 kernels are nine times the input. Above this size, only the patches of
# one row of the kernel are in memory at a time.
_PATCHES_BYTES = 16 * 2**20


def slice_window(
    x: jax.Array, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]
) -> jax.Array:
    """Slice a window's elements `[n, *counts, m]` from padded `x: [n, *space, m]`."""
    ends = [
        start + (count - 1) * step + 1
        for start, count, step in zip(starts, counts, steps, strict=True)
    ]
    return lax.slice(
        x, (0, *starts, 0), (x.shape[0], *ends, x.shape[-1]), (1, *steps, 1)
    )


def pad(x: jax.Array, windows: Sequence[Window]) -> jax.Array:
    """Pad `x: [n, *space, m]` for its windows, with zeros between dilated elements."""
    edges = [(w.low, w.high, w.input_dilation - 1) for w in windows]
    if not any(itertools.chain(*edges)):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def _taps(
    x: jax.Array, windows: Sequence[Window]
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yield each tap of the kernel, with the padded input's elements that meet it."""
    for tap in itertools.product(*(range(w.taps) for w in windows)):
        yield tap, _at_tap(tap, x, windows)


def _at_tap(tap: Sequence[int], x: jax.Array, windows: Sequence[Window]) -> jax.Array:
    starts = [t * w.dilation for t, w in zip(tap, windows, strict=True)]
    return slice_window(
        x, starts, [w.outputs for w in windows], [w.stride for w in windows]
    )


def by_patches(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    groups: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiply the input's patches (im2col) with the kernel.

    `x[batch, *space, features]` and `kernel[*taps, features / groups, outputs]` give
    `[batch, *space, outputs]`.
    """
    x = pad(x, windows)
    first, *others = windows
    count = math.prod(w.taps * w.outputs for w in windows) * x.shape[0] * x.shape[-1]
    if first.taps == 1 or count * x.dtype.itemsize <= _PATCHES_BYTES:
        return _patches_times(x, kernel, windows, groups, precision)
    # One row of taps at a time, in a loop: otherwise XLA would make the patches of all
    # rows before the first product.
    length = (first.outputs - 1) * first.stride + 1
    row_windows = [Window(size=length, taps=1, stride=first.stride), *others]

    def row(tap: jax.Array | int) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, tap * first.dilation, length, 1)
        weights = lax.dynamic_slice_in_dim(kernel, tap, 1, 0)
        return _patches_times(part, weights, row_windows, groups, precision)

    return lax.fori_loop(1, first.taps, lambda tap, y: y + row(tap), row(0))


def _patches_times(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    groups: int,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Compute `by_patches` for padded `x`, with all taps at once."""
    features, outputs = kernel.shape[-2:]
    patches = [elements for _, elements in _taps(x, windows)]
    space = patches[0].shape[:-1]
    if groups == 1:
        y = jnp.matmul(
            jnp.concatenate(patches, -1).reshape(math.prod(space), -1),
            kernel.reshape(-1, outputs),
            precision=precision,
        )
    else:
        y = jnp.einsum(
            "rtgc,tcgo->rgo",
            jnp.stack(patches, -2).reshape(-1, len(patches), groups, features),
            kernel.reshape(len(patches), features, groups, outputs // groups),
            precision=precision,
        )
    return y.reshape(*space, outputs)


def by_taps(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiply the input with all taps, and shift and sum the products.

    The kernel is laid out as for the gradient with respect to a layer's input. The
    other forms would first transpose its features and outputs in memory, which takes
    longer than the product if weights are many and positions few.

    `x[batch, *space, features]` and `kernel[*taps, outputs, features]`, with the taps
    in reverse order, give `[batch, *space, outputs]`.
    """
    cuts = [trimmed(w) for w in windows]
    windows = [w for _, w in cuts]
    sizes = kernel.shape[: len(cuts)]
    kernel = kernel[
        tuple(
            slice(size - taps.stop, size - taps.start)
            for size, (taps, _) in zip(sizes, cuts, strict=True)
        )
    ]
    outputs, features = kernel.shape[-2:]
    products = lax.dot_general(
        x.reshape(-1, features),
        kernel.reshape(-1, features),
        (((1,), (1,)), ((), ())),
        precision=precision,
    )
    taps = list(itertools.product(*(range(w.taps) for w in windows)))
    products = products.reshape(*x.shape[:-1], len(taps), outputs)
    parts = [
        _at_tap(tap, pad(products[..., i, :], windows), windows)
        for i, tap in enumerate(reversed(taps))
    ]
    return functools.reduce(operator.add, parts)


def by_groups(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    groups: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Sum shifted inputs times weights over the taps, for groups of few features.

    XLA compiles it to one vectorised loop. Arguments and result are those of
    `by_patches`; `precision` is ignored, since there is no matrix product.
    """
    # Without the barrier XLA would compute the padding again for each tap.
    x = lax.optimization_barrier(pad(x, windows))
    features, outputs = kernel.shape[-2:]
    terms = []
    for tap, elements in _taps(x, windows):
        split = elements.reshape(*elements.shape[:-1], groups, features)
        ones = (1,) * (elements.ndim - 1)
        weights = kernel[tap].reshape(*ones, features, groups, outputs // groups)
        for feature in range(features):
            if features == outputs // groups == 1:
                y = elements * kernel[tap].reshape(*ones, outputs)
            else:
                y = split[..., feature, None] * weights[..., feature, :, :]
            terms.append(y)
    result = functools.reduce(operator.add, terms)
    return result.reshape(x.shape[0], *(w.outputs for w in windows), outputs)


def without_zeros(
    form: Form,
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    groups: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Apply `form` without the taps that meet only padding.

    With stride 1 over a dilated input, phases are computed and then interleaved.
    `form` is `by_patches` or `by_groups`; other arguments and the result are theirs.
    """
    cuts = [trimmed(w) for w in windows]
    kernel = kernel[tuple(taps for taps, _ in cuts)]
    windows = [w for _, w in cuts]
    if not has_phases(windows):
        return form(x, kernel, windows, groups, precision)
    return in_phases(
        lambda taps, parts: form(x, kernel[taps], parts, groups, precision),
        windows,
        (x.shape[0],),
        (kernel.shape[-1],),
        x.dtype,
    )


def has_phases(windows: Sequence[Window]) -> bool:
    """Whether a dilated input is convolved with stride 1, as in transposed layers."""
    return any(w.input_dilation > 1 and w.stride == 1 for w in windows)


def in_phases(
    compute: Callable[[tuple[slice, ...], Sequence[Window]], jax.Array],
    windows: Sequence[Window],
    before: tuple[int, ...],
    after: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    """Compute the phases of a dilated input with `compute`, and interleave them.

    `compute` takes the taps and the windows of a phase, and returns an array of shape
    `[*before, *space, *after]`.
    """
    # A dimension without dilation, or with strides, has a single phase.
    spread = [w.input_dilation if w.stride == 1 else 1 for w in windows]
    counts = [-(-w.outputs // s) for w, s in zip(windows, spread, strict=True)]
    shape = (*before, *counts, *after)
    parts = []
    choices = [_parts(w, s) for w, s in zip(windows, spread, strict=True)]
    for combination in itertools.product(*choices):
        phase = [window for _, window in combination if window is not None]
        if len(phase) < len(combination):
            parts.append(jnp.zeros(shape, dtype))
            continue
        y = compute(tuple(taps for taps, _ in combination), phase)
        missing = [(0, n - m) for n, m in zip(shape, y.shape, strict=True)]
        parts.append(jnp.pad(y, missing))
    y = jnp.stack(parts).reshape(*spread, *shape)
    dims, lead = len(windows), len(before)
    order = [*range(dims, dims + lead)]
    for i in range(dims):
        order += [dims + lead + i, i]
    y = jnp.transpose(y, (*order, *range(2 * dims + lead, y.ndim)))
    y = y.reshape(
        *before, *(n * s for n, s in zip(counts, spread, strict=True)), *after
    )
    return y[(slice(None),) * lead + tuple(slice(w.outputs) for w in windows)]


def _parts(window: Window, spread: int) -> list[tuple[slice, Window | None]]:
    """List the taps and window of `spread` phases; window None: only zeros."""
    if spread == 1:
        return [(slice(None), window)]
    parts = [(phase.taps, phase.window) for phase in phases(window)]
    return parts + [(slice(0, 0), None)] * (spread - len(parts))
