"""What `compile` is given, and what its models and optimizers define."""

from pathlib import Path

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported, run

START = "import tensorflow as tf\nk = tf.keras\n"
MODEL = "model = k.Sequential([k.Input((2,)), k.layers.Dense(2)])\n"
GAN = f"""\
{START}
class GAN:
    def __init__(self):
        self.d = k.Sequential([k.Input((2,)), k.layers.Dense(1)])
        self.d.compile(k.optimizers.SGD(0.1), "mse")
        z = k.Input((2,))
        self.d.trainable = False
        self.g = k.Sequential([k.Input((2,)), k.layers.Dense(2)])
        self.both = k.Model(z, self.d(self.g(z)))
        self.both.compile(k.optimizers.SGD(0.1), "mse")
    def train(self, x, y):
        loss = self.d.train_on_batch(x, y)
        self.both.train_on_batch(x, y)
        return loss
gan = GAN()
before = gan.d.get_weights()[0], gan.g.get_weights()[0]
gan.train(x, y)
after = gan.d.get_weights()[0], gan.g.get_weights()[0]
"""


def test_a_model_that_is_frozen_after_compile_is_trained_as_compiled() -> None:
    text, left = ported(GAN)
    assert left == []
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    names = executed(text, {"x": x, "y": y})
    moved = [
        float(np.abs(a - b).sum())
        for a, b in zip(names["before"], names["after"], strict=True)
    ]
    assert all(each > 1e-4 for each in moved)
    assert names["gan"].d.trainable_variables == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        self.d.trainable = False\n", ""),
        (
            '"mse")\n        z',
            '"mse")\n        self.d.trainable = False\n        self.d.compile()\n'
            "        z",
        ),
        ("    def train", "    def free(self): self.d.trainable = True\n    def train"),
        ("self.d.train_on_batch(x, y)", "0"),
    ],
)
def test_other_models_are_trained_as_they_are(before: str, after: str) -> None:
    text, _ = ported(GAN.replace(before, after).replace("trainable = False\n" * 2, ""))
    assert "trainable = True\n        loss" not in text


def test_a_model_that_is_trainable_after_compile_is_left() -> None:
    _, left = ported(GAN.replace("self.d.trainable = False", "self.d.trainable = t"))
    assert ["when it was compiled" in each for each in left] == [True]


PARTS = f"""\
{START}
def make_d():
    d = k.Sequential([k.Input((2,)), k.layers.Dense(1)])
    d.compile(k.optimizers.SGD(0.1), "mse")
    return d
def make_both(g, d):
    d.trainable = False
    both = k.Sequential([g, d])
    both.compile(k.optimizers.SGD(0.1), "mse")
    return both
def train(d_model, both):
    d_model.train_on_batch(x, y)
    both.train_on_batch(x, y)
d = make_d()
both = make_both(k.Sequential([k.layers.Dense(2)]), d)
train(d, both)
"""


def test_a_model_that_another_function_freezes_is_trained_as_compiled() -> None:
    text, left = ported(PARTS)
    assert left == []
    step = "d_model.train_on_batch(x, y)"
    assert f"d_model.trainable = True\n    {step}\n    d_model.trainable" in text
    assert text.count("trainable = True") == 1


def test_layers_that_are_frozen_after_compile_are_left() -> None:
    loop = "for layer in d.layers:\n        layer.trainable = False"
    _, left = ported(PARTS.replace("d.trainable = False", loop))
    assert ["when it was compiled" in each for each in left] == [True]


def test_a_frozen_model_that_another_module_trains_is_left() -> None:
    steps = PARTS[PARTS.index("def train") : PARTS.index("d = make_d()")]
    source = PARTS.replace(steps, "from gan import train\n")
    _, left = ported(source.replace("train(d, both)", "train((d, both))"))
    assert ["when it was compiled" in each for each in left] == [True]


def test_a_model_that_is_compiled_after_it_was_frozen_stays() -> None:
    text, left = ported(
        f"{START}def freeze(d):\n    d.trainable = False\n"
        f"{MODEL}freeze(model)\nmodel.compile('sgd', 'mse')\nmodel.fit(x, y)"
    )
    assert left == []
    assert "trainable = True" not in text


def test_the_rate_in_a_copy_of_a_history() -> None:
    text, left = ported(f"{START}{MODEL}h = dict(model.fit(x).history)\nh['lr']")
    assert left == []
    assert "h['learning_rate']" in text


