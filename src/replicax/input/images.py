"""NumPy functions that edit images in input pipelines, after `tf.image`.

Images are `[..., H, W, C]`, with three channels for colours. Floats range from 0 to 1,
integers from 0 to the maximum of their dtype. Results have the image's dtype.
Random functions take `rng`: Grain's `random_map` makes a generator for each example,
from the dataset's seed, the example's position and the epoch.
"""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "central_crop",
    "convert_image_dtype",
    "per_image_standardization",
    "random_brightness",
    "random_contrast",
    "random_crop",
    "random_flip_left_right",
    "random_flip_up_down",
    "random_hue",
    "random_saturation",
    "resize_with_crop_or_pad",
    "rgb_to_grayscale",
]

_Image: TypeAlias = "np.ndarray"

_HEIGHT, _WIDTH, _CHANNEL = -3, -2, -1


def convert_image_dtype(
    image: _Image, dtype: DTypeLike, saturate: bool = False
) -> _Image:
    """Convert an image to another dtype, and scale its values to that dtype's range.

    With `saturate`, values out of range are clipped; otherwise integers overflow.

    Example:
        >>> convert_image_dtype(np.array([0, 51, 255], "uint8"), "uint16")
        array([    0, 13056, 65280], dtype=uint16)
    """
    image, dtype = np.asarray(image), jnp.dtype(dtype)  # Accepts bfloat16.
    if image.dtype == dtype:
        return image
    if _has_floats(image.dtype):
        if _has_floats(dtype):
            return image.astype(dtype)
        limits = np.iinfo(dtype)
        scaled = image * np.asarray(limits.max + 0.5, image.dtype)
        low, high = (limits.min, limits.max) if saturate else (-np.inf, np.inf)
        return np.clip(scaled.astype("float64"), low, high).astype(dtype)
    largest = np.iinfo(image.dtype).max
    if _has_floats(dtype):
        return image.astype(dtype) * np.asarray(1 / largest, dtype)
    limits = np.iinfo(dtype)
    factor = 1
    if largest > limits.max:
        image = image // ((largest + 1) // (limits.max + 1))
    else:
        factor = (limits.max + 1) // (largest + 1)
    if saturate:
        image = np.clip(image.astype("int64"), limits.min, limits.max)
    return image.astype(dtype) * np.asarray(factor).astype(dtype)


