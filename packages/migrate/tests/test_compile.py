"""What `compile` is given, and what its models and optimizers define."""

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
    assert ["was trainable at compile" in each for each in left] == [True]


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


@pytest.mark.parametrize("source", [GAN, PARTS])
def test_a_model_that_is_frozen_after_compile_is_left(source: str) -> None:
    _, left = ported(source)
    assert any("set `trainable` before each step" in reason for reason in left)


def test_layers_that_are_frozen_after_compile_are_left() -> None:
    loop = "for layer in d.layers:\n        layer.trainable = False"
    _, left = ported(PARTS.replace("d.trainable = False", loop))
    assert ["was trainable at compile" in each for each in left] == [True]


def test_a_frozen_model_that_another_module_trains_is_left() -> None:
    steps = PARTS[PARTS.index("def train") : PARTS.index("d = make_d()")]
    source = PARTS.replace(steps, "from gan import train\n")
    _, left = ported(source.replace("train(d, both)", "train((d, both))"))
    assert ["was trainable at compile" in each for each in left] == [True]


def test_a_model_that_is_compiled_after_it_was_frozen_stays() -> None:
    text, left = ported(
        f"{START}def freeze(d):\n    d.trainable = False\n"
        f"{MODEL}freeze(model)\nmodel.compile('sgd', 'mse')\nmodel.fit(x, y)"
    )
    assert left == []
    assert "trainable = True" not in text


@pytest.mark.parametrize(
    ("metric", "is_one"),
    [
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
        (
            "class Own(k.optimizers.SGD):\n    def apply_gradients(self, g): pass",
            "write that",
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
        "    def __init__(self): super().__init__(reduction='auto')\n"
        "loss = Loss()",
    ],
)
def test_the_reduction_auto_is_the_mean(source: str) -> None:
    text, left = ported(START + source)
    assert left == []
    assert executed(text)["loss"].reduction == "sum_over_batch_size"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = k.Input((3,))", "k.Input((3,))"),
        ("x = k.layers.Dense(units=4)", "k.layers.Dense(units=4)"),
        (
            "gpus = tf.config.list_logical_devices('GPU')\n"
            "s = tf.distribute.MirroredStrategy(gpus)",
            "rx.MirroredStrategy([device.name for device in gpus])",
        ),
        (
            "d = tf.data.Dataset.from_tensor_slices((list(x), list(y)))",
            "rx.input.numpy_dataset((np.array(list(x)), np.array(list(y))))",
        ),
        (f"{MODEL}model.compile('sgd', 'mse')", "compile('sgd', 'mse')"),
    ],
)
def test_arguments_that_keras_3_takes_otherwise(before: str, after: str) -> None:
    text, left = ported(f"{START}import numpy as np\n{before}")
    assert left == []
    assert after in text


def test_numpy_takes_a_tuple_of_axes_in_a_dataset() -> None:
    text, left = ported(
        f"{START}d = tf.data.Dataset.from_tensor_slices(x)"
        ".map(lambda a: tf.reduce_mean(a, axis=[0, 1]))"
    )
    assert left == []
    assert "np.mean(a, axis=(0, 1))" in text


@pytest.mark.parametrize(
    ("line", "is_left"),
    [
        ("model = k.models.load_model('other.h5', compile=False)\nmodel.fit(x)", False),
        ("model = k.models.load_model('other.h5')\nmodel.predict(x)", False),
    ],
)
def test_a_model_of_hdf5_that_is_trained_is_left(line: str, is_left: bool) -> None:
    _, left = ported(START + line)
    assert any("from HDF5" in each for each in left) == is_left


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
        'loss=["mse", "mse"], loss_weights=[0.5, 0.25]',
        'loss={"a": "mse", "b": "mse"}, loss_weights={"b": 0.5, "a": 0.25}',
    ],
)
def test_weights_of_losses_are_those_of_outputs(arguments: str) -> None:
    text, left = ported(f"{TWO}model.compile('sgd', {arguments})\n{EVALUATE}")
    assert left == []
    names = executed(text, {"x": np.ones((2, 1), "float32")})
    assert names["total"] == pytest.approx(0.5 * 1 + 0.25 * 4)


@pytest.mark.parametrize(
    "arguments",
    [
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
        ("loss, b, a = model.evaluate(x, y)", False),
        ("r = model.evaluate(x, y)\nprint(r[0], r[2])", False),
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
        (
            '{"one": self.a(x), "two": self.b(x)}',
            'loss="mse", metrics=["mae", "mse"]',
            '{"one": x[:, :1], "two": x[:, :2]}',
            16.706249237060547,
        ),
    ],
)
def test_outputs_of_a_class_are_known_by_their_place(
    returned: str, compiled: str, labels: str, loss: float
) -> None:
    source = OUTPUTS.replace("RETURNED", returned).replace("COMPILED", compiled)
    names = run(source.replace("LABELS", labels))
    assert names["losses"] == pytest.approx([loss], rel=1e-5)
