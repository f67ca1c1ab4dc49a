"""What functional models of Keras 3 overrule or refuse is reported."""

import jax
import keras
import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported
from packaging.version import Version

START = (
    "import tensorflow as tf\n"
    "from tensorflow.keras import layers\n"
    "inputs = tf.keras.Input(shape=(32, 32, 3))\n"
    "net = tf.keras.applications.{name}(include_top=False, weights=None)\n"
)


def left_of(source: str, name: str = "ResNet50") -> list[str]:
    _, left = ported(f"{START.format(name=name)}{source}")
    return left


@pytest.mark.parametrize(
    "source",
    [
        "x = net(inputs, training=False)",
        "x = layers.Dropout(0.5)(inputs * 2, training=True)",
        "y = layers.Dense(2)(net.output)\nx = layers.Dropout(0.5)(y, training=True)",
        "def block(x, t): return layers.BatchNormalization()(x, training=t)\n"
        "y = block(inputs, False)",
        "net.trainable = False\nx = net(inputs, training=False)\nnet.trainable = True",
    ],
)
def test_training_of_a_layer_in_a_functional_model_is_left(source: str) -> None:
    assert ["passes its own training=" in each for each in left_of(source)] == [True]


@pytest.mark.parametrize(
    "source",
    [
        "net.trainable = False\nx = net(inputs, training=False)",
        "def step(images): return net(images, training=True)",
        "class M(tf.keras.Model):\n"
        "    def call(self, x, training=None): return self.a(x, training=training)",
        "x = net(inputs, training=None)",
    ],
)
def test_training_that_is_not_lost_stays(source: str) -> None:
    assert left_of(source) == []


def test_frozen_models_with_dropout_in_them_are_left() -> None:
    source = "net.trainable = False\nx = net(inputs, training=False)"
    assert len(left_of(source, "EfficientNetB0")) == 1


def test_keras_overrules_training_of_a_layer_as_the_report_says() -> None:
    """Before Keras 3.16."""
    inputs = keras.Input((3,))
    outputs = keras.layers.BatchNormalization()(inputs, training=False)
    model = keras.Model(inputs, outputs)
    x = np.arange(12, dtype="float32").reshape(4, 3)
    trained, predicted = model(x, training=True), model(x, training=False)
    is_lost = np.abs(np.asarray(trained) - np.asarray(predicted)).max() > 1
    assert is_lost == (Version(keras.__version__) < Version("3.16.0"))


def test_shapes_that_are_made_of_sizes_are_tuples() -> None:
    made = "tf.cast(tf.stack([s[0], 2]), tf.float32) * x[0, 0]"
    text, left = ported(
        "import tensorflow as tf\n"
        "class Shaped(tf.keras.layers.Layer):\n"
        f"    def call(self, x):\n        s = tf.shape(x)\n        return {made}\n"
        "result = jax.eval_shape(Shaped(), x)\n"
    )
    assert not left
    names = {"jax": jax, "x": np.ones((3, 4), "float32")}
    assert executed(text, names)["result"].shape == (2,)