@pytest.mark.parametrize(
    ("metric", "is_one"),
    [
        ("'accuracy'", True),
        ("k.metrics.MeanSquaredError()", True),
        ("error", True),
        ("['accuracy']", False),
        ("{'a': 'accuracy'}", False),
        ("unknown", False),
    ],
)
def test_one_metric_becomes_a_list(metric: str, is_one: bool) -> None:
    error = "def error(y_true, y_pred): return k.losses.mse(y_true, y_pred)\n"
    source = f"{START}{error}{MODEL}model.compile('sgd', 'mse', metrics={metric})"
    text, left = ported(source)
    assert left == []
    assert ("metrics=[" in text) == (is_one or metric.startswith("["))


def test_labels_that_are_indices_are_integers_in_a_loss() -> None:
    text, left = ported(
        f"{START}weights = tf.constant([1.0, 3.0])\n"
        "def loss(y_true, y_pred):\n"
        "    labels = tf.squeeze(y_true, -1)\n"
        "    return tf.gather(weights, labels) * tf.reduce_sum(y_pred, -1)\n"
        f"{MODEL}model.compile('sgd', loss)\n"
        "value = model.evaluate(x, y, verbose=0)"
    )
    assert left == []
    x, y = np.ones((4, 2), "float32"), np.array([[0], [1], [1], [1]])
    names = executed(text, {"x": x, "y": y})
    total = float(names["model"].predict(x, verbose=0)[0].sum())
    assert names["value"] == pytest.approx(2.5 * total, rel=1e-5)


def test_labels_that_are_cast_stay() -> None:
    text, _ = ported(
        f"{START}def loss(y_true, y_pred):\n"
        "    labels = tf.cast(y_true, tf.int64)\n"
        "    return tf.gather(weights, labels) * y_pred\n"
        f"{MODEL}model.compile('sgd', loss)"
    )
    assert '"int32"' not in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("rate = tf.Variable(0.1)\no = k.optimizers.SGD(rate)", "a number or a sched"),
        (
            "o = k.optimizers.SGD(0.1)\n"
            "a = k.Sequential()\na.compile(o)\nb = k.Sequential()\nb.compile(o)",
            "make one for each",
        ),
        (
            "class Own(k.optimizers.Optimizer):\n"
            "    def _resource_apply_dense(self, grad, var): pass",
            "does not call _resource_apply_dense",
        ),
        (
            "class Own(k.optimizers.legacy.Optimizer):\n"
            "    def _create_slots(self, variables): pass",
            "does not call _create_slots",
        ),
        (
            "class Own(k.optimizers.SGD):\n"
            "    def update_step(self, grad, variable): pass",
            "update_step(gradient, variable, learning_rate)",
        ),
        (
            "class Own(k.optimizers.SGD):\n    def apply_gradients(self, g): pass",
            "write that",
        ),
        (
            "class Own(k.Model):\n    def make_train_function(self): pass",
            "write train_step",
        ),
    ],
)
def test_what_keras_3_does_not_take_or_call_is_left(source: str, reason: str) -> None:
    _, left = ported(START + source)
    assert any(reason in each for each in left)


def test_an_optimizer_of_one_model_is_compiled_twice() -> None:
    _, left = ported(
        f"{START}{MODEL}o = k.optimizers.SGD(0.1)\nmodel.compile(o)\nmodel.compile(o)"
    )
    assert left == []


@pytest.mark.parametrize(
    "source",
    [
        "loss = k.losses.MeanSquaredError(reduction='auto')",
        "class Loss(k.losses.Loss):\n"
        "    def __init__(self, reduction='auto'):\n"
        "        super().__init__(reduction=reduction)\n"
        "loss = Loss()",
        "class Loss(k.losses.Loss):\n"
        "    def __init__(self): super().__init__(reduction='auto')\n"
        "loss = Loss()",
    ],
)
def test_the_reduction_auto_is_the_mean(source: str) -> None:
    text, left = ported(START + source)
    assert left == []
    assert executed(text)["loss"].reduction == "sum_over_batch_size"


