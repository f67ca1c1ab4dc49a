"""What tf.keras and Keras 2 had and Keras 3 has not, or has otherwise."""

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port

START = (
    "import tensorflow as tf\n"
    "from tensorflow.keras import backend as K\n"
    "opt = tf.keras.optimizers.Adam(1e-3)\n"
)
MODEL = (
    "def made():\n"
    "    return tf.keras.Sequential([tf.keras.layers.Dense(2)])\n"
    "model = made()\n"
)


def lines(source: str) -> tuple[str, list[str]]:
    """The ported text of statements after the start, and what is left."""
    return ported(f"{START}{source}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("K.concatenate([a, b])", "keras.ops.concatenate([a, b], axis=-1)"),
        ("K.argmax(x)", "keras.ops.argmax(x, axis=-1)"),
        (
            "B = tf.keras.backend\nB = tf.keras.backend\nB.argmax(x)",
            "keras.ops.argmax(x, axis=-1)",
        ),
        (
            "def f(x):\n    B = tf.keras.backend\n    return B.argmax(x)",
            "return keras.ops.argmax(x, axis=-1)",
        ),
        ("K.clip(x, min_value=0, max_value=1)", "keras.ops.clip(x, x_min=0, x_max=1)"),
        ("K.expand_dims(K.squeeze(x, 0))", "squeeze(x, 0), axis=-1)"),
        ("K.eval(x)", "keras.ops.convert_to_numpy(x)"),
        ("tf.math.divide_no_nan(a, b)", "keras.ops.divide_no_nan(a, b)"),
        (
            "o = tf.keras.optimizers.SGD(lr=0.1, epsilon=None, decay=0.0)",
            "o = keras.optimizers.SGD(learning_rate=0.1)",
        ),
        (
            "model.compile('adam', 'mse', ['mae'])",
            "model.compile('adam', 'mse', metrics=['mae'])",
        ),
        ("model.fit_generator(g, 9, 2)", "fit(g, steps_per_epoch=9, epochs=2)"),
        ("model.evaluate_generator(g, 3)", "model.evaluate(g, steps=3)"),
        ("model.fit(x, y, nb_epoch=3)", "model.fit(x, y, epochs=3)"),
        ("opt.apply_gradients(g, name='a')", "opt.apply_gradients(g)"),
        (
            "class C(tf.keras.callbacks.Callback):\n"
            "    def __init__(self): self.history = {'lr': []}\n"
            "c = C()\nprint(c.history['lr'])",
            "print(c.history['lr'])",
        ),
        ("config = {'lr': 1}\nconfig.get('lr')", "config.get('lr')"),
        (
            "tf.keras.callbacks.LambdaCallback(on_batch_end=f)",
            "LambdaCallback(on_train_batch_end=f)",
        ),
        (
            "FLAGS = tf.app.flags.FLAGS\nprint(FLAGS.steps)",
            "FLAGS = absl.flags.FLAGS\nprint(FLAGS.steps)",
        ),
        ("print(tf.__version__)", "print(keras.__version__)"),
        ("if a: b = 1\nelse: b = tf.__version__", "else: b = keras.__version__"),
        ("m = tf.keras.Sequential(layers, 'm')", "Sequential(layers, name='m')"),
        ("i = tf.keras.Input((3,), 8, 'i')", "keras.Input((3,), 8, name='i')"),
        (
            "x = tf.keras.losses.sparse_categorical_crossentropy(y, p, True, -1)",
            "keras.losses.sparse_categorical_crossentropy(y, p, True, axis=-1)",
        ),
        (
            "class M(tf.keras.metrics.Metric):\n"
            "    def __init__(self, name, d): super().__init__(name, d)",
            "super().__init__(name=name, dtype=d)",
        ),
        (
            "class L(tf.keras.losses.Loss):\n"
            "    def __init__(self, f, name): super().__init__(name=name)\n"
            "class M(L):\n    def __init__(self, f): super().__init__(f, name='m')",
            "super().__init__(f, name='m')",
        ),
        ("x = tf.keras.utils.to_categorical(y=y)", "keras.utils.to_categorical(x=y)"),
        ("i = tf.keras.Input(x.shape[1:])", "keras.Input(x.shape[1:])"),
        ("assert tf.__version__ >= '2.0'\nx = tf.abs(y)", "\nx = keras.ops.abs(y)"),
        (
            "if Version(tf.__version__) < '2.0':\n    raise E('old')\nx = tf.abs(y)",
            "\nx = keras.ops.abs(y)",
        ),
        ("if tf.__version__ < '2.0': raise E\nx = tf.abs(y)", "\nx = keras.ops.abs(y)"),
        ("o = tf.keras.optimizers.SGD(1)", "o = keras.optimizers.SGD(1.0)"),
        ("o = tf.keras.optimizers.Adam(lr=1)", "Adam(learning_rate=1.0)"),
        ("o = tf.train.GradientDescentOptimizer(1)", "keras.optimizers.SGD(1.0)"),
        ("x = tf.keras.layers.GRU(3)", "x = keras.layers.GRU(3)"),
        (f"{MODEL}print(model.input_shape)", "print(model.input_shape)"),
        (
            "class C:\n    def f(self): return self.input_shape",
            "return self.input_shape",
        ),
        ("m = tf.keras.metrics.Mean()\nm.reset_states()", "m.reset_state()"),
        ("x = tf.keras.layers.LSTM(2)\nx.reset_states()", "x.reset_state()"),
        ("m.build(tf.TensorShape([1, None]))", "m.build(tuple([1, None]))"),
        ("f = tf.recompute_grad(g)", "f = keras.remat(g)"),
        ("r = tf.keras.regularizers.l1_l2(1e-4, 0)", "l1_l2(1e-4, 0)"),
        ("x = tf.keras.layers.AvgPool1D(3)", "keras.layers.AvgPool1D(3)"),
        (
            "class L(tf.keras.losses.Loss):\n    def __init__(self):\n"
            "        super().__init__(tf.keras.losses.Reduction.SUM, 'l')",
            "super().__init__(reduction='sum', name='l')",
        ),
        ("model.save('a.keras', signatures=None)", "model.save('a.keras')"),
        ("print(opt.lr.read_value())", "print(opt.learning_rate.value)"),
        (
            "def f(c=tf.keras.optimizers.SGD): return c(0.1)\n"
            "f(tf.keras.optimizers.Adam)",
            "return c(0.1)",
        ),
        (
            "def f(r=S()): return tf.keras.optimizers.SGD(r)\nf(1)",
            "return keras.optimizers.SGD(r)",
        ),
        ("def f(o): (o or tf.keras.optimizers.SGD(0.1)).lr", ").learning_rate"),
        ("opt.lr = 0.1", "opt.learning_rate = 0.1"),
        (f"{MODEL}model.optimizer.lr.assign(1)", "optimizer.learning_rate.assign(1)"),
        ("class Box: pass\nb = Box()\nb.lr = b.weights", "b.lr = b.weights"),
        ("def f(o): return o.lr, o.get_weights()", "return o.lr, o.get_weights()"),
    ],
)
def test_what_is_ported(before: str, after: str) -> None:
    text, left = lines(before)
    assert after in text
    assert left == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("K.batch_dot(a, b)", "use `keras.ops`"),
        ("K.binary_crossentropy(t, o, axis=1)", "has no argument 'axis'"),
        ("tf.compat.v1.initializers.random_normal()", "stddev is 1 in TensorFlow 1"),
        ("tf.keras.utils.audio_dataset_from_directory(d)", "returns tf.data"),
        ("model.fit_generator(g, samples_per_epoch=9)", "pass the number of batches"),
        ("opt.apply_gradients(g, global_step=s)", "increments optimizer.iterations"),
        ("if tf.__version__.startswith('2'): x = 1", "compares TensorFlow's version"),
        ("x = tf.compat.v1.keras.layers.LSTM(3)", "hard_sigmoid in TensorFlow 1"),
        (
            "x = tf.compat.v1.keras.layers.GRU(3, recurrent_activation='sigmoid')",
            "reset_after is False",
        ),
        (
            "k = tf.compat.v1.keras\nx = k.layers.LSTM(3)",
            "hard_sigmoid in TensorFlow 1",
        ),
        (f"{MODEL}model.save('a.keras', signatures=s)", "no signatures="),
        ("tf.keras.models.save_model(m, 'a.keras', signatures=s)", "no signatures="),
        ("x = tf.keras.layers.Dense(2, activation='hard_sigmoid')", "x / 6 + 0.5"),
        ("x = tf.keras.layers.Activation('hard_sigmoid')", "x / 6 + 0.5"),
        ("x = tf.keras.activations.hard_sigmoid(x)", "x / 6 + 0.5"),
        ("r = tf.keras.regularizers.l1_l2(1e-4)", "write l2="),
        ("x = tf.keras.layers.ConvLSTM2D(3, 2)", "write recurrent_activation="),
        ("o = tf.keras.optimizers.Lion()", "write learning_rate="),
    ],
)
def test_what_is_left(before: str, reason: str) -> None:
    text, left = lines(before)
    assert any(reason in each for each in left), left
    assert all(f"# replicax: {each}\n" in text for each in left)


