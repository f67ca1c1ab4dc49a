"""What an expression is where it comes from a container, an instance or a class."""

import pytest
from packages.migrate.tests.porting import executed, ported

START = (
    "import tensorflow as tf\n"
    "made = tf.keras.optimizers.Adam\n"
    "class Trainer:\n"
    "    def __init__(self, rate):\n"
    "        self.opt = tf.keras.optimizers.Adam(rate)\n"
    "        self.rates = {}\n"
    "    def opts(self): return made(), made()\n"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opts = [made(), made()]\nfor o in opts: o.lr = 1", "o.learning_rate = 1"),
        ("opts = {'g': made()}\nopts['g'].lr = 1", "opts['g'].learning_rate = 1"),
        ("d = dict(g=made())\nprint(d['g'].lr)", "print(d['g'].learning_rate)"),
        (
            "d = {'g': made()}\nfor k, o in d.items(): o.lr = 1",
            "o.learning_rate = 1",
        ),
        (
            "for i, (o, r) in enumerate(zip([made()], rates)): o.lr = r",
            "o.learning_rate = r",
        ),
        ("opts = []\nopts.append(made())\nopts[0].lr = 1", "[0].learning_rate = 1"),
        ("d = {}\nd['g'] = made()\nd['g'].lr = 1", "d['g'].learning_rate = 1"),
        ("print([o.lr for o in [made(), made()]])", "[o.learning_rate for o"),
        ("t = Trainer(0.1)\nt.opt.lr = 1", "t.opt.learning_rate = 1"),
        (
            "class Two(Trainer):\n    def f(self): self.opt.lr = 1",
            "self.opt.learning_rate = 1",
        ),
        ("def f(): return 1, made()\na, b = f()\nb.lr = 1", "b.learning_rate = 1"),
        ("def f(): return 1, made()\na, b = f()\na.lr = 1", "a.lr = 1"),
        ("d = {'a': x, 'b': made()}\nd['a'].lr = 1", "d['a'].lr = 1"),
        ("d = {'a': x, 'b': made()}\nd[k].lr = 1", "d[k].lr = 1"),
        ("d = {'b': made()}\nfor k in d: k.lr = 1", "for k in d: k.lr = 1"),
        ("opts = [made(), *more]\nopts[0].lr = 1", "opts[0].learning_rate = 1"),
        ("opts = [made(), *more]\nopts[i].lr = 1", "opts[i].lr = 1"),
        ("t = Trainer(0.1)\nt.rates.lr = 1", "t.rates.lr = 1"),
    ],
)
def test_optimizers_are_known_where_they_come_from(before: str, after: str) -> None:
    text, left = ported(f"{START}{before}")
    assert after in text
    assert left == []


SGD = "tf.keras.optimizers.SGD"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"def f(c): c().lr = 1\nf({SGD})", "c().learning_rate = 1"),
        ("def f(c): return c(lr=1.0)\nf(other)", "c(lr=1.0)"),
        (f"def f(c): return c(lr=1.0)\nf(other)\nf({SGD})", "c(lr=1.0)"),
        ("def opt(lr): return lr\nopt(lr=1.0)", "opt(lr=1.0)"),
    ],
)
def test_classes_of_optimizers_are_known_where_they_come_from(
    before: str, after: str
) -> None:
    text, left = ported(f"{START}{before}")
    assert after in text
    assert left == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opt = parser.parse_args()\nprint(opt.lr)", "print(opt.lr)"),
        ("def f(opt): print(opt.lr)\nf(parser.parse_args())", "print(opt.lr)"),
        ("def f(o): print(o.lr, o.get_weights())", "print(o.lr, o.get_weights())"),
        ("def f(opt): print(opt.weights)", "print(opt.weights)"),
        ("def f(option): print(option.lr)", "print(option.lr)"),
        ("o = made()\nprint(o.beta_1)", "print(o.beta_1)"),
        (
            "class Mine(tf.keras.optimizers.Optimizer):\n"
            "    def __init__(self, b):\n        self.beta_1 = b",
            "        self.beta_1 = b",
        ),
    ],
)
def test_options_are_no_optimizers(before: str, after: str) -> None:
    text, left = ported(f"{START}{before}")
    assert after in text
    assert left == []


@pytest.mark.parametrize(
    "call",
    [
        "tf.zeros_like(w)",
        "tf.ones_like(model.layers[0].kernel)",
        "[tf.zeros_like(v) for v in model.trainable_variables][0]",
        "tf.where(True, w, w)",
        "tf.reduce_any(w > 9) | tf.reduce_all(model.weights[1])",
        "tf.stack(w)",
        "tf.nn.moments(w, [0])[0]",
    ],
)
def test_operations_that_take_arrays_get_no_variables(call: str) -> None:
    """On JAX some of Keras' fail with a variable; TensorFlow's take one."""
    text, left = ported(
        "import tensorflow as tf\nimport numpy as np\n"
        "layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(2)]\n"
        "model = tf.keras.Sequential(layers)\n"
        f"w = tf.Variable(tf.ones((2, 2)))\nx = {call}"
    )
    assert left == []
    names = executed(text)
    assert "Variable" not in type(names["x"]).__name__