def _has_floats(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _as_float(image: _Image) -> _Image:
    """Convert integers to float32 in 0..1."""
    image = np.asarray(image)
    return image if _has_floats(image.dtype) else convert_image_dtype(image, "float32")


def _with_dtype_of(values: _Image, image: _Image) -> _Image:
    return convert_image_dtype(values, np.asarray(image).dtype, saturate=True)


def adjust_brightness(image: _Image, delta: float) -> _Image:
    """Add `delta`, from -1 to 1, to all values of an image.

    Example:
        >>> adjust_brightness(np.full((1, 1, 1), 100, "uint8"), 0.2).item()
        151
    """
    return _with_dtype_of(_as_float(image) + np.float32(delta), image)


def adjust_contrast(image: _Image, contrast_factor: float) -> _Image:
    """Multiply each value's distance from its channel's mean.

    Example:
        >>> row = np.array([[[0.25], [0.75]]], "float32")
        >>> adjust_contrast(row, 2.0).ravel().tolist()
        [0.0, 1.0]
    """
    values = _as_float(image)
    mean = values.mean(axis=(_HEIGHT, _WIDTH), keepdims=True)
    return _with_dtype_of((values - mean) * np.float32(contrast_factor) + mean, image)


def adjust_saturation(image: _Image, saturation_factor: float) -> _Image:
    """Multiply the saturation of an RGB image, as in HSV; 0 makes it gray.

    Example:
        >>> pixel = np.array([[[1.0, 0.5, 0.0]]], "float32")
        >>> adjust_saturation(pixel, 0.5).ravel().tolist()
        [1.0, 0.75, 0.5]
    """
    values = _as_float(image)
    value = values.max(axis=_CHANNEL, keepdims=True)
    chroma = value - values.min(axis=_CHANNEL, keepdims=True)
    # The saturation, chroma / value, must stay at most 1. As in TensorFlow, it is 0
    # where no channel is positive.
    positive = np.maximum(value, 0)
    max_factor = np.divide(positive, chroma, out=np.ones_like(value), where=chroma > 0)
    factor = np.minimum(np.float32(max(saturation_factor, 0)), max_factor)
    return _with_dtype_of(value - (value - values) * factor, image)


def adjust_hue(image: _Image, delta: float) -> _Image:
    """Rotate the hue of an RGB image, as in HSV, by a fraction of the colour circle.

    Example:
        >>> red = np.array([[[255, 0, 0]]], "uint8")
        >>> adjust_hue(red, 1 / 3).ravel().tolist()
        [0, 255, 0]
    """
    values = _as_float(image)
    value = values.max(axis=_CHANNEL, keepdims=True)
    chroma = value - values.min(axis=_CHANNEL, keepdims=True)
    scaled = np.divide(values, chroma, out=np.zeros_like(values), where=chroma > 0)
    red, green, blue = np.split(scaled, 3, axis=_CHANNEL)
    # The hue in sixths of the circle: 0 is red, 2 green, 4 blue.
    is_red, is_green = values[..., :1] == value, values[..., 1:2] == value
    hue = np.where(is_green, blue - red + 2, red - green + 4)
    hue = np.where(is_red, green - blue, hue) + np.float32(6 * delta)
    distance = (np.array([5, 3, 1], values.dtype) + hue) % 6
    weight = np.clip(np.minimum(distance, 4 - distance), 0, 1)
    return _with_dtype_of(value - chroma * weight, image)


def per_image_standardization(image: _Image) -> _Image:
    """Scale each image to mean 0 and variance 1 in float32; constant images to 0.

    Example:
        >>> per_image_standardization(np.array([[[0], [2]]])).ravel().tolist()
        [-1.0, 1.0]
    """
    values = np.asarray(image).astype("float32")
    axes = (_HEIGHT, _WIDTH, _CHANNEL)
    min_deviation = np.float32(1 / np.sqrt(np.prod(values.shape[-3:])))
    deviation = np.maximum(values.std(axis=axes, keepdims=True), min_deviation)
    return (values - values.mean(axis=axes, keepdims=True)) / deviation


def rgb_to_grayscale(image: _Image) -> _Image:
    """Convert an RGB image to one channel of brightness.

    Example:
        >>> rgb_to_grayscale(np.full((2, 2, 3), 200, "uint8")).shape
        (2, 2, 1)
    """
    image = np.asarray(image)
    weights = np.array([0.2989, 0.5870, 0.1140], "float32")
    gray = np.tensordot(convert_image_dtype(image, "float32"), weights, (-1, 0))
    return convert_image_dtype(gray[..., None], image.dtype)


def central_crop(image: _Image, fraction: float) -> _Image:
    """Crop to the centre: `fraction`, above 0 and at most 1, of height and width.

    Example:
        >>> central_crop(np.zeros((8, 6, 3)), 0.5).shape
        (4, 4, 3)
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0, and at most 1.")
    image = np.asarray(image)
    height, width = (n - 2 * int((n - n * fraction) / 2) for n in image.shape[-3:-1])
    return resize_with_crop_or_pad(image, height, width)


def resize_with_crop_or_pad(image: _Image, height: int, width: int) -> _Image:
    """Crop an image to its centre, or pad it with 0 around it, on each axis.

    Example:
        >>> resize_with_crop_or_pad(np.ones((1, 4, 1)), 3, 2)[..., 0]
        array([[0., 0.],
               [1., 1.],
               [0., 0.]])
    """
    image = np.asarray(image)
    for axis, size in ((_HEIGHT, height), (_WIDTH, width)):
        extra = size - image.shape[axis]
        if extra < 0:
            start = -extra // 2
            image = np.take(image, range(start, start + size), axis=axis)
        else:
            padding = [(0, 0)] * image.ndim
            padding[axis] = (extra // 2, extra - extra // 2)
            image = np.pad(image, padding)
    return image


def random_brightness(
    image: _Image, max_delta: float, rng: np.random.Generator
) -> _Image:
    """Apply `adjust_brightness` with a number from `-max_delta` to `max_delta`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> random_brightness(np.zeros((2, 2, 3), "uint8"), 0.1, rng).shape
        (2, 2, 3)
    """
    return adjust_brightness(image, rng.uniform(-max_delta, max_delta))


def random_contrast(
    image: _Image, lower: float, upper: float, rng: np.random.Generator
) -> _Image:
    """Apply `adjust_contrast` with a factor from `lower` to `upper`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> random_contrast(np.zeros((2, 2, 3), "uint8"), 0.8, 1.2, rng).shape
        (2, 2, 3)
    """
    return adjust_contrast(image, _factor(lower, upper, rng))


def random_hue(image: _Image, max_delta: float, rng: np.random.Generator) -> _Image:
    """Apply `adjust_hue` with a number from `-max_delta` to `max_delta`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> random_hue(np.zeros((2, 2, 3), "uint8"), 0.1, rng).shape
        (2, 2, 3)
    """
    return adjust_hue(image, rng.uniform(-max_delta, max_delta))


def random_saturation(
    image: _Image, lower: float, upper: float, rng: np.random.Generator
) -> _Image:
    """Apply `adjust_saturation` with a factor from `lower` to `upper`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> random_saturation(np.zeros((2, 2, 3), "uint8"), 0.5, 1.5, rng).shape
        (2, 2, 3)
    """
    return adjust_saturation(image, _factor(lower, upper, rng))


def _factor(lower: float, upper: float, rng: np.random.Generator) -> float:
    if not 0 <= lower < upper:
        raise ValueError(
            f"lower={lower}, upper={upper}: pass factors that are not negative, the "
            "smaller one first."
        )
    return rng.uniform(lower, upper)


def random_flip_left_right(image: _Image, rng: np.random.Generator) -> _Image:
    """Mirror each image with probability 0.5.

    Example:
        >>> row, rng = np.array([[[1], [2]]]), np.random.default_rng(0)
        >>> [random_flip_left_right(row, rng).ravel().tolist() for _ in range(2)]
        [[1, 2], [2, 1]]
    """
    return _random_flip(image, _WIDTH, rng)


def random_flip_up_down(image: _Image, rng: np.random.Generator) -> _Image:
    """Flip each image upside down with probability 0.5.

    Example:
        >>> column, rng = np.array([[[1]], [[2]]]), np.random.default_rng(0)
        >>> [random_flip_up_down(column, rng).ravel().tolist() for _ in range(2)]
        [[1, 2], [2, 1]]
    """
    return _random_flip(image, _HEIGHT, rng)


def _random_flip(image: _Image, axis: int, rng: np.random.Generator) -> _Image:
    image = np.asarray(image)
    is_flipped = np.asarray(rng.random(image.shape[:_HEIGHT]) < 0.5)
    return np.where(is_flipped[..., None, None, None], np.flip(image, axis=axis), image)


def random_crop(
    image: _Image, size: tuple[int, ...], rng: np.random.Generator
) -> _Image:
    """Crop an image, or any array, to the shape `size` at a random position.

    Example:
        >>> random_crop(np.zeros((8, 8, 3)), (6, 6, 3), np.random.default_rng(0)).shape
        (6, 6, 3)
    """
    image = np.asarray(image)
    crops = []
    for old, new in zip(image.shape, map(int, size), strict=True):
        start = rng.integers(0, old - new + 1)
        crops.append(slice(start, start + new))
    return image[tuple(crops)]
