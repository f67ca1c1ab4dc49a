"""Lines that are aligned with a bracket move with it, and others stay."""

import pytest
from packages.migrate.tests.porting import ported

from replicax_migrate import port


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "x = tf.reduce_sum(a,\n                  axis=0)",
            "x = keras.ops.sum(a,\n                  axis=0)",
        ),
        (
            "x = tf.keras.layers.Dense(2,\n                          activation=f)",
            "x = keras.layers.Dense(2,\n                       activation=f)",
        ),
        (
            "x = tf.cast(tf.zeros(3,\n                     tf.int32), y)",
            "x = keras.ops.cast(keras.ops.zeros(3,\n"
            '                                   "int32"), y)',
        ),
        (
            "x = tf.concat([a,\n"
            "               g(\n"
            "                   b,  # The last.\n"
            "               )], 0)",
            "x = keras.ops.concatenate([a,\n"
            "                           g(\n"
            "                               b,  # The last.\n"
            "                           )], 0)",
        ),
        (
            "x = tf.zeros(\n    3,\n    tf.int32)",
            'x = keras.ops.zeros(\n    3,\n    "int32")',
        ),
        ("x = tf.zeros([3,\n\t\t4])", "x = keras.ops.zeros([3,\n\t\t4])"),
        (
            "from tensorflow.keras.layers import (Dense,\n"
            "                                     Dropout)\nDense(Dropout)",
            "from keras.layers import (Dense,\n                          Dropout)\n",
        ),
    ],
)
def test_lines_move_with_their_bracket(before: str, after: str) -> None:
    text, left = ported(f"import tensorflow as tf\n{before}")
    assert after in text
    assert left == []


@pytest.mark.parametrize(
    "kept",
    [
        "x = f(a,\n      b)",
        "s = '''(\n   x'''\ny = g('(',\n      s)",
        "x = [\n    1,\n  2,\n         # One.\n    3]",
        "if (a and\n        b):\n    pass",
        "x = f('\\f',\n\f b)",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_what_stays_stay(kept: str, end: str) -> None:
    text = f"import tensorflow as tf\n{kept}\nprint(tf.zeros(3))\n"
    result = port(text.replace("\n", end).encode()).source.decode()
    assert kept.replace("\n", end) in result