def test_a_metric_whose_result_is_a_variable() -> None:
    text, left = ported(
        f"{START}class Seen(k.metrics.Metric):\n"
        "    def __init__(self):\n"
        "        super().__init__(name='seen')\n"
        "        self.n = self.add_weight(name='n', initializer='zeros')\n"
        "    def update_state(self, y_true, y_pred, sample_weight=None):\n"
        "        self.n.assign_add(1.0)\n"
        "    def result(self):\n"
        "        return self.n\n"
        f"{MODEL}model.compile('sgd', 'mse', metrics=[Seen()])\n"
        "value = model.evaluate(x, x, batch_size=2, verbose=0)[1]"
    )
    assert left == []
    names = executed(text, {"x": np.ones((4, 2), "float32")})
    assert names["value"] == 2.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = k.Input(3)", "k.Input((3,))"),
        ("x = k.layers.Input(shape=3, name='a')", "shape=(3,), name='a')"),
        ("n = 3\nx = k.Input(n)", "k.Input((n,))"),
        ("x = k.Input((3,))", "k.Input((3,))"),
        ("x = k.layers.Dense(np.prod(s))", "k.layers.Dense(int(np.prod(s)))"),
        ("n = np.prod(s)\nx = k.layers.Dense(n)", "k.layers.Dense(int(n))"),
        ("x = k.layers.Dense(units=4)", "k.layers.Dense(units=4)"),
        ("n = np.max(y) + 1\nx = k.layers.Dense(n)", "k.layers.Dense(int(n))"),
        ("x = k.layers.Dense(y.max() + 1)", "k.layers.Dense(int(y.max() + 1))"),
        (
            "def net(n=2):\n    return k.layers.Dense(n)\nx = net(y.max() + 1)",
            "k.layers.Dense(int(n))",
        ),
        (
            "x = k.layers.Dense(tf.reduce_prod(s).numpy())",
            "k.layers.Dense(int(keras.ops.convert_to_numpy(keras.ops.prod(s))))",
        ),
        ("x = k.layers.RepeatVector(np.prod(s))", "RepeatVector(int(np.prod(s)))"),
        ("x = k.layers.GRU(np.max(s))", "k.layers.GRU(int(np.max(s)))"),
        (
            "x = k.layers.Embedding(np.max(y) + 1, output_dim=np.prod(s))",
            "k.layers.Embedding(int(np.max(y) + 1), output_dim=int(np.prod(s)))",
        ),
        (
            "gpus = tf.config.list_logical_devices('GPU')\n"
            "s = tf.distribute.MirroredStrategy(gpus)",
            "rx.MirroredStrategy([device.name for device in gpus])",
        ),
        (
            "d = tf.data.Dataset.from_tensor_slices((list(x), list(y)))",
            "rx.input.numpy_dataset((np.array(list(x)), np.array(list(y))))",
        ),
        (
            f"{MODEL}model.compile('sgd', 'mse')\nmodel.save('m.h5')\n"
            "k.models.load_model('m.h5')",
            "compile('sgd', 'mean_squared_error')",
        ),
        (f"{MODEL}model.compile('sgd', 'mse')", "compile('sgd', 'mse')"),
    ],
)
def test_arguments_that_keras_3_takes_otherwise(before: str, after: str) -> None:
    text, left = ported(f"{START}import numpy as np\n{before}")
    assert left == []
    assert after in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "class L(k.layers.Layer):\n    def call(self, x):\n"
            "        return tf.while_loop(lambda i: i < 3, lambda i: i + 1, [x])",
            "no gradients",
        ),
        (
            "class Cell(k.layers.LSTMCell): pass\n"
            "x = k.layers.Bidirectional(k.layers.RNN(Cell(3)))",
            "above the class Cell",
        ),
        (
            "x = k.Input((2,))\nmodel = k.Model(x, [x, x])\n"
            "model.fit(x, y, sample_weight={'a': w})",
            "give a list",
        ),
    ],
)
def test_what_fails_only_when_it_runs_is_left(source: str, reason: str) -> None:
    _, left = ported(START + source)
    assert [reason in each for each in left] == [True]


def test_numpy_takes_a_tuple_of_axes_in_a_dataset() -> None:
    text, left = ported(
        f"{START}d = tf.data.Dataset.from_tensor_slices(x)"
        ".map(lambda a: tf.reduce_mean(a, axis=[0, 1]))"
    )
    assert left == []
    assert "np.mean(a, axis=(0, 1))" in text


LOADED = f"""\
{START}{MODEL}model.compile("sgd", "mse")
model.fit(x, x, verbose=0)
model.save("m.h5")
loaded = k.models.load_model("m.h5")
"""


