"""What a port once let pass, and what failed when it ran."""

import numpy as np
import pytest
from packages.migrate.tests.porting import ported, run

START = "import tensorflow as tf\nfrom tensorflow.keras import backend as K\n"
FUNCTIONAL = "i = tf.keras.Input((None, 4))\nx = i + 1\n"


@pytest.mark.parametrize(
    ("source", "num_left"),
    [
        ("import jax\ny = jax.numpy.ones(2)", 0),
        ("class A:\n    numpy = 1\ny = A().numpy", 0),
        (f"{FUNCTIONAL}y = tf.shape(x)[2] // 2", 0),
        ("x = tf.ones([2, 3])\ny = tf.shape(x)[0] * 2", 0),
        ("tf.config.experimental_connect_to_host(resolver.master())", 0),
        ("y = tf.keras.layers.experimental.SyncBatchNormalization", 1),
    ],
)
def test_what_would_fail_is_left(source: str, num_left: int) -> None:
    assert len(ported(f"{START}{source}")[1]) == num_left


@pytest.mark.parametrize("scale", ["None", "s"])
@pytest.mark.parametrize("offset", ["None", "o + 1"])
def test_batches_are_normalized_by_given_moments(offset: str, scale: str) -> None:
    x = "tf.constant([[1.0, 2.0], [5.0, 8.0]])"
    source = f"""s, o, x = tf.constant([2.0, 3.0]), tf.constant([1.0, -1.0]), {x}
m, v = tf.nn.moments(x, [0])
y = K.bias_add(tf.nn.batch_normalization(x, m, v, {offset}, {scale}, 1e-3), o)
"""
    # By TensorFlow: the rows of the normalized array are these, and their opposites.
    row = np.array([0.99987495, 0.99994445])
    normal = np.array([-row, row])
    normal = normal * ([2, 3] if scale == "s" else 1)
    expected = normal + ([2, 0] if offset != "None" else 0) + [1, -1]
    np.testing.assert_allclose(
        run(f"{START}{source}")["y"], expected, rtol=1e-5, atol=1e-6
    )


def test_variables_that_are_equal_on_write_need_no_argument() -> None:
    source = """x = tf.keras.layers.Layer().add_weight(
    shape=(2,), synchronization=tf.VariableSynchronization.AUTO, aggregation="sum")
"""
    assert run(f"{START}{source}")["x"].aggregation == "sum"


def test_synchronized_batch_normalization_is_an_argument() -> None:
    layer = run(
        "import tensorflow as tf\n"
        "from tensorflow.keras.layers.experimental import SyncBatchNormalization\n"
        "with tf.distribute.MirroredStrategy().scope():\n"
        "    layer = SyncBatchNormalization(momentum=0.9, name='bn')"
    )["layer"]
    assert (layer.synchronized, layer.momentum, layer.name) == (True, 0.9, "bn")
