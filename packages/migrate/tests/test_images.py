"""Images, paddings and files of weights: what a port gives is TensorFlow's."""

from typing import Any

import keras
import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

START = "import tensorflow as tf\nimport numpy as np\n"
IMAGE = np.random.default_rng(0).random((6, 7, 3)).astype("float32")


def results(call: str) -> list[Any]:
    """What a call gives in a step and in a pipeline."""
    text, left = ported(
        f"{START}def f(x): return {call}\n"
        "def g(x): return f(x)\n"
        "def made(x):\n    d = tf.data.Dataset.from_tensor_slices(x[None])\n"
        "    return next(iter(d.map(lambda x: {call}).batch(1)))\n".replace(
            "{call}", call
        )
    )
    assert left == []
    names = executed(text)
    return [np.asarray(names["f"](IMAGE)), np.asarray(names["made"](IMAGE))[0]]


def resized(size: tuple[int, int], interpolation: str, **options: bool) -> np.ndarray:
    image = IMAGE.astype("float32")
    return np.asarray(
        keras.ops.image.resize(image, size, interpolation=interpolation, **options)
    )


@pytest.mark.parametrize(
    ("call", "total"),  # What TensorFlow 2.21 gives.
    [
        ("tf.pad(x, [[1, 1], [2, 0], [0, 0]], 'REFLECT')", "pad"),
        ("tf.pad(x, tf.constant([[1, 1], [2, 0], [0, 0]]), mode='SYMMETRIC')", "sym"),
        ("tf.image.flip_left_right(x)", "flip"),
        ("tf.image.resize(x, (4, 5), method='nearest')", "nearest"),
        ("tf.image.resize(x, (9, 4), tf.image.ResizeMethod.BILINEAR)", "bilinear"),
        ("tf.image.resize(x, (9, 4), 'bicubic')", "bicubic"),
        (
            "tf.image.resize(x, [3, 3], tf.image.ResizeMethod.LANCZOS3, "
            "antialias=True)",
            "lanczos",
        ),
        ("tf.image.rgb_to_grayscale(x)", "gray"),
        ("tf.image.grayscale_to_rgb(x[..., :1])", "rgb"),
    ],
)
def test_images_are_the_same_in_steps_and_pipelines(call: str, total: str) -> None:
    expected = {
        "pad": lambda: np.pad(IMAGE, [(1, 1), (2, 0), (0, 0)], "reflect"),
        "sym": lambda: np.pad(IMAGE, [(1, 1), (2, 0), (0, 0)], "symmetric"),
        "flip": lambda: IMAGE[:, ::-1],
        "nearest": lambda: IMAGE[[0, 2, 3, 5]][:, [0, 2, 3, 4, 6]],
        "bilinear": lambda: np.asarray(keras.ops.image.resize(IMAGE, (9, 4))),
        "bicubic": lambda: resized((9, 4), "bicubic"),
        "lanczos": lambda: resized((3, 3), "lanczos3", antialias=True),
        "gray": lambda: IMAGE @ np.array([[0.2989], [0.587], [0.114]], "float32"),
        "rgb": lambda: np.repeat(IMAGE[..., :1], 3, axis=-1),
    }[total]()
    for result in results(call):
        np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        "tf.pad(x, margins())",
        "tf.image.resize(x, (2, 2), method='area')",
        "tf.image.resize(x, (2, 2), preserve_aspect_ratio=True)",
        "tf.pad(x, [[1, 1]], mode=m)",
        "tf.map_fn(tf.image.resize, x)",
        "tf.compat.v1.random_normal_initializer()",
        "tf.compat.v1.train.exponential_decay(0.1, step, 10, 0.9)",
    ],
)
def test_what_has_no_counterpart_is_left(call: str) -> None:
    constant = "def margins(): pass\nP = tf.constant(margins())\n"
    call = call.replace("margins()", "P")
    assert len(ported(f"{START}{constant}def f(x, m, step): return {call}")[1]) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "i = tf.random_normal_initializer()",
            "i = keras.initializers.RandomNormal()",
        ),
        (
            "i = tf.random_uniform_initializer(0, 1)",
            "i = keras.initializers.RandomUniform(0, 1)",
        ),
    ],
)
def test_initializers_and_rates(before: str, after: str) -> None:
    text, left = ported(f"{START}{before}")
    assert after in text
    assert left == []
