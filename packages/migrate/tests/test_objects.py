"""What an expression is where it comes from a container, an instance or a class."""

import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port
from replicax_migrate.tables import MESSAGES

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


@pytest.mark.parametrize(
    "before",
    [
        "opts = [made() for _ in range(2)]\nopts[0].get_weights()",
        "for o in (made(), made()): o.get_weights()",
        "def f(opts): opts[0].get_weights()\nf([made()])",
        "t = Trainer(0.1)\nt.opt.get_weights()",
    ],
)
def test_what_optimizers_lack_is_left_wherever_they_come_from(before: str) -> None:
    _, left = ported(f"{START}{before}")
    assert ["in another order" in each for each in left] == [True]


SGD = "tf.keras.optimizers.SGD"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"def f(c): return c(lr=1.0)\nf({SGD})", "c(learning_rate=1.0)"),
        (f"def f(c={SGD}): return c(lr=1.0)", "c(learning_rate=1.0)"),
        (f"C = {{'a': made, 'b': {SGD}}}\no = C[k](lr=1.0)", "[k](learning_rate=1.0)"),
        (f"C = {{'b': {SGD}}}\no = C.get(k, made)(lr=1.0)", ")(learning_rate=1.0)"),
        ("o = getattr(tf.keras.optimizers, n)(lr=1.0)", "n)(learning_rate=1.0)"),
        (f"o = ({SGD} if x else made)(lr=1.0)", ")(learning_rate=1.0)"),
        (
            f"from functools import partial\nf = partial({SGD}, lr=1.0)",
            "SGD, learning_rate=1.0)",
        ),
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
    ("before", "reason"),
    [
        (f"def f(c): return c(0.1, decay=0.1)\nf({SGD})", "decay= stays"),
        (f"o = {SGD}(schedule(), decay=0.1)", "decay= stays"),
        (f"o = {SGD}(0.1, decay=0.1)\no.lr.assign(1)", "decay= stays"),
        (f"o = {SGD}(0.1, decay=0.1)\no.learning_rate = 1.0", "decay= stays"),
        (
            f"o = {SGD}(0.1, decay=0.1)\nc = tf.keras.callbacks.ReduceLROnPlateau()",
            "decay= stays",
        ),
        ("def f(opt_cls): return opt_cls(lr=0.1)", "if it is a class of Keras"),
        (
            "c = {'class_name': 'SGD', 'config': {'decay': 0.1}}\n"
            "o = tf.keras.optimizers.get(c)",
            "no 'decay' in the config",
        ),
        (f"k = {{'lr': 0.1}}\no = {SGD}(**k)", "no argument 'lr'"),
        (f"k = dict(lr=0.1)\no = {SGD}(**k)", "no argument 'lr'"),
        (f"k = {{'lr': 0.1}}\no = {SGD}(**k)\nprint(k)", "see that `k` has"),
        (f"k = {{}}\nk['lr'] = 0.1\no = {SGD}(**k)", "see that `k` has"),
        (f"o = {SGD}(**{{**k, 'nesterov': True}})", "has neither"),
        (f"o = {SGD}(**dict(decay=0.1))", "no argument 'decay'"),
        (f"def f(**options): return {SGD}(**options)", "see that `options` has"),
        (f"o = {SGD}(**load(path))", "see that `load(path)` has"),
        (f"k = {{}}\nk[name] = 0.1\no = {SGD}(**k)", "see that `k` has"),
        (f"k = {{}}\nk.update(more)\no = {SGD}(**k)", "see that `k` has"),
    ],
)
def test_old_arguments_of_optimizers_are_left(before: str, reason: str) -> None:
    _, left = ported(f"{START}{before}")
    assert [reason in each for each in left] == [True]


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("def train(model, opt): opt.get_weights()", "if this is an optimizer"),
        ("def train(model, opt): opt.lr = 0.1", "it is learning_rate in Keras 3"),
        ("def train(opts): opts[0].set_weights(w)", "if this is an optimizer"),
        (
            "class T:\n"
            "    def __init__(self, opt): self.opt = opt\n"
            "    def f(self): return self.opt.lr",
            "if this is an optimizer",
        ),
        ("def f(args): return args.d_opt.lr", "if this is an optimizer"),
        ("o = made()\no.beta_1.assign(0.8)", "is a number in Keras 3"),
        ("o = made()\no.beta_1 = 0.8", "is a number in Keras 3"),
        ("o = made()\nn = o.lr.decay_steps", "not the schedule"),
    ],
)
def test_what_may_be_of_an_optimizer_is_left(before: str, reason: str) -> None:
    _, left = ported(f"{START}{before}")
    assert [reason in each for each in left] == [True]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opt = parser.parse_args()\nprint(opt.lr)", "print(opt.lr)"),
        ("def f(opt): print(opt.lr)\nf(parser.parse_args())", "print(opt.lr)"),
        ("def f(o): print(o.lr, o.get_weights())", "print(o.lr, o.get_weights())"),
        ("def f(opt): print(opt.weights)", "print(opt.weights)"),
        ("def f(option): print(option.lr)", "print(option.lr)"),
        ("o = made()\nprint(o.get_config()['lr'])", "()['learning_rate']"),
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


