"""Chooses the form of each convolution on CPUs, from measurements.

XLA computes most convolutions on CPUs with Eigen (an option of `settings`), which is
fast, and others with scalar loops. A form is a way to compute a convolution by other
operations; it replaces scalar loops, and a few of Eigen's convolutions. In comments,
`92.6 -> 2.7` are the milliseconds of XLA and of the form, on two cores with JAX 0.10.2.
Unless noted, they are for float32, 3x3 kernels and batches of 16.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from replicax.cpu.windows import Window, widened, windows_of

__all__ = ["Form", "choose", "num_strips", "spatial_windows"]

Form = Literal["patches", "groups", "outputs", "strips", "sums", "taps"]

# Maximal weights of one tap in a group. A depthwise layer of 32 channels at 48x48, with
# 1 weight: 92.6 -> 2.7, its input gradient 73.2 -> 2.5. Groups of 4x4 at 24x24:
# 14.4 -> 1.9.
_GROUP_WEIGHTS = 16
# A kernel with this many times the elements of input and result is not transposed. On
# one core, 512 channels at 2x2, batch 8: 108 -> 0.9; the input gradient takes 1.2, or
# 9.5 if the kernel is transposed. With half as many weights, 128 channels at 8x8, the
# form is not faster than XLA.
_MANY_WEIGHTS = 4
# Maximal products in an element of a layer's output, for any number of outputs and for
# few. On one core, forward and back, batch 64: 3x3 kernels of one channel, 64 outputs
# at 28x28: 5.4 -> 3.7; 3x3 of three channels, 32 outputs at 32x32: 8.1 -> 5.6; 5x5 of
# one channel, 6 outputs at 28x28: 6.3 -> 1.5. Batch 16, 7x7 of one channel, 32 outputs
# at 64x64: 13.9 -> 11.0. With more products or outputs the form can be slower.
_FEW_TERMS, _TERMS_OF_FEW_OUTPUTS, _FEW_OUTPUTS = 9, 49, 32
# Maximal number of taps, outputs or phases: the program has operations for each.
_MOST = 128
# With fewer features Eigen is slow; in filter gradients the images are the features. On
# one core, 32 to 32 channels at 64x64: 1 image 6.4 -> 1.2, 2 images 6.5 -> 2.2,
# 4 images 7.6 -> 4.6, 7 images 9.3 -> 8.9. With 8 images, strips are slower.
_FEW_IMAGES = 8
# Maximal strips of an image. Neighbours share rows, which are copied.
_MOST_STRIPS = 16


def spatial_windows(
    lhs: Any, rhs: Any, params: Mapping[str, Any]
) -> tuple[Window, ...]:
    """Compute the windows of a convolution; `lhs` and `rhs` are arrays or types."""
    lhs_spec, rhs_spec, _ = params["dimension_numbers"]
    return windows_of(
        [lhs.shape[i] for i in lhs_spec[2:]],
        [rhs.shape[i] for i in rhs_spec[2:]],
        strides=params["window_strides"],
        padding=params["padding"],
        input_dilation=params["lhs_dilation"],
        dilation=params["rhs_dilation"],
    )


def choose(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> Form | None:
    """Choose the form of a convolution of these types; None: leave it to XLA."""
    if not _is_supported(lhs, rhs, out, params):
        return None
    windows = spatial_windows(lhs, rhs, params)
    taps = math.prod(w.taps for w in windows)
    outputs = math.prod(w.outputs for w in windows)
    in_phases = math.prod(w.input_dilation for w in windows if w.stride == 1)
    if min(taps, outputs) > _MOST or in_phases > _MOST:
        return None
    _, rhs_spec, _ = params["dimension_numbers"]
    features, all_outputs = rhs.shape[rhs_spec[1]], rhs.shape[rhs_spec[0]]
    feature_groups = params["feature_group_count"]
    batch_groups = params["batch_group_count"]
    if feature_groups > 1:
        small = features * (all_outputs // feature_groups) <= _GROUP_WEIGHTS
        if small and taps <= _MOST:
            return "groups"
        # Others, such as 4 groups of 32: 4.0 -> 9.8, but in volumes 36.4 -> 11.8.
        return "patches" if len(windows) == 3 and taps <= _MOST else None
    if batch_groups > 1:
        return _choose_for_batch_groups(lhs, params, all_outputs, taps, outputs)
    return _choose_without_groups(lhs, rhs, out, params, windows)


def _choose_without_groups(
    lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any], windows: Sequence[Window]
) -> Form | None:
    taps = math.prod(w.taps for w in windows)
    outputs = math.prod(w.outputs for w in windows)
    _, rhs_spec, _ = params["dimension_numbers"]
    features, all_outputs = rhs.shape[rhs_spec[1]], rhs.shape[rhs_spec[0]]
    # In gradients of kernels, images are contracted, so they come first.
    is_of_kernel = rhs_spec[1] == 0
    has_few_outputs = all_outputs <= _FEW_OUTPUTS and not is_of_kernel
    most_terms = _TERMS_OF_FEW_OUTPUTS if has_few_outputs else _FEW_TERMS
    if taps > 1 and features * taps <= most_terms:
        return "groups"
    # In input gradients, the kernel's outputs come before its features.
    is_swapped = rhs_spec[1] > rhs_spec[0]
    if outputs == 1 < taps and is_of_kernel:
        return "outputs"  # One product of the arrays as they are.
    inputs, weights, results = (math.prod(x.shape) for x in (lhs, rhs, out))
    has_many_weights = weights >= _MANY_WEIGHTS * max(inputs, results)
    if has_many_weights and 1 < taps <= _MOST:
        return "taps" if is_swapped else "patches"
    is_largest = results >= _MANY_WEIGHTS * max(inputs, weights)
    if taps == 1:  # One matrix product; the form "outputs" would compile several.
        return "taps" if is_swapped else "patches"
    if (is_largest and 1 < outputs <= _MOST) or _is_of_few_channels(
        lhs, params, all_outputs, taps, outputs
    ):
        return "outputs"  # Gradients of the kernels.
    # 8 volumes of 12x12x12, 16 to 32 channels: 13.4 -> 2.4, the input gradient
    # 48 -> 12, the filter gradient 29 -> 21.
    is_volume = len(windows) == 3 and min(taps, outputs) > 1
    if is_volume or _is_slow_by_xla(windows, taps, outputs):
        return "outputs" if outputs < taps or taps > _MOST else "patches"
    strips = num_strips(features, windows)
    # Otherwise the rule above would choose patches for the convolution of the strips.
    is_left_to_xla = not has_many_weights or taps // strips > _MOST
    return "strips" if outputs < taps and strips > 1 and is_left_to_xla else None


def num_strips(images: int, windows: Sequence[Window]) -> int:
    """Compute into how many strips `by_strips` divides an image; 1: it is not used."""
    rows = windows[0].taps
    if images >= _FEW_IMAGES or any(w.input_dilation > 1 for w in windows):
        return 1
    divisors = (n for n in range(2, _MOST_STRIPS + 1) if rows % n == 0)
    return next((n for n in divisors if n * images >= _FEW_IMAGES), 1)


def _is_supported(lhs: Any, rhs: Any, out: Any, params: Mapping[str, Any]) -> bool:
    """Whether the forms support these types: floats of one dtype, not empty."""
    if not jnp.issubdtype(lhs.dtype, jnp.floating) or lhs.dtype.itemsize < 2:
        return False
    return (
        lhs.dtype == rhs.dtype
        and out.dtype in (lhs.dtype, widened(lhs.dtype))
        and 1 <= len(lhs.shape) - 2 <= 3
        and 0 not in (*lhs.shape, *rhs.shape, *out.shape)
    )


def _choose_for_batch_groups(
    lhs: Any, params: Mapping[str, Any], all_outputs: int, taps: int, outputs: int
) -> Form | None:
    """Choose the form for groups of the batch, as in filter gradients with groups.

    XLA has no fast code for them: 4 groups of 32 channels at 8x8: 280 -> 4.4, 32
    groups of 4 channels: 2105 -> 4.3; depthwise at 48x48 with 96 channels and strides
    2x2: 85 -> 15, with two outputs for each channel: 2958 -> 9.7.
    """
    groups = params["batch_group_count"]
    if outputs > min(taps, _MOST):
        return "patches" if taps <= _MOST else None
    batch = lhs.shape[params["dimension_numbers"][0][0]]
    if batch == groups and all_outputs // groups <= _GROUP_WEIGHTS:
        return "sums"
    return "outputs"


def _is_of_few_channels(
    lhs: Any, params: Mapping[str, Any], all_outputs: int, taps: int, outputs: int
) -> bool:
    """Whether this is the filter gradient of a layer of few channels, e.g. the first.

    One channel at 28x28, batch 256: 32 outputs 14.0 -> 2.2, 16 outputs 4.0 -> 3.4.
    Three at 32x32, batch 64: 32 outputs 6.2 -> 2.6, but 16 outputs 1.9 -> 2.8.
    """
    channels = lhs.shape[params["dimension_numbers"][0][0]]
    return outputs < taps and channels * outputs <= all_outputs


def _is_slow_by_xla(windows: Sequence[Window], taps: int, outputs: int) -> bool:
    if outputs == 1:
        # Filter gradients of 1x1 layers: at 48x48, 16 to 96 channels: 15.9 -> 2.0; the
        # layers themselves, which are one product: 4.2 -> 2.1.
        return True
    # XLA swaps input and kernel if the kernel is larger, and computes the result with
    # scalar loops: 512 channels at 2x2: 560 -> 13, the input gradient 608 -> 18.
    return taps > math.prod(w.size for w in windows)