@pytest.mark.parametrize("end", ["", "import tensorflow as tf\nprint(tf.zeros(3))\n"])
def test_names_of_the_package_keras_are_those_of_keras_2(end: str) -> None:
    source = f"from keras.utils import multi_gpu_model as m\nx = m(n, 2)\n{end}"
    left = port(source.encode()).left
    assert [finding.line for finding in left] == [2]
    assert all("use `rx.MirroredStrategy`" in finding.reason for finding in left)


def test_a_script_for_keras_3_stays_byte_for_byte() -> None:
    source = b"import keras\nfrom keras import ops\nprint(ops.ones(3), keras.Model)\n"
    source += b"torch.optim.Adam(lr=0.1)\n"
    assert port(source).source == source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optimizers.Nadam(lr=0.1)", "optimizers.Nadam(learning_rate=0.1)"),
        ("model.fit_generator(batches, 9)", "model.fit(batches, steps_per_epoch=9)"),
        ("K.exp(y)", "keras.ops.exp(y)"),
        ("m.fit_generator(g, epochs=2)", "m.fit(g, epochs=2)"),
        ("y.shape.as_list()", "list(y.shape)"),
        ("f(x, batch_input_shape=(2, 3))", "f(x, batch_input_shape=(2, 3))"),
    ],
)
def test_a_script_of_the_package_keras_2_is_ported(before: str, after: str) -> None:
    imports = "from keras import backend as K, optimizers"
    text, left = ported(f"{imports}\nx = {before}")
    assert text.startswith("import replicax as rx  # Before keras")
    assert text.endswith(f"\nx = {after}\n")
    assert left == []


