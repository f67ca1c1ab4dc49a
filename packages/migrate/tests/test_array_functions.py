"""Functions of arrays that Keras has by another name or form compute the same."""

from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

X = np.arange(24.0, dtype="float32").reshape(2, 3, 4)
IDS = np.array([0, 2, 2])
ROWS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0]], "float32")
IMAGES = np.arange(48.0, dtype="float32").reshape(2, 2, 3, 4) ** 2


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("tf.split(rows, (1, 2))[1]", ROWS[1:]),
        ("tf.split(rows, num_or_size_splits=[1, 0, 1], axis=1)[2]", ROWS[:, 1:]),
        (
            "tf.keras.backend.relu(rows - 2, alpha=0.5, max_value=3)[:2]",
            [[-0.5, 0], [1, 2]],
        ),
        ("tf.math.softmax(rows * 0)[0]", [0.5, 0.5]),
        ("tf.math.atan2(rows, rows)[0] * 4", [np.pi, np.pi]),
        ("tf.linalg.matvec(rows, tf.constant([1.0, 2.0]))", [5, 11, 21]),
        ("tf.sequence_mask([1, 3], 3)", [[1, 0, 0], [1, 1, 1]]),
        ("tf.scan(lambda a, v: a + v, tf.range(4), initializer=1)", [1, 2, 4, 7]),
        (
            "tf.scan(lambda a, v: a * v[0] + v[1], (rows, rows), rows[0])[-1]",
            [50.0, 232.0],
        ),
        ("tf.foldl(lambda a, v: a - v, tf.range(4), 10)", 4),
        (
            "tf.map_fn(lambda v: v[0] + 1, rows, fn_output_signature=tf.float32)",
            [2, 4, 6],
        ),
        (
            "tf.math.confusion_matrix([0, 2, 2, 1], [0, 2, 1, 1], num_classes=3)",
            [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
        ),
        ("tf.math.unsorted_segment_mean(rows, ids, 3)", [[1, 2], [0, 0], [4, 6]]),
        ("6 / tf.math.unsorted_segment_mean(rows, ids, 3)[0]", [6, 3]),
        ("tf.math.unsorted_segment_max(rows, ids, 3)[::2]", [[1, 2], [5, 8]]),
        (
            "tf.nn.depth_to_space(tf.reshape(range(8), [1, 1, 2, 4]), 2)[0, ..., 0]",
            [[0, 1, 4, 5], [2, 3, 6, 7]],
        ),
        ("tf.float16.max / 2 + tf.dtypes.uint8.min", 65504 / 2),
        ("1 / tf.image.psnr(x, x + 0.1, max_val=1.0)", 1 / 20),
        ("tf.image.psnr(images, images - 2, 255)", 2 * [20 * np.log10(255 / 2)]),
        (
            "-tf.image.total_variation(images)",
            [
                -np.abs(np.diff(i, axis=0)).sum() - np.abs(np.diff(i, axis=1)).sum()
                for i in IMAGES
            ],
        ),
    ],
)
def test_functions_of_arrays(call: str, expected: Any) -> None:
    text, left = ported(f"import tensorflow as tf\ny = {call}")
    assert left == []
    names = executed(text, {"x": X, "rows": ROWS, "ids": IDS, "images": IMAGES})
    np.testing.assert_allclose(names["y"], expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("tf.split(x, sizes)", "positions instead of TensorFlow's sizes"),
        ("tf.split(x, [2, -1])", "positions instead of TensorFlow's sizes"),
        ("tf.scan(f, x)", "pass its argument 'initializer'"),
        ("tf.math.confusion_matrix(x, i)", "pass its argument 'num_classes'"),
        ("tf.nn.depth_to_space(x, 2, 'NCHW')", "has no argument 'data_format'"),
    ],
)
def test_what_is_not_in_sight_is_left(call: str, reason: str) -> None:
    _, left = ported(f"import tensorflow as tf\ny = {call}")
    assert len(left) == 1
    assert reason in left[0]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("v1.nn.in_top_k(rows, tf.constant([1, 0, 1]), 1)", [True, False, True]),
        ("tf.nn.in_top_k(tf.constant([1, 0, 1]), rows, 1)", [True, False, True]),
        ("v1.transpose(rows, [1, 0], 't')", ROWS.T),
        ("v1.dtypes.cast(rows, tf.int32)", ROWS.astype(int)),
    ],
)
def test_functions_of_version_1_have_its_order(call: str, expected: Any) -> None:
    imports = "import tensorflow as tf\nimport tensorflow.compat.v1 as v1\n"
    text, left = ported(f"{imports}result = {call}")
    assert not left
    result = executed(text, {"rows": ROWS})["result"]
    np.testing.assert_array_equal(np.asarray(result), expected)
