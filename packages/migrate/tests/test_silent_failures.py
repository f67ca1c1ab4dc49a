"""What a port once let pass, and what failed when it ran."""

import numpy as np
import pytest
from packages.migrate.tests.porting import ported, run

from replicax_migrate import port

START = "import tensorflow as tf\nfrom tensorflow.keras import backend as K\n"
MODEL = "class M(tf.keras.Model):\n    def __init__(self, n):\n"
FUNCTIONAL = "i = tf.keras.Input((None, 4))\nx = i + 1\n"


@pytest.mark.parametrize(
    ("source", "num_left"),
    [
        ("f = x.numpy\ny = f()", 1),
        ("y = list(map(lambda t: t.numpy, [x]))", 1),
        ("import jax\ny = jax.numpy.ones(2)", 0),
        ("class A:\n    numpy = 1\ny = A().numpy", 0),
        (f"{FUNCTIONAL}y = tf.reshape(x, [tf.shape(x)[0] * 2, 4])", 1),
        (f"{FUNCTIONAL}y = tf.shape(x) * 2", 1),
        (f"{FUNCTIONAL}y = tf.shape(x)[1:3] * 2", 1),
        (f"{FUNCTIONAL}s = tf.shape(x)\ny = s[1] // 2", 1),
        (f"{FUNCTIONAL}y = tf.shape(x)[2] // 2", 0),
        ("x = tf.ones([2, 3])\ny = tf.shape(x)[0] * 2", 0),
        ("kind = 'string'\ny = tf.keras.layers.Input((1,), dtype=kind)", 1),
        ("tf.config.experimental_connect_to_host(resolver.master())", 0),
        ("y = tf.keras.layers.experimental.SyncBatchNormalization", 1),
    ],
)
def test_what_would_fail_is_left(source: str, num_left: int) -> None:
    assert len(ported(f"{START}{source}")[1]) == num_left


def test_shapes_are_arrays_where_they_are_operands() -> None:
    source = """x = tf.ones([2, 3, 5, 1])
s = tf.shape(x)
y = [tf.shape(x)[1:3] * 2, s // 2, s[-1:] + [1], s[1] * 2]
z = tf.image.resize(x, s[1:3] * 2 - 1)
i = tf.keras.Input((6, 5, 1))
w = tf.image.resize(i, tf.shape(i)[1:3] * 2)
"""
    names = run(f"{START}{source}")
    assert [np.array(each).tolist() for each in names["y"]] == [
        [6, 10],
        [1, 1, 2, 0],
        [2],
        6,
    ]
    assert names["z"].shape == (2, 5, 9, 1)
    assert names["w"].shape == (None, 12, 10, 1)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("n = 'a/b'\nx = tf.keras.layers.Dense(1, name=n)", "a_b"),
        (
            "p = 'a%d/' % 2\nx = tf.keras.layers.Dense(1, name=p + 'c')",
            "a2_c",
        ),
        (
            "def f(n):\n    return tf.keras.layers.Dense(1, name=n)\nx = f('a/b')",
            "a_b",
        ),
        ("x = tf.keras.layers.Dense(1, name='a/{}'.format('b/c'))", "a_b_c"),
        ("for i in (1, 2):\n    x = tf.keras.layers.Dense(1, name=f'a/{i}')", "a_2"),
        ("for n in ['a/b']:\n    x = tf.keras.layers.Dense(1, name=n)", "a_b"),
        ("n = {'k': 'a/b'}\nx = tf.keras.layers.Dense(1, name=n['k'])", "a_b"),
        ("n = {'name': 'a/b'}\nx = tf.keras.layers.Dense(1, **n)", "a_b"),
        ("x = tf.keras.layers.Dense(1, **dict(name='a/b'))", "a_b"),
        ("x = tf.keras.layers.Dense(1, name='/'.join(['a', 'b/c']))", "a_b_c"),
        ("x = tf.keras.Sequential([], 'a/b')", "a_b"),
        (f"{MODEL}        super().__init__(name='a/b')\nx = M(0)", "a_b"),
        (f"{MODEL}        super().__init__(name=n)\nx = M('a/b')", "a_b"),
    ],
)
def test_slashes_of_names_in_variables(source: str, name: str) -> None:
    assert run(f"{START}{source}")["x"].name == name


