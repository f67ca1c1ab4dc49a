"""Computes convolutions of volumes as one convolution of planes, which XLA does faster.

The first spatial dimension is folded into others. Each of its taps adds the planes that
it meets as further features. A kernel gradient has few outputs and many taps in it, so
there each output adds the planes that it reads as further elements of the batch.

Times in ms of 8 volumes of 12x12x12, 16 to 32 channels, 3x3x3, on two cores: forward
6.9 with `forms` and 2.9 here, gradient of the input 18.4 and 4.5, of the kernel 10.1
and 6.0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.cpu.forms import pad
from replicax.cpu.windows import Window

__all__ = ["by_planes"]


def by_planes(
    lhs: jax.Array, rhs: jax.Array, windows: Sequence[Window], params: Mapping[str, Any]
) -> jax.Array:
    """Compute `lax.conv_general_dilated_p` of volumes without groups."""
    first, *others = windows
    (batch, features, *space), (outputs, inputs, *taps), out = params[
        "dimension_numbers"
    ]
    by_tap = first.taps <= first.outputs
    # The dimension that takes the first spatial one comes before it, in order: then no
    # data move for layers with channels last.
    ends = (batch, features) if by_tap else (features, batch)
    alone = [first, *(Window(size=w.size, taps=1) for w in others)]
    x = pad(jnp.transpose(lhs, (ends[0], *space, ends[1])), alone)
    of_taps, of_outputs = (first.taps, first.dilation), (first.outputs, first.stride)
    numbers_of = (of_taps, of_outputs) if by_tap else (of_outputs, of_taps)
    (number, apart), (count, step) = numbers_of
    planes = [
        lax.slice_in_dim(x, i * apart, i * apart + (count - 1) * step + 1, step, axis=1)
        for i in range(number)
    ]
    x = jnp.concatenate(planes, -1)
    x = x.reshape(-1, *x.shape[2:])
    if by_tap:
        kernel = jnp.transpose(rhs, (*taps[1:], taps[0], inputs, outputs))
        kernel = kernel.reshape(*kernel.shape[:2], -1, kernel.shape[-1])
        numbers = ("NHWC", "HWIO", "NHWC")
    else:
        kernel = jnp.transpose(rhs, (inputs, *taps, outputs))
        kernel = kernel.reshape(-1, *kernel.shape[2:])
        numbers = ("CHWN", "IHWO", "HWNC")
    y = lax.conv_general_dilated(
        x,
        kernel,
        [w.stride for w in others],
        [(w.low, w.high) for w in others],
        lhs_dilation=[w.input_dilation for w in others],
        rhs_dilation=[w.dilation for w in others],
        dimension_numbers=numbers,
        precision=params["precision"],
    )
    if by_tap:  # To the batch, three spatial dimensions, outputs.
        y = y.reshape(-1, first.outputs, *y.shape[1:])
    else:
        y = y.reshape(*y.shape[:2], first.outputs, -1, y.shape[-1])
        y = jnp.transpose(y, (3, 2, 0, 1, 4))
    order = (out[0], *out[2:], out[1])
    return jnp.transpose(y, sorted(range(5), key=order.__getitem__))