def test_tensors_are_given_to_operations_as_they_are() -> None:
    text, left = ported("import tensorflow as tf\ndef f(x): return tf.zeros_like(x)")
    assert "return keras.ops.zeros_like(x)" in text
    assert left == []


SHAPED = """import tensorflow as tf
class Scale(tf.keras.layers.Layer):
    def build(self, input_shape):
        self.rank = input_shape.rank + input_shape.ndims
        size = input_shape.as_list()[-1] * input_shape[-1].value
        self.w = self.add_weight(name="w", shape=(size,), initializer="ones")
    def call(self, x):
        return tf.reduce_sum(x, -1, keepdims=True) * self.w
    def compute_output_shape(self, input_shape):
        return tf.TensorShape(input_shape.as_list()[:-1] + [4])
scale = Scale()
y = scale(tf.ones((3, 2)))
"""


def test_shapes_that_layers_are_given_are_tuples() -> None:
    text, left = ported(SHAPED)
    assert left == []
    names = executed(text)
    assert (names["scale"].rank, names["y"].shape) == (4, (3, 4))
    assert names["scale"].compute_output_shape((3, 2)) == (3, 4)


def test_output_shapes_are_computed() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Block(tf.keras.layers.Layer):\n"
        "    def compute_output_shape(self, input_shape): return input_shape[:2]\n"
        "    def call(self, x): return tf.reduce_sum(x, axis=-1)\n"
        "block = Block()\n"
        "shape = block.compute_output_shape(input_shape=(None, 5, 7))\n"
        "other = tf.keras.layers.Dense(3).compute_output_shape((None, 7))"
    )
    assert left == []
    names = executed(text)
    assert (names["shape"], names["other"]) == ((None, 5), (None, 3))


WEIGHTS = """\
import re
x = tf.keras.Input((2,))
y = tf.keras.layers.BatchNormalization(name="bn1")(tf.keras.layers.Dense(2)(x))
model = tf.keras.Model(x, y)
found = {}
def is_norm(name): return "bn" in name
def norms(all_vars): return [v for v in all_vars if "bn" in v.name]
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("n = [v for v in model.trainable_variables if 'bn' not in v.name]", 2),
        ("n = [v for l in model.layers for v in l.weights if 'dense' in v.name]", 2),
        ("n = {v.name: v.numpy() for v in model.weights}", 6),
        ("for v in model.weights:\n    found[v.name] = v\nn = found", 6),
        ("n = [v for v in model.weights if v.name.endswith('kernel')]", 1),
        ("n = norms(model.weights)", 4),
        ("n = [v for v in model.weights if v.name in ('gamma', 'beta')]", 2),
    ],
)
def test_names_of_variables_have_those_of_layers(lines: str, expected: int) -> None:
    text, left = ported(f"{START}{WEIGHTS}{lines}")
    assert left == []
    assert len(executed(text)["n"]) == expected


def test_names_that_are_shown_stay() -> None:
    lines = "for v in model.weights:\n    print('a: b', v.name)\n"
    text, left = ported(f"{START}{WEIGHTS}{lines}for l in model.layers: l.name in x")
    assert left == []
    assert "print('a: b', v.name)" in text
    assert "l.name in x" in text


@pytest.mark.parametrize(
    "line",
    [
        "numbers = Net().as_list()",
        "model.save('a.keras' if f() else 'b.h5')",
    ],
)
def test_methods_of_the_script_and_right_names_of_files_stay(line: str) -> None:
    method = "    def as_list(self): return [1]\n"
    text, left = ported(f"{START}class Net:\n{method}{line}")
    assert left == []
    assert f"\n{line}\n" in text


def test_the_identity_of_a_variable_keeps_its_value() -> None:
    text, left = ported(
        "import tensorflow as tf\nv = tf.Variable(1.0)\nold = tf.identity(v)\n"
        "layer = tf.keras.layers.Dense(1, kernel_initializer='zeros')\n"
        "y = tf.identity(layer(tf.ones([1, 1])))\n"
        "kernel = tf.identity(layer.weights[0])\n"
        "v.assign(2.0)\nlayer.kernel.assign([[3.0]])\n"
    )
    assert left == []
    assert "y = layer(keras.ops.ones([1, 1]))\n" in text
    names = executed(text)
    assert (float(names["old"]), float(names["kernel"][0, 0])) == (1.0, 0.0)