def test_slashes_of_paths_stay() -> None:
    source = "c = {'dir': 'a/b', 'name': 'd'}\nx = tf.keras.Input((2,), name=c['name'])"
    assert "'a/b'" in ported(f"{START}{source}")[0]


def test_tokenizers_give_arrays_of_numpy() -> None:
    result = port(f"{START}x = tok('a', return_tensors='tf')\n".encode())
    assert b"return_tensors='np'" in result.source
    assert [note.reason for note in result.notes] == ["its arrays are NumPy's"]


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


@pytest.mark.parametrize(
    ("layers", "num_notes"),
    [
        ("Dense(1, input_shape=(None, 5))", 1),
        ("Input((None, 5)), tf.keras.layers.Dense(1)", 1),
        ("Dense(1, input_shape=(5,))", 0),
        ("Dense(1, input_shape=(None, 5)), tf.keras.layers.LSTM(2)", 0),
    ],
)
def test_inputs_whose_rank_only_keras_3_holds_are_reported(
    layers: str, num_notes: int
) -> None:
    source = f"{START}m = tf.keras.Sequential([tf.keras.layers.{layers}])\n"
    notes = [each.reason for each in port(source.encode()).notes]
    assert sum("have not 3 dimensions" in note for note in notes) == num_notes


MODULE = """import tensorflow as tf
class Block(tf.Module):
    def __init__(self, size):
        "Several layers."
        {}self.parts = [tf.keras.layers.Dense(size), tf.keras.layers.Dense(size)]
        self.scale = tf.Variable(1.0)
    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x * self.scale
class Base(tf.Module):
    pass
class Net(Base):
    def __init__(self): self.block = Block(2)
class Deeper(Block):
    def __init__(self): self.parts, self.scale = [], tf.Variable(1.0)
class Other(Block):
    def __init__(self):
        {}self.parts = []
net, deeper, other = Net(), Deeper(), Other()
num_deeper = len(deeper.trainable_variables)
y = net.block(tf.ones((4, 3)))
count = len(net.trainable_variables)
"""


@pytest.mark.parametrize("first", ["", "super().__init__(3)\n        "])
def test_modules_may_do_without_the_constructor_of_tf_module(first: str) -> None:
    source = MODULE.format(first.replace("3", ""), first)
    names = run(source)
    assert names["count"] == 5
    assert names["num_deeper"] == 1
    text, _ = ported(source)
    num_own = 1 if first else 2
    assert text.count("super().__init__(") == 4 - num_own
    assert text.count("keras.layers.Layer.__init__(self)") == num_own


def test_synchronized_batch_normalization_is_an_argument() -> None:
    layer = run(
        "import tensorflow as tf\n"
        "from tensorflow.keras.layers.experimental import SyncBatchNormalization\n"
        "with tf.distribute.MirroredStrategy().scope():\n"
        "    layer = SyncBatchNormalization(momentum=0.9, name='bn')"
    )["layer"]
    assert (layer.synchronized, layer.momentum, layer.name) == (True, 0.9, "bn")


CREATOR = """import numpy as np
import tensorflow as tf
x = np.ones((8, 2), "float32")
def make(context):
    size = context.get_per_replica_batch_size(16)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(size)
def main():
    {}strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.keras.utils.experimental.DatasetCreator(dataset_fn=make)
    return model.fit(data, epochs=2, steps_per_epoch=2, verbose=0).history["loss"]
losses = main()
"""


def test_a_dataset_creator_is_the_strategys_dataset() -> None:
    first, second = run(CREATOR.format(""))["losses"]
    assert second < first
    early = "first = tf.keras.utils.experimental.DatasetCreator(make)\n    "
    _, left = ported(CREATOR.format(early))
    assert len(left) == 1
    assert "distribute_datasets_from_function" in left[0]
