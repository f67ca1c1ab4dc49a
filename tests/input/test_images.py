"""Edited images are equal to those of `tf.image` in TensorFlow 2.21."""

import jax.numpy as jnp
import numpy as np
import pytest

from replicax.input import images

INTEGERS = np.array([[[10, 200, 90], [255, 0, 40]]], "uint8")
FLOATS = np.array([[[0.1, 0.8, 0.3], [0.9, 0.2, 0.4]]], "float32")


@pytest.mark.parametrize(
    ("name", "value", "integers", "floats"),
    [
        (
            "brightness",
            0.2,
            [[[61, 251, 141], [255, 51, 91]]],
            [[[0.3, 1.0, 0.5], [1.1, 0.4, 0.6]]],
        ),
        (
            "contrast",
            1.5,
            [[[0, 250, 102], [255, 0, 27]]],
            [[[-0.1, 0.95, 0.275], [1.1, 0.05, 0.425]]],
        ),
        (
            "hue",
            0.1,
            [[[10, 196, 200], [255, 113, 0]]],
            [[[0.1, 0.8, 0.72], [0.9, 0.42, 0.2]]],
        ),
        (
            "saturation",
            2.0,
            [[[0, 200, 84], [255, 0, 40]]],
            [[[0.0, 0.8, 0.2286], [0.9, 0.0, 0.2571]]],
        ),
    ],
)
def test_adjusted_images(
    name: str, value: float, integers: list[object], floats: list[object]
) -> None:
    adjust = getattr(images, f"adjust_{name}")
    assert adjust(INTEGERS, value).tolist() == integers
    assert adjust(INTEGERS, value).dtype == INTEGERS.dtype
    np.testing.assert_allclose(adjust(FLOATS, value), floats, atol=1e-4)
    both = np.stack([FLOATS, FLOATS[:, ::-1]])
    np.testing.assert_allclose(adjust(both, value)[0], floats, atol=1e-4)


def test_pixels_without_a_positive_channel_become_grey() -> None:
    dark = np.array([[[-0.2, -0.1, -0.3]]], "float32")
    grey = np.full((1, 1, 3), -0.1, "float32")
    np.testing.assert_array_equal(images.adjust_saturation(dark, 1.0), grey)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("contrast", (-1, 1), "lower=-1, upper=1"),
        ("saturation", (1.5, 0.5), "lower=1.5, upper=0.5"),
    ],
)
def test_ranges_that_tensorflow_refuses(
    name: str, values: tuple[float, ...], text: str
) -> None:
    change = getattr(images, f"random_{name}")
    with pytest.raises(ValueError, match=text):
        change(FLOATS, *values, np.random.default_rng(0))


def test_standardized_images() -> None:
    standard = images.per_image_standardization(INTEGERS)
    expected = [[[-0.9244, 1.0454, -0.0950], [1.6156, -1.0281, -0.6134]]]
    np.testing.assert_allclose(standard, expected, atol=1e-4)
    assert not images.per_image_standardization(np.ones((2, 2, 3))).any()


@pytest.mark.parametrize(
    ("image", "dtype", "saturate", "expected"),
    [
        (FLOATS[0, 0], "uint8", False, [25, 204, 76]),
        (np.array([0, 255], "uint8"), "bfloat16", False, [0, 1]),
        (np.array([0, 1], jnp.bfloat16), "uint8", True, [0, 255]),
        (INTEGERS[0, 0], "uint16", True, [2560, 51200, 23040]),
        (np.array([-1.0, 2.0], "float32"), "uint8", True, [0, 255]),
        (np.array([300, -5, 70], "int16"), "uint8", True, [2, 0, 0]),
        (INTEGERS[0, 0], "uint8", False, [10, 200, 90]),
    ],
)
def test_dtypes(
    image: np.ndarray, dtype: str, saturate: bool, expected: list[int]
) -> None:
    converted = images.convert_image_dtype(image, dtype, saturate=saturate)
    assert converted.tolist() == expected
    assert converted.dtype == dtype


def test_random_changes_depend_on_the_generator() -> None:
    def changed(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        image = images.random_brightness(FLOATS, 0.2, rng)
        image = images.random_contrast(image, 0.5, 1.5, rng)
        image = images.random_hue(image, 0.1, rng)
        return images.random_saturation(image, 0.5, 1.5, rng)

    np.testing.assert_array_equal(changed(1), changed(1))
    assert not np.allclose(changed(1), changed(2))


@pytest.mark.parametrize("axis", [2, 1])
def test_each_image_of_several_is_flipped_by_itself(axis: int) -> None:
    flip = [images.random_flip_up_down, images.random_flip_left_right][axis - 1]
    several = np.arange(64 * 12).reshape(64, 2, 2, 3)
    flipped = flip(several, np.random.default_rng(0))
    is_flipped = (flipped != several).any(axis=(1, 2, 3))
    assert 10 < is_flipped.sum() < 54
    turned = np.flip(several, axis=axis)[is_flipped]
    np.testing.assert_array_equal(flipped[is_flipped], turned)
    assert flip(several[0], np.random.default_rng(0)).shape == (2, 2, 3)


def test_crops() -> None:
    image = np.arange(5 * 4).reshape(5, 4, 1)
    rng = np.random.default_rng(0)
    crops = [images.random_crop(image, (3, 2, 1), rng) for _ in range(100)]
    assert {crop[0, 0, 0] for crop in crops} == {0, 1, 2, 4, 5, 6, 8, 9, 10}
    assert {crop[2, 1, 0] - crop[0, 0, 0] for crop in crops} == {9}
    with pytest.raises(ValueError, match="high <= 0"):
        images.random_crop(image, (6, 2, 1), rng)


COUNTED = np.arange(63, dtype="uint8").reshape(7, 3, 3) * 4


def test_brightness_of_integers() -> None:
    assert images.rgb_to_grayscale(INTEGERS).tolist() == [[[130], [80]]]
    gray = images.rgb_to_grayscale(FLOATS)
    np.testing.assert_allclose(gray[0, :, 0], [0.53369, 0.43201], atol=1e-6)


@pytest.mark.parametrize(
    ("fraction", "rows", "columns"),
    [(0.5, (1, 6), (0, 3)), (0.33, (2, 5), (1, 2)), (1.0, (0, 7), (0, 3))],
)
def test_central_crops(
    fraction: float, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    cropped = images.central_crop(COUNTED, fraction)
    np.testing.assert_array_equal(cropped, COUNTED[slice(*rows), slice(*columns)])
    with pytest.raises(ValueError, match="fraction=0 must be above 0"):
        images.central_crop(COUNTED, 0)


def test_images_are_cropped_and_padded_around_their_middle() -> None:
    fitted = images.resize_with_crop_or_pad(COUNTED[None], 4, 6)
    assert fitted.shape == (1, 4, 6, 3)
    np.testing.assert_array_equal(fitted[0, :, 1:4], COUNTED[1:5])
    assert not fitted[0, :, [0, 4, 5]].any()
