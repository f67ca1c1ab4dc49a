"""Calls whose arguments changed, and what only looks ported: one line in, one out."""

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port


def lines(source: str) -> tuple[str, list[str]]:
    """The ported text of statements after the import, and what is left."""
    return ported(f"import tensorflow as tf\n{source}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            'print(f"{tf.cast(x, tf.float32)}")',
            "print(f\"{keras.ops.cast(x, 'float32')}\")",
        ),
        ("x = tf.add_n(model.losses)", "x = sum(model.losses)"),
        ("def f(x, a=tf.identity): pass", "a=keras.activations.linear"),
        ("x = tf.io.gfile.glob(f'{d}/*')", "x = sorted(glob.glob(f'{d}/*'))"),
        (
            "import tensorflow_datasets as tfds\ntfds.disable_progress_bar()\n"
            "x = tf.size(y)",
            "import keras\nx = keras.ops.size(y)",
        ),
        ("tf.io.gfile.rmtree(d)", "shutil.rmtree(d, ignore_errors=True)"),
        ("x = tf.executing_eagerly()", "x = True"),
        (
            "r = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu=name)",
            "r = rx.cluster_resolver.TPUClusterResolver(tpu=name)",
        ),
        (
            "class M(tf.keras.Model):\n    def __init__(self):\n"
            "        super().__init__(self)",
            "        super().__init__()",
        ),
        (
            "class M(tf.keras.Model):\n    def __init__(self):\n"
            "        super().__init__('policy')",
            "        super().__init__(name='policy')",
        ),
        (
            "rnn = tf.keras.layers.GRU(3)\ns = rnn.get_initial_state(x)",
            "rnn.get_initial_state(batch_size=keras.ops.shape(x)[0])",
        ),
        (
            "class MyModel(tf.keras.Model):\n    pass\nm = MyModel(vocabulary, 2)",
            "m = MyModel(vocabulary, 2)",
        ),
        (
            "log = tf.get_logger()\nlog.info('a')",
            'log = logging.getLogger(name="replicax")',
        ),
        (
            "x = tf.random.uniform([2], maxval=3, dtype=tf.int32)",
            'keras.random.randint([2], maxval=3, dtype="int32", minval=0)',
        ),
        (
            'w = self.add_weight("w", shape=[3])',
            'w = self.add_weight(name="w", shape=[3])',
        ),
        (
            'w = self.add_variable("w", [3])',
            'w = self.add_weight(name="w", shape=[3])',
        ),
        (
            "o = tf.train.RMSPropOptimizer(0.1)",
            "o = keras.optimizers.RMSprop(0.1, epsilon=1e-10)",
        ),
        ("g = optimizer.get_unscaled_gradients(h)", "g = h"),
        ('model.save("m.keras", save_format="keras")', 'model.save("m.keras")'),
        ("n = x.get_shape()[1].value", "n = x.shape[1]"),
        ("l = tf.keras.losses.mse(y, z)", "keras.losses.mean_squared_error(y, z)"),
        ("i = tf.zeros_initializer()", "i = keras.initializers.Zeros()"),
        ("s.experimental_run_v2(f, args=(x,))", "s.run(f, args=(x,))"),
        ("import inspect\ninspect.unwrap(f)", "inspect.unwrap(f)"),
        ("tf.keras.layers.Embedding(9, 3, input_length=3)", "input_length=3)"),
        (
            "b = tf.keras.callbacks.TensorBoard('d', 1, profile_batch='5,9')",
            "b = rx.callbacks.TensorBoard('d', 1)",
        ),
        (
            "def f(x):\n    tf.debugging.assert_rank(x, 2)\n    return x",
            "(x):\n    ret",
        ),
        ("y = tf.debugging.check_numerics(x, 'bad') + 1", "y = x + 1"),
        ("y = tf.ensure_shape(x, [None, 2])", "y = x"),
        ("n = tf.cast(tf.shape(x)[0], tf.int64)", "n = keras.ops.shape(x)[0]"),
        ("s = tf.shape(x)\nn = tf.cast(s[0], dtype='int32')", "n = s[0]"),
        ("n = tf.cast(tf.shape(x)[0], tf.float32)", "cast(keras.ops.shape(x)[0], "),
        ("y = tf.layers.Conv2D(3, 1)(x)", "y = keras.layers.Conv2D(3, 1)(x)"),
        (
            "r = tf.keras.layers.CuDNNGRU(3, 'zeros')",
            "r = keras.layers.GRU(3, kernel_initializer='zeros')",
        ),
        (
            "n = 2\ntf.config.set_logical_device_configuration("
            "d, [tf.config.LogicalDeviceConfiguration() for _ in range(n)])",
            "rx.set_logical_devices(n)",
        ),
        ("s = tf.multinomial(x, 1, n)", "keras.random.categorical(x, 1, seed=n)"),
        ("tf.compat.v1.compat.v1.disable_eager_execution()\nx = 1", "x = 1"),
    ],
)
def test_what_is_ported(before: str, after: str) -> None:
    text, left = lines(before)
    assert after in text
    assert left == []


