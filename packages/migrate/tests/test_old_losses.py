"""Losses of TensorFlow 1, ported and run: the numbers are TensorFlow's."""

from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import ported

SUM = "reduction=tf.losses.Reduction.SUM"
MEAN = "reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE"


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("mean_squared_error(a, b)", 1.44187617),
        ("absolute_difference(a, b, 0.5)", 0.46448553),
        ("huber_loss(a, b, 2.0, delta=0.3)", 0.47545889),
        ("hinge_loss(h, logits=b)", 0.98384881),
        ("sigmoid_cross_entropy(h, b, label_smoothing=0.1)", 0.74719095),
        ("softmax_cross_entropy(o, b, label_smoothing=0.1)", 1.09618747),
        (f"sparse_softmax_cross_entropy(i, b, {MEAN})", 1.04625642),
    ],
)
def test_a_loss_is_the_mean_of_tensorflow_1(call: str, value: float) -> None:
    """Also where a function of TensorFlow 2 has the same name, and no mean."""
    text, left = ported(f"import tensorflow.compat.v1 as tf\nloss = tf.losses.{call}")
    assert left == []
    rng = np.random.RandomState(0)
    a, b = rng.rand(6, 3).astype("float32"), rng.randn(6, 3).astype("float32")
    i = np.array([0, 1, 2, 1, 0, 2])
    names: dict[str, Any] = {"a": a, "b": b, "i": i}
    names |= {"h": (a > 0.5).astype("float32"), "o": np.eye(3, dtype="float32")[i]}
    exec(text, names)
    assert names["loss"].shape == ()
    assert float(names["loss"]) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            "mean_squared_error(a, b, weights=mask)",
            "the number of weights that",
        ),
        (f"mean_squared_error(a, b, {SUM})", "use keras.losses.MeanSquaredError(red"),
        ("log_loss(a, b)", "use the loss of `keras.losses`"),
    ],
)
def test_a_loss_that_is_no_mean_of_examples_is_left(call: str, why: str) -> None:
    _, (reason,) = ported(f"import tensorflow.compat.v1 as tf\ntf.losses.{call}")
    assert why in reason


@pytest.mark.parametrize(
    ("lines", "is_old"),
    [
        ("", False),
        ("tf.compat.v1.train.AdamOptimizer()\n", False),
        ("x = tf.keras.layers.Dense(1)(x)\n", False),
    ],
)
def test_what_else_is_called_says_which_version_a_loss_is_of(
    lines: str, is_old: bool
) -> None:
    text, left = ported(
        f"import tensorflow as tf\n{lines}loss = tf.losses.mean_squared_error(x, y)"
    )
    assert left == []
    name = "MeanSquaredError()" if is_old else "mean_squared_error"
    assert f"keras.losses.{name}(x, y)" in text