def test_add_loss_has_no_inputs() -> None:
    text, left = lines(
        "class KL(tf.keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        self.add_loss(tf.reduce_mean(x), inputs=x)\n"
        "        return x"
    )
    assert "self.add_loss(keras.ops.mean(x))\n" in text
    assert left == []


METRICS = """
def near(y_true, y_pred):
    "The share that is near."
    return tf.reduce_mean(tf.cast(tf.abs(y_true - y_pred) < 0.5, tf.float32))
def limited(limit):
    def within(y, p):
        return tf.reduce_mean(tf.cast(tf.abs(y - p) < limit, tf.float32))
    return within
class Near(tf.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="share")
        self.mean = tf.keras.metrics.Mean()
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(near(y_true, y_pred))
    def result(self):
        return self.mean.result()
    def reset_state(self):
        self.mean.reset_state()
"""


@pytest.mark.parametrize("metric", ["near", "limited(0.5)", "Near()", "{'d': [near]}"])
def test_metrics_of_the_script_get_labels_of_the_predictions_rank(metric: str) -> None:
    """Labels `[n]` and predictions `[n, 1]` would be broadcast to `[n, n]`."""
    given = metric if metric.startswith("{") else f"[{metric}]"
    text, left = lines(
        f"{METRICS}"
        "model = tf.keras.Sequential([tf.keras.Input((1,)), "
        "tf.keras.layers.Dense(1, 'linear', False, 'ones', name='d')])\n"
        f"model.compile('sgd', 'mse', metrics={given})\n"
    )
    assert left == []
    names = executed(text)
    x = np.arange(8.0, dtype="float32")
    y = x + np.where(x < 6, 0, 1)
    *_, share = names["model"].evaluate(x[:, None], y, verbose=0)
    assert share == pytest.approx(0.75)


def test_metrics_that_flatten_or_ask_keras_stay() -> None:
    text, _ = lines(
        "def a(y_true, y_pred): return K.sum(K.flatten(y_true) * K.flatten(y_pred))\n"
        "def b(y_true, y_pred):\n"
        "    return tf.keras.metrics.binary_accuracy(y_true, y_pred)\n"
        "made = tf.keras.Sequential()\nmade.compile('sgd', 'mse', metrics=[a, b])"
    )
    assert "ndim" not in text