@pytest.mark.parametrize(
    "body",
    [
        "def f(v): return tf.zeros_like(v)\nx = given(f)(w)",
        "def f(vs): return [tf.zeros_like(v) for v in vs][0]\nx = given(f)([w])",
        "def f(vs):\n    for i, v in enumerate(vs): return tf.ones_like(v)\n"
        "x = given(f)([w])",
        "def f(vs): return [tf.zeros_like(v) for v in vs][0]\n"
        "def g(m): return f(m.weights)\n"
        "x = given(g)(tf.keras.Sequential([tf.keras.Input((1,)), "
        "tf.keras.layers.Dense(1)]))",
        "x = given(lambda v: tf.where(True, v, v))(w)",
        "class C:\n    def __init__(self, v): self.v = v\n"
        "    def f(self): return tf.stack(self.v)\nx = given(C)(w).f()",
    ],
)
def test_parameters_may_be_variables(body: str) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def given(f): return f\n"
        f"w = tf.Variable(tf.ones((2, 2)))\n{body}"
    )
    assert left == []
    names = executed(text)
    assert "Variable" not in type(names["x"]).__name__


@pytest.mark.parametrize(
    ("arguments", "rate"), [("lr=1, decay=0.5", 1.0), ("decay=0.5", 0.01)]
)
def test_decay_is_the_schedule_of_keras_2(arguments: str, rate: float) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        f"opt = tf.keras.optimizers.legacy.SGD({arguments})\n"
        "w = tf.Variable(0.0)\n"
        "for _ in range(3):\n"
        "    opt.apply_gradients([(tf.constant(1.0), w)])"
    )
    assert left == []
    moved = -sum(rate / (1 + 0.5 * step) for step in range(3))
    assert float(executed(text)["w"]) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("made", "is_noted"),
    [
        ("tf.keras.optimizers.Adam(lr=0.1)", True),
        ("tf.keras.optimizers.legacy.Adam(lr=0.1)", False),
        ("tf.keras.optimizers.Adam(0.1)", False),
    ],
)
def test_a_rate_that_later_versions_of_keras_2_ignore_is_noted(
    made: str, is_noted: bool
) -> None:
    notes = port(f"import tensorflow as tf\no = {made}\n".encode()).notes
    assert any("ignore it" in note.reason for note in notes) == is_noted


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


OWN_SHAPE = "def compute_output_shape(self, input_shape): return input_shape[:2]"