LAYER = """
class Noise(tf.keras.layers.Layer):
{}
    def call(self, x): return x + tf.random.normal([2])
x = tf.keras.Input((2,))
model = tf.keras.Model(x, Noise({})(x))
model.compile("sgd", "mse")
"""


@pytest.mark.parametrize(
    ("constructor", "arguments"),
    [
        ("", "name='n'"),
        (
            "    def __init__(self, n):\n"
            "        super().__init__()\n        self.n = n",
            "3",
        ),
        (
            "    def __init__(self, n):\n        super(Noise, self).__init__(name='n')",
            "3",
        ),
    ],
)
def test_layers_get_random_state(constructor: str, arguments: str) -> None:
    text, left = lines(LAYER.format(constructor, arguments))
    assert left == []
    names = executed(text)
    zeros = np.zeros((4, 2), "float32")
    first, second = [names["model"].predict(zeros, verbose=0) for _ in range(2)]
    assert np.abs(first).min() > 0
    assert np.abs(first - second).min() > 0


def test_instances_of_a_layer_draw_different_numbers() -> None:
    layers = LAYER.split("x = tf.keras.Input")[0].format("")
    base = "class Base(tf.keras.layers.Layer):\n    def __init__(self, n):\n"
    base += "        super().__init__()\n        self.n = n\n"
    sub = layers.replace("Noise(tf.keras.layers.Layer)", "Sub(Base)")
    text, left = lines(f"{layers}{base}{sub}a, b, c = Noise(), Noise(), Sub(3)")
    assert left == []
    names = executed(text)
    draws = [np.array(names[name](np.zeros((1, 2), "float32"))) for name in "abc"]
    assert np.abs(np.diff(draws, axis=0)).min() > 0
    assert names["c"].n == 3


@pytest.mark.parametrize(
    "constructor",
    [
        "    def __init__(self): self.built = False",
        "    seed_generator = None",
    ],
)
def test_layers_whose_constructor_is_not_understood_are_left(constructor: str) -> None:
    _, left = lines(LAYER.format(constructor, ""))
    assert ["need state" in each for each in left] == [True]


STEP_OF_KERAS = """
import numpy as np
class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1)
    def call(self, x): return self.dense(x)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            value = self.compiled_loss(y, y_pred)
        self.optimizer.minimize(value, self.trainable_variables, tape=tape)
        self.compiled_metrics.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}
with tf.distribute.OneDeviceStrategy("cpu:0").scope():
    model = Net()
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", ["mae"])
x = np.ones((8, 3), "float32")
logs = model.fit(x, x[:, :1] * 2, batch_size=4, verbose=0).history
"""


def test_the_step_of_keras_2_logs_its_loss_and_its_metrics() -> None:
    text, left = lines(STEP_OF_KERAS)
    assert left == []
    names = executed(text)
    error = np.abs(names["model"](names["x"]) - 2)
    np.testing.assert_allclose(names["logs"]["loss"], [np.mean(error**2)], rtol=1e-5)
    np.testing.assert_allclose(names["logs"]["mae"], [np.mean(error)], rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("self.compiled_loss(y, y_pred, **w)", "use self.compute_loss"),
        ("0 if y is None else self.compiled_loss(y, y_pred)", "use self.compute_loss"),
        ("2 * self.compiled_loss(y, y_pred)", "use self.compute_loss"),
        ("self.compiled_loss(y, y_pred, None, [r])", "no other losses"),
        (
            "self.compiled_loss(y, y_pred)\n            value += sum(self.losses)",
            "do not add self.losses",
        ),
        ("self.compiled_loss(y, y_pred, regularization_losses=r)", "no other losses"),
    ],
)
def test_losses_that_compute_loss_cannot_give_are_left(value: str, reason: str) -> None:
    step = STEP_OF_KERAS.replace("self.compiled_loss(y, y_pred)", value)
    text, left = lines(step)
    assert [reason in each for each in left] == [True]
    assert f"value = {value}\n" in text
    own = "    def compute_loss(self, y): return y\n    def call"
    left = lines(STEP_OF_KERAS.replace("    def call", own))[1]
    assert ["super().compute_loss" in each for each in left] == [True]


