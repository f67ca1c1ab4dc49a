"""What `compile` is given, and what its models and optimizers define."""

import pytest
from packages.migrate.tests.porting import executed, ported

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


def test_a_model_that_is_trainable_after_compile_is_left() -> None:
    _, left = ported(GAN.replace("self.d.trainable = False", "self.d.trainable = t"))
    assert ["were trainable at compile" in each for each in left] == [True]


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
    assert ["were trainable at compile" in each for each in left] == [True]


def test_a_frozen_model_that_another_module_trains_is_left() -> None:
    steps = PARTS[PARTS.index("def train") : PARTS.index("d = make_d()")]
    source = PARTS.replace(steps, "from gan import train\n")
    _, left = ported(source.replace("train(d, both)", "train((d, both))"))
    assert ["were trainable at compile" in each for each in left] == [True]


def test_a_model_that_is_compiled_after_it_was_frozen_stays() -> None:
    _, left = ported(
        f"{START}def freeze(d):\n    d.trainable = False\n"
        f"{MODEL}freeze(model)\nmodel.compile('sgd', 'mse')\nmodel.fit(x, y)"
    )
    assert left == []


def test_a_method_that_keras_3_does_not_call_is_left() -> None:
    own = "class Own(k.optimizers.SGD):\n    def apply_gradients(self, g): pass"
    _, left = ported(START + own)
    assert any("override that" in reason for reason in left)


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