def test_a_model_that_is_trained_further_is_saved_as_keras_3_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, left = ported(f"{LOADED}loaded.fit(x, x, verbose=0)")
    assert left == []
    assert '"m.keras"' in text
    executed(text, {"x": np.ones((4, 2), "float32")})
    assert (tmp_path / "m.keras").exists()
    assert '"m.h5"' in ported(LOADED)[0]


@pytest.mark.parametrize(
    ("line", "is_left"),
    [
        ("model = k.models.load_model('other.h5')\nmodel.fit(x, x)", True),
        ("model = k.models.load_model('other.h5', compile=False)\nmodel.fit(x)", False),
        ("model = k.models.load_model('other.h5')\nmodel.predict(x)", False),
    ],
)
def test_a_model_of_hdf5_that_is_trained_is_left(line: str, is_left: bool) -> None:
    _, left = ported(START + line)
    assert any("from HDF5" in each for each in left) == is_left


def test_weights_that_are_assigned_in_a_call_are_left() -> None:
    layer = (
        "class Norm(k.layers.Wrapper):\n"
        "    def build(self, shape):\n"
        "        self.w = self.layer.kernel\n"
        "        self.u = self.add_weight(shape=(), trainable=False)\n"
        "    def call(self, x):\n"
        "        self.u.assign(0.5)\n"
        "        self.w.assign(self.w * self.u)\n"
        "        return self.layer(x)\n"
    )
    _, left = ported(START + layer)
    assert ["through this assignment" in each for each in left] == [True]


TWO = """\
import numpy as np
import tensorflow as tf
inputs = tf.keras.Input((1,))
ones = dict(kernel_initializer="ones")
first = tf.keras.layers.Dense(1, name="b", **ones)(inputs)
second = tf.keras.layers.Dense(1, name="a", **ones)(first)
model = tf.keras.Model(inputs, [first, second])
"""
EVALUATE = "total = model.evaluate(x, [x - 1, x - 2], return_dict=True)['loss']"


@pytest.mark.parametrize(
    "arguments",
    [
        'loss="mse", loss_weights=[0.5, 0.25]',
        '"mse", None, (0.5, 0.25)',
        "tf.keras.losses.MeanSquaredError(), loss_weights=[0.5, 0.25]",
        'loss=["mse", "mse"], loss_weights=[0.5, 0.25]',
        'loss={"a": "mse", "b": "mse"}, loss_weights={"b": 0.5, "a": 0.25}',
    ],
)
def test_weights_of_losses_are_those_of_outputs(arguments: str) -> None:
    text, left = ported(f"{TWO}model.compile('sgd', {arguments})\n{EVALUATE}")
    assert left == []
    names = executed(text, {"x": np.ones((2, 1), "float32")})
    assert names["total"] == pytest.approx(0.5 * 1 + 0.25 * 4)


@pytest.mark.parametrize("loss", ['"mse"', '["mse", "mse"]', '{"a": "mse"}'])
def test_weights_by_name_need_losses_by_name(loss: str) -> None:
    weights = '{"b": 0.5, "a": 0.25}'
    source = f"{TWO}model.compile('sgd', {loss}, loss_weights={weights})"
    _, (reason,) = ported(source)
    assert "in the structure of loss" in reason


@pytest.mark.parametrize(
    "arguments",
    [
        "['mse', 'mae'], metrics=['mse', 'mae']",
        "'mse', metrics=metrics",
        "{'a': 'mse', 'b': 'mse'}, metrics=[['mse', 'mae'], ['mse', 'mae']]",
    ],
)
def test_metrics_in_one_list_are_those_of_all_outputs(arguments: str) -> None:
    text, left = ported(
        f"{TWO}metrics = ['mse', tf.keras.metrics.MeanAbsoluteError(name='mae')]\n"
        f"model.compile('sgd', {arguments})\n"
        "names = set(model.evaluate(x, [x, x], return_dict=True))"
    )
    assert not left
    names = executed(text, {"x": np.ones((4, 1))})["names"]
    assert {"a_mse", "a_mae", "b_mse", "b_mae"} <= names


