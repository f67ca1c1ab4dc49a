"""Arguments of layers' calls that Keras 3 refuses by position are named."""

from typing import Any

import keras
import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported, run

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
        ("Stack()(x, flag)", "Stack()(x, is_training=flag)"),
        ("Stack()(x, tf.constant(1))", "Stack()(x, keras.ops.array(1))"),
        (
            "class Sub(Block):\n    def f(self, x): return self(x, self.step)",
            "self(x, training=self.step)",
        ),
        (
            "class Sub(Block):\n"
            "    def f(self, x): return super().__call__(x, False)\n",
            "super().__call__(x, training=False)",
        ),
        (
            "class A(tf.keras.layers.MultiHeadAttention):\n"
            "    def call(self, q, v, k, m): return super().call(q, v, k, m)\n",
            "super().call(q, v, k, attention_mask=m)",
        ),
        ("m = tf.keras.Sequential()\nm(x, True)", "m(x, training=True)"),
        ("m = tf.keras.Model(a, b)\nm(x, False)", "m(x, training=False)"),
        (
            "class L(tf.keras.losses.Loss):\n    def call(self, y, p): return y\n"
            "loss = L()\nloss(y, True)",
            "loss(y, True)",
        ),
        (
            "class M(tf.Module):\n    def __call__(self, x, training): return x\n"
            "m = M()\nm(x, True)",
            "m(x, True)",
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


@pytest.mark.parametrize(
    "inside",
    ["self.imported(x, training)", "self.imported(x, True, mask)"],
)
def test_what_has_no_call_in_sight_is_left(inside: str) -> None:
    _, left = lines("", inside)
    assert ["not in sight" in reason for reason in left] == [True]
    assert lines("", "self.imported(x, mask)")[1] == []


def test_models_of_callers_are_left() -> None:
    _, left = lines("class T:\n    def f(self, x): return self.model(x, True)")
    assert ["not in sight" in reason for reason in left] == [True]


def test_training_by_position_in_a_functional_model_is_left() -> None:
    source = "i = tf.keras.Input((2,))\ntf.keras.layers.Dropout(0.5)(i, True)"
    assert ["passes its own training=" in each for each in lines(source)[1]] == [True]


def test_a_port_runs() -> None:
    source = START.replace("from nets import Encoder", "Encoder = lambda rate: None")
    source = source.replace("tf.keras.layers.GRU(3)", "None")
    inside = "self.dropout(self.norm(self.mha(x, x, x, mask), True), training)"
    text, left = ported(source.replace("{}", inside))
    assert left == []
    names = executed(text)
    x = np.ones((2, 3, 4), "float32")
    assert keras.ops.shape(names["Stack"]()(x, is_training=True)) == (2, 3, 4)


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2.5, trainable=False", (2.5, "float32")),
        ("-3", (-3, "int32")),
        ("initial_value=7, dtype=tf.float32", (7.0, "float32")),
        ("tf.zeros([shape[-1]], tf.int32), name='n'", ([0, 0, 0], "int32")),
        ("initial_value=tf.ones(shape=(2,))", ([1.0, 1.0], "float32")),
    ],
)
def test_variables_that_build_makes_are_made_once(
    given: str, expected: tuple[Any, str]
) -> None:
    """Keras 3 builds a layer again where it makes a variable of a value."""
    text, left = ported(VARIABLES.format(given))
    assert left == []
    names = executed(text)
    model = names["model"]
    assert len(model.variables) == 2
    value, dtype = expected
    assert np.asarray(model.layer.seen).tolist() == value
    assert model.layer.seen.dtype == dtype


def test_other_variables_that_build_makes_are_left() -> None:
    text, left = ported(VARIABLES.format("tf.random.normal([2])"))
    assert "self.seen = tf.Variable(tf.random.normal([2]))" in text
    assert len(left) == 1
    assert "add_weight" in left[0]


ADDED = """\
model = tf.keras.Sequential()
model.add(tf.keras.layers.GRU(3, batch_input_shape=(4, 5, 2), stateful=True))
model.add(tf.keras.layers.Dense(1))
"""
LISTED = """\
model = tf.keras.Sequential([
    tf.keras.layers.GRU(3, batch_input_shape=[4, 5, 2], stateful=True),
    tf.keras.layers.Dense(1),
])
"""


@pytest.mark.parametrize("source", [ADDED, LISTED])
def test_the_batch_input_shape_of_a_first_layer_is_an_input(source: str) -> None:
    text, left = ported(f"import tensorflow as tf\n{source}")
    assert left == []
    model = executed(text)["model"]
    assert model.input_shape == (4, 5, 2)
    assert model.built


@pytest.mark.parametrize(
    "source",
    [
        "y = tf.keras.layers.Dense(1, batch_input_shape=(4, 2))(x)",
        ADDED.replace("Dense(1", "Dense(1, batch_input_shape=(4, 3)"),
        LISTED.replace("Dense(1", "Dense(1, batch_input_shape=(4, 3)"),
    ],
)
def test_other_batch_input_shapes_are_left(source: str) -> None:
    _, left = ported(f"import tensorflow as tf\n{source}")
    assert ["'batch_input_shape'" in each for each in left] == [True]


WATCHED = """import tensorflow as tf
class Watched(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.accuracy = tf.keras.metrics.BinaryAccuracy()
    def watch(self, x, y):
        {}
    def call(self, x, y):
        self.watch(x, y)
        return x
class Net(tf.keras.Model):
    def {}(self, data):
        pass
model = Net()
model.{}(x)
"""