def test_methods_that_steps_call_on_objects_get_random_state() -> None:
    text, left = lines(
        "class Net:\n    def draw(self):\n        return tf.random.normal([2])\n"
        "with s.scope():\n    net = Net()\ns.run(lambda: net.draw())"
    )
    assert "keras.random.normal([2], seed=seed_generator)" in text
    assert left == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            "s = tf.distribute.get_strategy()\ndef f(): print(tf.executing_eagerly())\n"
            "s.run(f)",
            "is false in steps",
        ),
        ("y = tf.layers.dense(x, 3)", "make a layer of `keras.layers` once"),
        (
            "y = tf.compat.v1.losses.mean_squared_error(a, b)",
            "call a loss object of keras.losses",
        ),
        (
            "y = tf.losses.sparse_softmax_cross_entropy(a, b)",
            "such as SparseCategoricalCrossentropy(from_logits=True)",
        ),
        ("g = tf.clip_by_norm(f(x), 1.0)", "use `clipnorm=`"),
        ("tf.keras.layers.StringLookup(vocabulary=v)", "is made with TensorFlow"),
        ("x = tf.constant(['a', 'b'])", "of a string stays"),
        ("d = tf.layers.Dropout(0.5)", "make a layer of `keras.layers` once"),
        (
            "K = tf.keras.backend\ny = K.sum(x)\nK = 5",
            "`K` is tf.keras.backend here, and another value elsewhere",
        ),
        ("import tf_slim", "tf_slim needs TensorFlow"),
        ("import tensorflow_docs.modeling", "tensorflow_docs needs TensorFlow"),
        ("import efficientnet.tfkeras", "efficientnet needs Keras 2"),
        ("from transformers import TFBertModel, AutoTokenizer", "transformers.TFBert"),
        ("import smdistributed.dataparallel.tensorflow as d", "use `rx.Mirrored"),
        ("from transformers import AutoTokenizer, TFAutoModel", "or KerasHub"),
    ],
)
def test_what_is_left(before: str, reason: str) -> None:
    text, left = lines(before)
    assert any(reason in each for each in left), left
    assert all(f"# replicax: {each}\n" in text for each in left)


@pytest.mark.parametrize(
    ("statement", "notes"),
    [
        ("tf.maximum(y, 0.0)", ["between equal arguments"]),
        ("tf.keras.backend.clip(y, 0.0, 1.0)", ["between equal arguments"]),
        ("tf.abs(y)", ["has the gradient 1 at 0"]),
        ("tf.nn.selu(y)", ["has the gradient 1.76 at 0"]),
        ("tf.random.set_seed(1)", ["other random numbers"]),
        ("tf.keras.utils.set_random_seed(1)", ["other random numbers"]),
        ("tf.keras.initializers.HeNormal(seed=1)", ["from a seed"]),
        ("tf.keras.layers.Dropout(0.5, seed=1)", ["from a seed"]),
        ("tf.keras.layers.Dropout(0.5, seed=None)", []),
        ("tf.random.normal([2], seed=1)", ["from a seed"]),
        ("tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)", ["if the rate changes"]),
    ],
)
def test_what_gives_other_numbers_is_noted(statement: str, notes: list[str]) -> None:
    ported = port(f"import tensorflow as tf\nx = {statement}\n".encode())
    assert not ported.left
    reasons = [note.reason for note in ported.notes]
    assert [n in r for n, r in zip(notes, reasons, strict=True)] == [True] * len(notes)


def test_datasets_of_a_dictionary_stay_with_their_source() -> None:
    text, left = lines(
        "import tensorflow_datasets as tfds\n"
        "parts = tfds.load('cats_vs_dogs')\n"
        "train, test = parts['train'], parts['test']\n"
        "def scale(x, y): return tf.cast(x, tf.float32), y\n"
        "train = train.map(scale).shuffle(9).batch(8)"
    )
    assert "train.map(scale).shuffle(9).batch(8)" in text
    assert "return tf.cast(x, tf.float32), y" in text
    assert len(left) == 2  # The pipeline, and the import.


def test_autotune_stays_where_a_kept_pipeline_uses_it() -> None:
    source = (
        "AUTO = tf.data.AUTOTUNE\n"
        "def load(name):\n"
        "    return tf.data.TFRecordDataset(name).prefetch(AUTO)"
    )
    assert "AUTO = tf.data.AUTOTUNE\n" in lines(source)[0]
    source = source.replace("TFRecordDataset(name)", "Dataset.from_tensors(name)")
    assert "AUTO" not in lines(source)[0]


def test_what_does_nothing_any_more_goes() -> None:
    ported = port(
        b"try:\n    import tensorflow.compat.v2 as tf\nexcept ImportError:\n"
        b"    import tensorflow as tf\n"
        b"d = tf.data.Dataset.range(3)\nd = d.prefetch(1)\n"
    )
    assert ported.source.decode().endswith("grain.MapDataset.range(3)\n")
    assert b"try" not in ported.source


def test_a_mark_on_the_first_line_does_not_double() -> None:
    ported = port(b"from tensorflow import *\nx = reduce_sum(y)\n")
    assert ported.source.startswith(b"# replicax: `*` imports")
    assert port(ported.source).source == ported.source


def test_calls_that_rules_port_keep_the_name_of_their_module() -> None:
    text, left = ported(
        "import tensorflow as tf\nk = tf.keras\n"
        "model = k.models.load_model('m.keras')\noptimizer = k.optimizers.SGD(lr=0.1)"
    )
    assert left == []
    assert "model = k.models.load_model('m.keras')" in text
    assert "optimizer = k.optimizers.SGD(learning_rate=0.1)" in text
