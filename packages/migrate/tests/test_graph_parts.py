"""What only graphs of TensorFlow need: signatures, static shapes, branches."""

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port

SIGNATURE = """\
import tensorflow as tf
signature = [tf.TensorSpec([None], tf.float32)]
other = (tf.TensorSpec([None], tf.float32),)

@tf.function(input_signature=signature)
def double(x):
    return tf.multiply(x, 2)

half = tf.function(double, input_signature=other)
"""


def test_signatures_of_functions_are_taken_out() -> None:
    text, left = ported(SIGNATURE)
    assert left == []
    assert "signature" not in text
    assert "other" not in text


def test_signatures_with_another_use_stay() -> None:
    text, left = ported(f"{SIGNATURE}print(signature)")
    assert "signature = [tf.TensorSpec([None], tf.float32)]" in text
    assert len(left) == 1


def test_static_shapes_are_taken_out() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def f(x):\n"
        "    y = tf.abs(x)\n"
        "    y.set_shape([None, 2])\n"
        "    if tf.keras.backend.ndim(y) == 2:\n        y.set_shape([1, 2])\n"
        "    return y"
    )
    assert left == []
    names = executed(text)
    assert names["f"](np.array([[-1.0, 2.0]])).tolist() == [[1.0, 2.0]]


def test_static_shapes_in_a_pipeline_are_taken_out() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def split(x):\n"
        "    x.set_shape([4, 2])\n"
        "    return x[:, :1], x[:, 1:]\n"
        "d = tf.data.Dataset.from_tensor_slices(x).map(split).batch(2)"
    )
    assert left == []
    names = executed(text, {"x": np.ones((3, 4, 2))})
    assert [part.shape for part in names["d"][0]] == [(2, 4, 1)] * 2


def test_a_method_of_the_script_is_no_static_shape() -> None:
    text, left = ported(
        "import tensorflow as tf\nx = tf.abs(-1)\n"
        "class Canvas:\n    def set_shape(self, s): self.s = s\n"
        "c = Canvas()\nc.set_shape(3)"
    )
    assert left == []
    assert text.endswith("c.set_shape(3)\n")


COND = """\
import tensorflow as tf
total = tf.Variable(0.0)
opt = tf.keras.optimizers.SGD(0.1)
def add():
    total.assign_add(1.0)
def through():
    add()
class Steps:
    def update(self):
        opt.apply_gradients([(1.0, total)])
steps = Steps()
"""


def test_branches_without_effects_are_ported() -> None:
    text, left = ported(f"{COND}y = tf.cond(p, lambda: total + 1, lambda: total * 1)")
    assert left == []
    names = executed(text, {"p": False})
    assert float(names["y"]) == 0.0


@pytest.mark.parametrize("name", ["/gpu:0", "/device:GPU:0", "GPU", "/TPU:0"])
def test_the_default_device_needs_no_context(name: str) -> None:
    text, left = ported(
        f"import tensorflow as tf\nname = {name!r}\n"
        "with tf.device(name):\n    x = tf.ones(2)\n"
        f"with tf.device({name!r}), tf.device('/CPU:0'):\n    y = x + 1\n"
    )
    assert left == []
    assert "\nx = keras.ops.ones(2)\n" in text
    assert "\nwith keras.device('cpu:0'):\n    y = x + 1\n" in text
    # Machines without a GPU run it, as with TensorFlow.
    assert executed(text)["y"].tolist() == [2.0, 2.0]


def test_another_device_is_named() -> None:
    found = port(b"import tensorflow as tf\nwith tf.device('/gpu:1'):\n    x = 1\n")
    assert b"with keras.device('gpu:1'):" in found.source
    assert ["fails without a 'gpu:1'" in each.reason for each in found.notes] == [True]