@pytest.mark.parametrize(
    ("update", "step", "method", "count"),
    [
        ("self.accuracy(y, x)", "other", "fit", 1),
        ("self.accuracy.update_state(y, x)", "other", "fit", 1),
        ("self.accuracy.update_state(y, x)", "train_step", "evaluate", 1),
        ("self.accuracy.update_state(y, x)", "train_step", "fit", 0),
        ("self.accuracy.update_state(y, x)", "other", "predict", 0),
        ("self.accuracy.result()", "other", "fit", 0),
    ],
)
def test_updates_of_metrics_in_a_call_are_left(
    update: str, step: str, method: str, count: int
) -> None:
    _, left = ported(WATCHED.format(update, step, method))
    assert sum("no update of a metric in a `call`" in each for each in left) == count


@pytest.mark.parametrize("source", ["embed([1, 2])", "embed(ids)", "embed(tf.ones(2))"])
def test_layers_are_called_with_arrays_of_lists_of_numbers(source: str) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "embed = tf.keras.layers.Embedding(3, 4)\n"
        f"ids = [1, 2]\nshape = {source}.shape"
    )
    assert left == []
    assert executed(text)["shape"] == (2, 4)


def test_models_get_arrays_of_lists_of_numbers() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "dense = tf.keras.layers.Dense(1, kernel_initializer='ones')\n"
        "model = tf.keras.Sequential([tf.keras.Input((1,)), dense])\n"
        "xs = [1, 2.0, -3]\nmodel.compile('sgd', 'mse')\n"
        "model.fit(xs, [[1.0], [2], [-3]], verbose=0)\n"
        "y = model.predict([10.0], 1, verbose=0)\n"
        "loss = model.evaluate(x=xs, y=xs, verbose=0)\n"
        "others = [each.fit([1, 2]) for each in scalers]"
    )
    assert left == []
    assert "each.fit([1, 2])" in text
    names = executed(text, {"scalers": []})
    assert (names["y"].tolist(), names["loss"]) == ([[10.0]], 0.0)


NAMED = """
import numpy as np
import tensorflow as tf
x, y = np.ones((4, 2)), np.ones((4, 1))
inputs = tf.keras.Input((2,))
outputs = tf.keras.layers.Dense(1, name="a")(inputs)
model = tf.keras.Model(inputs, {})
model.compile("sgd", "mse")
labels = {{"a": y}}
model.fit(x, labels, verbose=0)
loss = model.evaluate(x, y={{"a": y}}, verbose=0)
"""


@pytest.mark.parametrize("outputs", ["outputs", "[outputs]", "{'a': outputs}"])
def test_labels_of_one_output_are_no_dict(outputs: str) -> None:
    text, left = ported(NAMED.format(outputs))
    assert left == []
    assert ("list(labels.values())" in text) == ("{" not in outputs)
    assert executed(text)["loss"] >= 0.0


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
    "signature", ["x, y=None, mask=None", "x, y=None, *, training=False, mask=None"]
)
def test_the_mask_of_the_first_of_two_tensors_is_passed(signature: str) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Masked(tf.keras.layers.Layer):\n"
        "    supports_masking = True\n"
        f"    def call(self, {signature}):\n"
        "        return x if mask is None else x * tf.cast(mask, x.dtype)[..., None]\n"
        "i = tf.keras.Input((3,))\n"
        "x = tf.keras.layers.Embedding(4, 2, 'ones', mask_zero=True)(i)\n"
        "model = tf.keras.Model(i, [Masked()(x, x), Masked()(x)])\n"
        "two, one = model.predict(ids)\n"
    )
    assert not left
    names = executed(text, {"ids": np.array([[1, 2, 0]])})
    np.testing.assert_array_equal(names["one"][0, :, 0], [1, 1, 0])
    np.testing.assert_array_equal(names["two"][0, :, 0], [1, 1, 0])


UNPACKED = """import tensorflow as tf
class Sum(tf.keras.layers.Layer):
    def call(self, inputs, mask=None):
        a, b = inputs
        if mask is not None:
            a = a * tf.cast(mask[0], tf.float32)[:, None]
        return a + b
i = tf.keras.Input((2,))
model = tf.keras.Model(i, Sum()([i, i]))
total = float(tf.reduce_sum(model(tf.ones((3, 2)))))
"""


@pytest.mark.parametrize("unpacked", ["a, b = inputs", "a = inputs[0]; b = inputs[1]"])
def test_the_mask_of_a_list_without_masks_is_none(unpacked: str) -> None:
    source = UNPACKED.replace("a, b = inputs", unpacked)
    assert run(source)["total"] == 12


def test_the_mask_of_a_list_is_looked_at_in_a_script_that_imports_names_alone() -> None:
    start = (
        "import tensorflow as tf\nfrom tensorflow.keras.layers import Input, Layer\n"
    )
    end = UNPACKED.replace("import tensorflow as tf\n", "")
    source = f"{start}from tensorflow.keras.models import Model\n{end}"
    for name in ("layers.Layer", "Input", "Model"):
        source = source.replace(f"tf.keras.{name}", name.rpartition(".")[2])
    source = source.partition("total =")[0].replace(
        "a = a * tf.cast(mask[0], tf.float32)[:, None]", "a = 0 * a"
    )
    text, left = ported(source)
    assert left == []
    assert "import keras\n" in text
    executed(text)