@pytest.mark.parametrize(
    ("read", "is_left"),
    [
        ("loss, b, a, b_mse, a_mse = model.evaluate(x, y)", True),
        ("loss, b, a = model.evaluate(x, y)", False),
        ("r = model.evaluate(x, y)\nprint(r[0], r[2])", False),
        ("r = model.evaluate(x, y)\nprint(r[3])", True),
        ("r = model.evaluate(x, y, return_dict=True)\nprint(r['b_mse'])", False),
    ],
)
def test_the_order_of_metrics_of_several_outputs_is_left(
    read: str, is_left: bool
) -> None:
    compiled = "model.compile('sgd', ['mse', 'mae'], metrics=[['mse'], ['mse']])\n"
    _, left = ported(f"{TWO}{compiled}{read}")
    assert any("return_dict=True" in each for each in left) == is_left


PER_EXAMPLE = """import tensorflow as tf
class Focal(tf.keras.losses.Loss):
    def __init__(self, reduction=tf.keras.losses.Reduction.NONE):
        super().__init__(reduction=reduction)
loss = {}
model.compile("sgd", loss)
"""


@pytest.mark.parametrize(
    ("loss", "is_left"),
    [
        ("tf.keras.losses.MeanSquaredError(reduction='none')", True),
        ("[tf.keras.losses.MeanSquaredError(reduction=None)]", True),
        ("Focal()", True),
        ("Focal(reduction='sum')", False),
        ("tf.keras.losses.MeanSquaredError()", False),
    ],
)
def test_a_compiled_loss_without_a_reduction_is_left(loss: str, is_left: bool) -> None:
    _, left = ported(PER_EXAMPLE.replace("{}", loss))
    assert ["without a reduction" in each for each in left] == [True] * is_left


OUTPUTS = """
import numpy as np
import tensorflow as tf

class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.a = tf.keras.layers.Dense(1, kernel_initializer="ones")
        self.b = tf.keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x):
        return RETURNED

x = np.ones((8, 4), "float32")
net = Net()
net.compile("sgd", COMPILED)
losses = net.fit(x, LABELS, batch_size=4, verbose=0).history["loss"]
"""


@pytest.mark.parametrize(
    ("returned", "compiled", "labels", "loss"),
    [
        (  # The values are TensorFlow's.
            "self.a(x), self.b(x)",
            'loss={"output_2": "mse", "output_1": "mae"}, metrics=["mae"], '
            'loss_weights={"output_1": 0.5, "output_2": 2.0}',
            '{"output_1": x[:, :1], "output_2": x[:, :2]}',
            17.783750534057617,
        ),
        (
            '{"one": self.a(x), "two": self.b(x)}',
            'loss="mse", metrics=["mae", "mse"]',
            '{"one": x[:, :1], "two": x[:, :2]}',
            16.706249237060547,
        ),
        (
            "(self.b(x), self.a(x))[1]",
            'loss={"output_1": "mse"}',
            '{"output_1": x[:, :1]}',
            8.145000457763672,
        ),
    ],
)
def test_outputs_of_a_class_are_known_by_their_place(
    returned: str, compiled: str, labels: str, loss: float
) -> None:
    source = OUTPUTS.replace("RETURNED", returned).replace("COMPILED", compiled)
    names = run(source.replace("LABELS", labels))
    assert names["losses"] == pytest.approx([loss], rel=1e-5)


def test_names_of_outputs_that_keras_lacks_are_reported() -> None:
    source = OUTPUTS.replace("RETURNED", "self.a(x), self.b(x)")
    source = source.replace("COMPILED", "['mse', 'mse']").replace("LABELS", "[x, x]")
    _, left = ported(f"{source}print(losses['val_output_1_loss'])")
    assert any("does not name the outputs" in each for each in left)


def test_names_of_metrics_are_those_of_the_results_of_evaluate() -> None:
    names = run(
        "import numpy as np\nimport tensorflow as tf\n"
        "def make():\n"
        "    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse', metrics=[tf.keras.metrics.MeanSquaredError("
        "name='z'), 'mae'])\n"
        "    return model\n"
        "model = make()\n"
        "x = np.ones((8, 3), 'float32')\n"
        "found = model.evaluate(x, x[:, :1] * 4, verbose=0)\n"
        "named = dict(zip(model.metrics_names, found))\n"
        "right = model.evaluate(x, x[:, :1] * 4, verbose=0, return_dict=True)"
    )
    assert list(names["named"]) == ["loss", "z", "mae"]
    assert names["named"] == pytest.approx(names["right"])
