"""Arguments of layers' calls that Keras 3 refuses by position are named."""

import pytest
from packages.migrate.tests.porting import executed, ported

START = """import tensorflow as tf
from nets import Encoder
class Block(tf.keras.layers.Layer):
    def __init__(self, rate=0.5):
        super().__init__()
        self.dropout = tf.keras.layers.Dropout(rate)
        self.norm = tf.keras.layers.BatchNormalization()
        self.mha = tf.keras.layers.MultiHeadAttention(2, 4)
        self.gru = tf.keras.layers.GRU(3)
        self.imported = Encoder(rate)
        self.step = 3
    def call(self, x, training, mask=None):
        return {}
class Stack(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block() for _ in range(2)]
    def call(self, x, is_training=False):
        for i, block in enumerate(self.blocks):
            x = block(x, is_training, None)
        return self.blocks[0](x, not is_training)
"""


def lines(source: str, inside: str = "x") -> tuple[str, list[str]]:
    return ported(f"{START.replace('{}', inside)}{source}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.dropout(x, training)", "self.dropout(x, training=training)"),
        ("self.dropout(x, True)", "self.dropout(x, training=True)"),
        ("self.norm(x, training)", "self.norm(x, training=training)"),
        ("self.mha(x, x, mask)", "self.mha(x, x, mask)"),
        ("self.mha(x, x, x, mask)", "self.mha(x, x, x, attention_mask=mask)"),
        (
            "self.mha(x, x, x, mask, True)",
            "self.mha(x, x, x, attention_mask=mask, return_attention_scores=True)",
        ),
        ("self.gru(x, mask)", "self.gru(x, mask)"),
        ("self.norm.call(x, training)", "self.norm.call(x, training)"),
        (
            "tf.keras.layers.Dropout(.1)(x, training)",
            "keras.layers.Dropout(.1)(x, training=training)",
        ),
    ],
)
def test_arguments_of_layers_of_keras_are_named(before: str, after: str) -> None:
    text, left = lines("", before)
    assert f"return {after}\n" in text
    assert left == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("b = Block()\nb(x, True)", "b(x, training=True)"),
        ("b = Block()\nb(x, True, m)", "b(x, training=True, mask=m)"),
        ("Stack()(x, tf.constant(1))", "Stack()(x, keras.ops.array(1))"),
        ("m = tf.keras.Sequential()\nm(x, True)", "m(x, training=True)"),
        ("m = tf.keras.Model(a, b)\nm(x, False)", "m(x, training=False)"),
        (
            "class L(tf.keras.losses.Loss):\n    def call(self, y, p): return y\n"
            "loss = L()\nloss(y, True)",
            "loss(y, True)",
        ),
        ("def my_model(x, training): return x\nmy_model(x, True)", "my_model(x, True)"),
        (
            "class W(tf.keras.Model):\n    def __init__(self, model):\n"
            "        super().__init__()\n        self.model = model\n"
            "    def call(self, x, *args, **kwargs):\n"
            "        return x + self.model(x, *args, **kwargs)\n"
            "W(tf.keras.Sequential())",
            "self.model(x, *args, **kwargs)",
        ),
        (
            "class V(tf.keras.Model):\n    def __init__(self):\n"
            "        super().__init__()\n        self.model = tf.keras.Sequential()\n"
            "    def call(self, x, **kwargs): return self.model(x, **kwargs)",
            "self.model(x, **kwargs)",
        ),
    ],
)
def test_arguments_of_classes_of_the_script_are_named(before: str, after: str) -> None:
    text, left = lines(before)
    assert after in text
    assert left == []


def test_training_by_position_in_a_functional_model_is_left() -> None:
    source = "i = tf.keras.Input((2,))\ntf.keras.layers.Dropout(0.5)(i, True)"
    assert ["passes its own training=" in each for each in lines(source)[1]] == [True]


VARIABLES = """\
import tensorflow as tf
class Counted(tf.keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], 2))
        self.seen = tf.Variable({})
    def call(self, x):
        return tf.matmul(x, self.w)
class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = Counted()
    def call(self, x):
        return self.layer(x)
model = Model()
model(tf.ones((1, 3)))
"""


def test_other_variables_that_build_makes_are_left() -> None:
    text, left = ported(VARIABLES.format("tf.random.normal([2])"))
    assert "self.seen = tf.Variable(tf.random.normal([2]))" in text
    assert len(left) == 1
    assert "add_weight" in left[0]


def test_layers_are_called_with_arrays() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "embed = tf.keras.layers.Embedding(3, 4)\n"
        "shape = embed(tf.ones(2)).shape"
    )
    assert left == []
    assert executed(text)["shape"] == (2, 4)


REQUIRED = """
import numpy as np
import tensorflow as tf


class Twice(tf.keras.layers.Layer):
    def call(self, x, training):
        return 2 * x if training else x


inputs = tf.keras.Input((3,))
model = tf.keras.Model(inputs, Twice()(inputs))
seen = [float(np.mean(model(np.ones((1, 3)), training=t))) for t in (True, False)]
"""


def test_keras_3_fills_in_the_training_of_layers_that_require_it() -> None:
    text, left = ported(REQUIRED)
    assert left == []
    assert "def call(self, x, training=None):" in text
    assert executed(text)["seen"] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("base", "parameters"),
    [
        ("object", "self, x, training"),
        ("tf.keras.layers.Layer", "self, x, training, memory"),
        ("tf.keras.layers.Layer", "self, x, training=False"),
    ],
)
def test_other_parameters_of_call_stay(base: str, parameters: str) -> None:
    line = f"def call({parameters}):"
    source = f"import tensorflow as tf\nclass A({base}):\n    {line}\n        return x"
    assert line in ported(source)[0]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("def call(self, x, y, mask=None): return x + y", "name the parameter x_mask"),
        ("def call(self, x): self.kernel.assign(x)", "trainable=False"),
        ("def call(self, x, y, x_mask=None, mask=None): return x", ""),
        ("def call(self, x, mask=None): self.count.assign_add(1)", ""),
    ],
)
def test_layers_that_would_train_to_other_numbers_are_left(call: str, why: str) -> None:
    source = f"import tensorflow as tf\nclass L(tf.keras.layers.Layer):\n    {call}"
    _, left = ported(source)
    assert [why in reason for reason in left] == [True] * bool(why)
