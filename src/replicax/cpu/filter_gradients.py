"""Computes the gradients of convolutions with respect to their kernels on CPUs.

JAX writes them as convolutions whose kernel is the gradient of the output. Arrays have
one order here, in which those of channels-last layers need no transposition: the input
`[features, *space, batch]`, the kernel `[features, *taps, outputs]` and the result
`[*space, batch, outputs]`. Features are the images of the layer, batch and outputs its
channels.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.cpu.forms import has_phases, in_phases, pad, slice_window
from replicax.cpu.windows import Window

__all__ = ["by_outputs", "by_strips", "by_sums"]

# Terms of one elementwise sum. More terms do not compile to faster code.
_TERMS = 8


def by_outputs(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    groups: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Compute one matrix product for each output position, for filter gradients.

    `x[features, *space, batch]` and `kernel[features, *taps, outputs]`, with groups of
    the batch, give `[*space, batch / groups, outputs]`.
    """
    outputs = kernel.shape[-1]
    batch = x.shape[-1] // groups
    if has_phases(windows):  # Kernel gradients of transposed layers.
        return in_phases(
            lambda taps, parts: by_outputs(
                x, kernel[(slice(None), *taps)], parts, groups, precision
            ),
            windows,
            (),
            (batch, outputs),
            x.dtype,
        )
    weights = kernel.reshape(-1, groups, outputs // groups)
    length, space = len(weights), [w.outputs for w in windows]
    positions = _at_outputs(pad(x, windows), windows)
    product = functools.partial(jnp.einsum, precision=precision)
    if groups > 1:
        parts = [e.reshape(length, groups, batch) for e in positions]
        y = jnp.stack([product("kgn,kgo->ngo", e, weights) for e in parts])
        return y.reshape(*space, batch, outputs)
    weights = weights[:, 0]  # Without the axis of groups the products are not batched.
    if batch * math.prod(space) <= outputs:
        # All elements together are no larger than the kernel: read the kernel once.
        # With the barrier XLA copies rows of the input. Without the barrier it copies
        # single numbers, three times as slowly.
        stacked = lax.optimization_barrier(jnp.stack(list(positions)))
        y = product("pkn,ko->pno", stacked.reshape(-1, length, batch), weights)
        return y.reshape(*space, batch, outputs)
    parts = [e.reshape(length, batch) for e in positions]
    if length * (batch + outputs) <= batch * outputs:
        # Copies of both operands are smaller than the result: with these copies, XLA
        # writes the result once.
        copies = jnp.broadcast_to(weights, (len(parts), *weights.shape))
        y = product("pkn,pko->pno", jnp.stack(parts), copies)
    else:
        y = jnp.stack([product("kn,ko->no", e, weights) for e in parts])
    return y.reshape(*space, batch, outputs)


def by_strips(
    x: jax.Array,
    kernel: jax.Array,
    windows: Sequence[Window],
    strips: int,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Let XLA convolve strips of the images, for filter gradients of small batches.

    Each strip of the first dimension counts as one more image, so `strips` divides the
    kernel's first dimension. Arguments and result are those of `by_outputs`.
    """
    x, first = pad(x, windows), windows[0]
    length = first.taps // strips
    span = (first.outputs - 1) * first.stride + (length - 1) * first.dilation + 1
    starts = range(0, first.taps * first.dilation, length * first.dilation)
    parts = [lax.slice_in_dim(x, start, start + span, axis=1) for start in starts]
    # Strips of an image stay together: the axis of images may be sharded over devices.
    images = jnp.stack(parts, 1).reshape(-1, span, *x.shape[2:])
    last = x.ndim - 1
    order = (last, 0, *range(1, last))
    return lax.conv_general_dilated(
        images,
        kernel.reshape(-1, length, *kernel.shape[2:]),
        [w.stride for w in windows],
        "VALID",
        rhs_dilation=[w.dilation for w in windows],
        dimension_numbers=lax.ConvDimensionNumbers(
            order, order, (last - 1, last, *range(last - 1))
        ),
        precision=precision,
    )


def by_sums(x: jax.Array, kernel: jax.Array, windows: Sequence[Window]) -> jax.Array:
    """Compute filter gradients of depthwise layers as sums of elementwise products.

    `x[features, *space, channels]`, where each channel is a group of its own, and
    `kernel[features, *taps, channels * multiplier]` give
    `[*space, 1, channels * multiplier]`.
    """
    outputs = kernel.shape[-1]
    multiplier = outputs // x.shape[-1]
    padded = pad(x, windows)
    spans = [(w.taps - 1) * w.dilation + 1 for w in windows]
    steps = [1, *(w.dilation for w in windows), 1]

    def at(starts: jax.Array) -> jax.Array:
        block = lax.dynamic_slice(padded, starts, (len(x), *spans, x.shape[-1]))
        elements = lax.slice(block, [0] * block.ndim, block.shape, steps)
        if multiplier > 1:
            elements = jnp.repeat(elements, multiplier, axis=-1)
        return _sum_of_products(elements, kernel)

    # In a loop: XLA would compile the sums of each position.
    space, strides = [w.outputs for w in windows], [w.stride for w in windows]
    positions = np.array(list(np.ndindex(1, *space, 1)), np.int32)
    results = lax.map(at, positions * np.array([1, *strides, 1], np.int32))
    return results.reshape(*space, 1, outputs)


def _at_outputs(x: jax.Array, windows: Sequence[Window]) -> Iterator[jax.Array]:
    """Yield, for each output position, the padded input that the kernel meets."""
    for position in itertools.product(*(range(w.outputs) for w in windows)):
        yield slice_window(
            x,
            [p * w.stride for p, w in zip(position, windows, strict=True)],
            [w.taps for w in windows],
            [w.dilation for w in windows],
        )


def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute `sum(x * y)` over all but the last axis, as a tree of sums.

    On CPUs, XLA vectorises elementwise sums of slices, but not reductions over leading
    axes.
    """
    product: jax.Array | None = None
    # Spatial axes first: the leading axis may be sharded over devices.
    for axis in [*range(1, x.ndim - 1), 0]:
        while (size := x.shape[axis]) > 1:
            terms = min(_TERMS, size)
            length, rest = divmod(size, terms)
            parts = []
            for start in [*range(0, terms * length, length), *range(size - rest, size)]:
                stop = start + (length if start < terms * length else 1)
                part = lax.slice_in_dim(x, start, stop, axis=axis)
                if product is None:
                    part = part * lax.slice_in_dim(y, start, stop, axis=axis)
                if part.shape[axis] < length:
                    edges = [(0, 0)] * part.ndim
                    edges[axis] = (0, length - part.shape[axis])
                    part = jnp.pad(part, edges)
                parts.append(part)
            total = functools.reduce(operator.add, parts)
            # Without the barrier XLA would fuse the steps, and repeat all terms.
            x = product = lax.optimization_barrier(total)
    return (x if product is not None else x * y).reshape(-1)