@pytest.mark.parametrize("own", ["", OWN_SHAPE])
def test_output_shapes_are_computed(own: str) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Block(tf.keras.layers.Layer):\n"
        f"    {own}\n"
        "    def call(self, x): return tf.reduce_sum(x, axis=-1)\n"
        "block = Block()\n"
        "shape = block.compute_output_shape(input_shape=(None, 5, 7))\n"
        "other = tf.keras.layers.Dense(3).compute_output_shape((None, 7))"
    )
    assert left == []
    assert ("keras.KerasTensor((None, 5, 7))" in text) == (not own)
    names = executed(text)
    assert (names["shape"], names["other"]) == ((None, 5), (None, 3))


def test_input_and_output_of_a_sequential_are_those_of_its_lists() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "base = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(3)])\n"
        "out = tf.keras.layers.Dense(1)(base.output)\n"
        "model = tf.keras.Model(base.input, out)\n"
        "again = tf.keras.Model(model.input, model.output)\n"
        "first = again.layers[0]\nhidden = again.layers[1].output\n"
        "parts = [tf.keras.Model(again.layers[0].input, hidden)]\n"
        "parts.append(tf.keras.Model(first.input, hidden))"
    )
    assert left == []
    assert "keras.Model(again.inputs[0], hidden)" in text
    assert "keras.Model(base.inputs[0], out)" in text
    assert "keras.Model(model.input, model.output)" in text
    names = executed(text)
    assert names["again"].output.shape == (None, 1)
    assert [each.output.shape for each in names["parts"]] == [(None, 3)] * 2


def test_output_shapes_in_a_list_are_left() -> None:
    _, left = ported(
        "import tensorflow as tf\nmodel = tf.keras.applications.VGG16()\n"
        "size = model.layers[0].output_shape[0][1:3]"
    )
    assert left == [MESSAGES["output_shapes"]]


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
        ("n = [v for v in model.weights if re.search('^bn', v.name)]", 4),
        ("n = [v for v in model.weights if is_norm(v.name)]", 4),
        ("n = [v for v in model.weights if v.name.endswith('kernel')]", 1),
        ("n = norms(model.weights)", 4),
        (
            "n = []\nfor v in model.weights:\n    name = v.name\n"
            "    if any(k in name for k in ['bn']): n.append(v)",
            4,
        ),
        ("n = [v for v in model.weights if v.name in ('gamma', 'beta')]", 2),
    ],
)
def test_names_of_variables_have_those_of_layers(lines: str, expected: int) -> None:
    text, left = ported(f"{START}{WEIGHTS}{lines}")
    assert left == []
    assert len(executed(text)["n"]) == expected


@pytest.mark.parametrize(
    "test",
    ["v.name == 'bn1/gamma:0'", "v.name.startswith('bn')", "'gamma:0' in v.name"],
)
def test_whole_names_of_variables_are_left(test: str) -> None:
    _, left = ported(f"{START}{WEIGHTS}n = [v for v in model.weights if {test}]")
    assert ["test for a part of `path`" in each for each in left] == [True]


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


DTYPES = """\
import tensorflow as tf
layer = tf.keras.layers.Dense(2)
x = layer(tf.keras.Input((3,)))
seen = [x.dtype.name, layer.kernel.dtype.name, *[w.dtype.name for w in layer.weights]]
v, a, i = tf.Variable(1.0), tf.constant([1.0]), tf.constant([1])
seen += [v.dtype.name, v.dtype.base_dtype == a.dtype.base_dtype, a.dtype.name]
seen += [t.dtype.is_floating for t in (v, a, i)] + [i.dtype.is_integer]
seen += [a.dtype.as_numpy_dtype(3), float(a.dtype.min) < -3e38 < 3e38 < a.dtype.max]
"""


def test_attributes_of_dtypes() -> None:
    text, left = ported(DTYPES)
    assert left == []
    floats, flags = ["float32"] * 5, [True, True, False, True]
    assert executed(text)["seen"] == [*floats, True, "float32", *flags, 3.0, True]


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