def test_a_metric_that_resets_itself_has_the_name_that_keras_calls() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Best(tf.keras.metrics.Mean):\n"
        "    def reset_states(self):\n"
        "        super().reset_states()\n"
        "        self.total.assign(7.0)\n"
        "best = Best()\n"
        "best.update_state(1.0)\n"
        "best.reset_states()"
    )
    assert left == []
    names = executed(text)
    assert float(names["best"].total) == 7.0


@pytest.mark.parametrize(
    "methods",
    [
        "reset_states(self): self.reset = True",  # No class of Keras.
        "go(self): self.reset_states()\n    def reset_states(self): self.reset = True",
    ],
)
def test_reset_states_of_other_classes_stays(methods: str) -> None:
    text, left = ported(
        "import tensorflow as tf\nx = tf.abs(-1)\n"
        f"class Env:\n    def {methods}\nenv = Env()\nenv.reset_states()"
    )
    assert left == []
    names = executed(text)
    assert names["env"].reset


STATEFUL = """\
import numpy as np
import tensorflow as tf
model = tf.keras.Sequential([
    tf.keras.layers.LSTM(3, batch_input_shape=(2, None, 1), stateful=True),
    tf.keras.layers.Dense(1)])
x = np.ones((2, 4, 1), "float32")
first, second = model(x).numpy(), model(x).numpy()
model.reset_states()
third = model(x).numpy()
"""


def test_stateful_layers_of_a_model_that_keras_trains_are_left() -> None:
    _, left = ported(f"{STATEFUL}model.fit(x, x)")
    assert ["forgets the states" in each for each in left] == [True]


def test_a_model_that_resets_itself_does_so() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Net(tf.keras.Model):\n"
        "    def reset_states(self): self.reset = True\n"
        "net = Net()\nnet.reset_states()"
    )
    assert left == []
    assert executed(text)["net"].reset


@pytest.mark.parametrize(
    ("layer", "is_noted"), [("Masking()", True), ("Flatten()", False)]
)
def test_metrics_of_masked_steps_are_noted(layer: str, is_noted: bool) -> None:
    source = (
        f"import tensorflow as tf\nx = tf.keras.layers.{layer}\n"
        "m = tf.keras.Sequential()\nm.compile('sgd', 'mse', ['mae'])\n"
    )
    notes = port(source.encode()).notes
    assert any("masked time steps" in n.reason for n in notes) == is_noted


@pytest.mark.parametrize(
    "loss",
    [
        "class Loss(tf.keras.losses.Loss):\n    def call(self, y_true, y_pred):\n"
        "        return tf.reduce_mean((y_true - y_pred) ** 2)\nmade = Loss()\n",
        "def made(y_true, y_pred):\n"
        "    return tf.reduce_mean((y_true - y_pred) ** 2)\n",
    ],
)
def test_losses_get_labels_of_the_shape_of_predictions(loss: str) -> None:
    text, left = ported(
        f"import numpy as np\nimport tensorflow as tf\n{loss}"
        "layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]\n"
        "model = tf.keras.Sequential(layers)\n"
        "model.compile(tf.keras.optimizers.SGD(0.0), loss=made)\n"
        "x, y = np.ones((4, 2)), np.arange(4.0)\n"
        "value = model.fit(x, y, verbose=0).history['loss'][0]\n"
        "expected = np.mean((model.predict(x, verbose=0)[:, 0] - y) ** 2)"
    )
    assert left == []
    names = executed(text)
    assert names["value"] == pytest.approx(names["expected"], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from keras.layers.core import Dense\nx = Dense(2)", "layers import Dense\n"),
        (
            "import keras.layers.core as core\nx = core.LSTM(2)",
            "keras.layers as core\n",
        ),
        ("from keras.utils import np_utils\nx = np_utils.to_categorical([1])", ""),
        (
            "from keras.layers import core as c\nx = c.Dense(2)",
            "= keras.layers.Dense(2)",
        ),
    ],
)
def test_modules_that_keras_2_had_within_its_own(before: str, after: str) -> None:
    text, left = ported(before)
    assert left == []
    assert after in text
    executed(text)
