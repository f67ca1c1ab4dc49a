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
CALLBACK = (
    "class Reset(tf.keras.callbacks.Callback):\n"
    "    def on_epoch_end(self, epoch, logs):\n"
    "        "
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
        ("print(h.history['lr'])", "print(h.history['learning_rate'])"),
        ("def f(logs): return logs.get('lr', 0)", "logs.get('learning_rate', 0)"),
        ("def f(logs): return 'lr' in logs", "return 'learning_rate' in logs"),
        ("def f(logs): (logs or {}).pop('lr')", "(logs or {}).pop('learning_rate')"),
        ("def f(logs): logs.update({'lr': 1})", "logs.update({'learning_rate': 1})"),
        ("def f(logs): logs.update(lr=1)", "logs.update(learning_rate=1)"),
        ("print(f'{logs.get(\"lr\")} {x}')", 'logs.get("learning_rate")'),
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
        ("i = tf.keras.Input(x.shape[-1])", "keras.Input((x.shape[-1],))"),
        ("i = tf.keras.Input(x.shape[1:])", "keras.Input(x.shape[1:])"),
        ("assert tf.__version__ >= '2.0'\nx = tf.abs(y)", "\nx = keras.ops.abs(y)"),
        (
            "if Version(tf.__version__) < '2.0':\n    raise E('old')\nx = tf.abs(y)",
            "\nx = keras.ops.abs(y)",
        ),
        ("if tf.__version__ < '2.0': raise E\nx = tf.abs(y)", "\nx = keras.ops.abs(y)"),
        ("o = tf.keras.optimizers.SGD(1)", "o = keras.optimizers.SGD(1.0)"),
        ("o = tf.keras.optimizers.Adam(lr=1)", "Adam(learning_rate=1.0)"),
        ("r = 1\no = tf.keras.optimizers.AdamW(r)", "keras.optimizers.AdamW(float(r))"),
        ("o = tf.train.GradientDescentOptimizer(1)", "keras.optimizers.SGD(1.0)"),
        ("x = tf.keras.layers.GRU(3)", "x = keras.layers.GRU(3)"),
        (f"{MODEL}for layer in model.layers:\n    layer.output_shape", "output.shape"),
        (f"{MODEL}print(model.input_shape)", "print(model.input_shape)"),
        (
            "class C:\n    def f(self): return self.input_shape",
            "return self.input_shape",
        ),
        ("m = tf.keras.metrics.Mean()\nm.reset_states()", "m.reset_state()"),
        ("x = tf.keras.layers.LSTM(2)\nx.reset_states()", "x.reset_state()"),
        (
            f"{MODEL}m = model\nm.reset_states()",
            "[layer.reset_state() for layer in m.layers if getattr(layer, ",
        ),
        (f"{CALLBACK}self.model.reset_states()", "in self.model.layers if"),
        ("m.build(tf.TensorShape([1, None]))", "m.build(tuple([1, None]))"),
        ("f = tf.recompute_grad(g)", "f = keras.remat(g)"),
        ("r = tf.keras.regularizers.l1_l2(1e-4, 0)", "l1_l2(1e-4, 0)"),
        ("x = tf.keras.layers.AveragePooling2D()", "AveragePooling2D(pool_size=2)"),
        ("x = tf.keras.layers.AvgPool1D(3)", "keras.layers.AvgPool1D(3)"),
        (
            "class L(tf.keras.losses.Loss):\n    def __init__(self):\n"
            "        super().__init__(tf.keras.losses.Reduction.SUM, 'l')",
            "super().__init__(reduction='sum', name='l')",
        ),
        ("model.save('a.keras', signatures=None)", "model.save('a.keras')"),
        ("print(hasattr(opt, 'lr'))", "print(hasattr(opt, 'learning_rate'))"),
        (
            f"{MODEL}for i, layer in enumerate(model.layers):\n    layer.output_shape",
            "output.shape",
        ),
        ("print(opt.lr.read_value())", "print(opt.learning_rate.value)"),
        ("o = tf.keras.optimizers.SGD\nx = o(lr=1)", "SGD(learning_rate=1.0)"),
        (
            "def f(c=tf.keras.optimizers.SGD): return c(0.1)\n"
            "f(tf.keras.optimizers.Adam)",
            "return c(0.1)",
        ),
        (
            "def f(r=S()): return tf.keras.optimizers.SGD(r)\nf(1)",
            "return keras.optimizers.SGD(r)",
        ),
        ("def f(r=0.1): tf.keras.optimizers.SGD(r)\nf(1)", "SGD(float(r))"),
        ("def f(o): (o or tf.keras.optimizers.SGD(0.1)).lr", ").learning_rate"),
        ("opt.lr = 0.1", "opt.learning_rate = 0.1"),
        ("print(opt.lr(opt.iterations))", "print(opt.learning_rate)"),
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
        (
            "m = tf.keras.Sequential([tf.keras.layers.Lambda(f)])\n"
            "m = tf.keras.models.load_model('m.h5')",
            "only with safe_mode=False",
        ),
        ("tf.compat.v1.initializers.random_normal()", "stddev is 1 in TensorFlow 1"),
        ("tf.keras.utils.audio_dataset_from_directory(d)", "makes tf.data"),
        ("model.fit_generator(g, samples_per_epoch=9)", "count batches"),
        ("model.train_on_batch(x, y, reset_metrics=False)", "no reset_metrics="),
        ("print(model.metrics_names)", "return_dict=True"),
        ("opt.apply_gradients(g, global_step=s)", "counts optimizer.iterations"),
        ("if tf.__version__.startswith('2'): x = 1", "compares a version"),
        (
            "class M(tf.keras.Model): pass\nM().save('m')\n"
            "model = tf.keras.models.load_model('m')",
            "loads no M without its class",
        ),
        (f"{MODEL}model.metrics[-1].threshold", "keep the metric in a variable"),
        ("x = tf.keras.layers.Dense(2, dynamic=True)", "has no argument 'dynamic'"),
        (
            "class M(tf.keras.Model): pass\nmodel = M(dynamic=True)",
            "run_eagerly=True",
        ),
        ("x = tf.compat.v1.keras.layers.LSTM(3)", "hard_sigmoid in TensorFlow 1"),
        (
            "x = tf.compat.v1.keras.layers.GRU(3, recurrent_activation='sigmoid')",
            "reset_after is False",
        ),
        (
            "k = tf.compat.v1.keras\nx = k.layers.LSTM(3)",
            "hard_sigmoid in TensorFlow 1",
        ),
        (f"{MODEL}n = model.layers[0].input_shape", "no input_shape"),
        (f"{MODEL}n = [a.input_shape for a in model.layers[1:]]", "no input_shape"),
        ("x = tf.keras.layers.Dense(2)\ny = x.input_shape", "no input_shape"),
        (f"{MODEL}model.save('a.keras', signatures=s)", "no signatures="),
        (f"{MODEL}m = model\nm.save('a')\nprint('a', m)", "ends with .keras"),
        ("tf.keras.models.save_model(m, 'a.keras', signatures=s)", "no signatures="),
        ("print(isinstance(opt.lr, Schedule))", "not the schedule"),
        ("print(callable(opt.learning_rate))", "not the schedule"),
        ("w = opt.variables()", "is a list"),
        ("w = opt.get_slot(v, 'm')", "has no slots"),
        ("w = float(opt.loss_scale)", "the variable `dynamic_scale`"),
        ("s = x.get_input_shape_at(0)", "use `input.shape`"),
        (f"{MODEL}model.get_updates_for(x)", "no get_updates_for of a model"),
        ("x = tf.keras.layers.Dense(2)\nx.batch_input_shape", "no batch_input_shape"),
        ("x = tf.keras.layers.Dense(2, activation='hard_sigmoid')", "x / 6 + 0.5"),
        ("x = tf.keras.layers.Activation('hard_sigmoid')", "x / 6 + 0.5"),
        ("x = tf.keras.activations.hard_sigmoid(x)", "x / 6 + 0.5"),
        ("x = tf.keras.layers.LSTM(2)\nx.reset_states(s)", "takes no values"),
        ("r = tf.keras.regularizers.l1_l2(1e-4)", "write l2="),
        ("x = tf.keras.layers.ConvLSTM2D(3, 2)", "write recurrent_activation="),
        ("o = tf.keras.optimizers.Lion()", "write learning_rate="),
        ("w = opt.get_weights()", "in another order"),
        ("def f(o): o.set_weights(w)\nf(opt)", "in another order"),
        (f"{MODEL}n = model.optimizer.weights", "in another order"),
        ("rate = opt._decayed_lr(tf.float32)", "the rate of this step"),
        ("def f(o): return o._decayed_lr", "the rate of this step"),
        ("print(opt.learning_rate(3))", "not the schedule"),
        ("g = tf.clip_by_norm(g, f(x))", "give its clip_norm a name"),
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model.fit_generator(batches, 9)", "model.fit(batches, steps_per_epoch=9)"),
        ("RMSprop(lr=0.01)", "RMSprop(learning_rate=0.01)"),
        ("K.exp(x)", "keras.ops.exp(x)"),
    ],
)
def test_a_script_for_the_package_keras_2_is_ported(before: str, after: str) -> None:
    imports = "from keras import backend as K\nfrom keras.optimizers import RMSprop\n"
    text, left = ported(f"{imports}{before}")
    assert after in text
    assert not left


@pytest.mark.parametrize("value", ["m.result().numpy()", "K.get_value(m.result())"])
@pytest.mark.parametrize("use", ["round({}, 1)", "v = {}\nx = round(v, 1)"])
def test_a_value_that_is_rounded_is_a_number(value: str, use: str) -> None:
    use = use if "\n" in use else f"x = {use}"
    text, left = lines(f"m = tf.keras.metrics.Mean()\nm(0.26)\n{use.format(value)}")
    assert not left
    assert executed(text)["x"] == 0.3


@pytest.mark.parametrize(
    "made", ["{3: 'c'}", "dict([(3, 'c')])", "{3: c for c in 'c'}"]
)
def test_a_value_that_is_a_key_is_a_number(made: str) -> None:
    text, left = lines(f"d = {made}\nk = tf.constant([3])[0].numpy()\nx = d[k]")
    assert not left
    assert executed(text)["x"] == "c"


def test_lists_of_numbers_are_arrays_where_keras_reads_them() -> None:
    text, left = lines(
        f"{MODEL}model.compile('sgd', 'mse')\nx = [[1.0], [-2.0]]\n"
        "model.fit(x, [[1, 2], [3, 4]], validation_data=(x, x), epochs=2)\n"
        "result = model.predict([100.0])\n"
        "y = model.fit([a, b], c)\n"
    )
    assert not left
    assert "model.fit([a, b], c)" in text
    names = executed(text.rpartition("y = ")[0])
    assert names["result"].shape == (1, 2)


def test_a_script_for_keras_3_stays_byte_for_byte() -> None:
    source = b"import keras\nfrom keras import ops\nprint(ops.ones(3), keras.Model)\n"
    source += b"torch.optim.Adam(lr=0.1)\n"
    assert port(source).source == source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("optimizers.Nadam(lr=0.1)", "optimizers.Nadam(learning_rate=0.1)"),
        ("m.fit_generator(g, epochs=2)", "m.fit(g, epochs=2)"),
        ("y.shape.as_list()", "list(y.shape)"),
        ("f(x, batch_input_shape=(2, 3))", "f(x, batch_input_shape=(2, 3))"),
    ],
)
def test_a_script_of_the_package_keras_2_is_ported(before: str, after: str) -> None:
    text, left = ported(f"from keras import optimizers\nx = {before}")
    assert text.startswith("import replicax as rx  # Before keras")
    assert text.endswith(f"\nfrom keras import optimizers\nx = {after}\n")
    assert left == []


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("model.fit(x, y, threads=2)", "keras.Sequential.fit has no argument"),
        (
            "model.trainable_variables[0].assign(x, read_value=False)",
            "keras.Variable.assign has no argument 'read_value'",
        ),
        ("opt.apply_gradients(g, clip=2)", "Adam.apply_gradients has no argument"),
        (
            "class D(tf.keras.layers.Layer):\n"
            "    def build(self, shape):\n"
            "        self.w = self.add_weight(name='w', use_resource=True)",
            "keras.layers.Layer.add_weight has no argument 'use_resource'",
        ),
    ],
)
def test_keywords_that_methods_of_keras_3_lack_are_reported(
    before: str, why: str
) -> None:
    _, left = lines(f"{MODEL}{before}")
    assert len(left) == 1
    assert why in left[0]


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


def test_a_model_of_stateful_layers_is_reset() -> None:
    text, left = ported(STATEFUL)
    assert left == []
    names = executed(text)
    assert names["first"].tolist() != names["second"].tolist()
    assert names["first"].tolist() == names["third"].tolist()


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
    assert any("that a mask leaves out" in n.reason for n in notes) == is_noted


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


WIDE = """\
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(
    1, activation="sigmoid", kernel_initializer="ones")])
more = [tf.keras.metrics.BinaryCrossentropy(name="smooth", label_smoothing=0.5)]
model.compile("sgd", "mse", metrics=[
    "binary_crossentropy", tf.keras.losses.hinge, tf.keras.metrics.Poisson(),
    "categorical_accuracy", *more])
logs = [model.evaluate(x, labels, return_dict=True) for labels in (y, y[:, None])]
"""


def test_metrics_of_keras_get_labels_of_the_shape_of_predictions() -> None:
    text, left = ported(WIDE)
    assert left == []
    y = np.array([0.0, 1.0, 1.0])
    x = np.array([[-1.0], [0.5], [2.0]], "float32")
    flat, wide = executed(text, {"x": x, "y": y})["logs"]
    assert flat == pytest.approx(wide)
    p = 1 / (1 + np.exp(-x[:, 0]))
    assert flat["poisson"] == pytest.approx(np.mean(p - y * np.log(p)), rel=1e-5)
    s = 0.5 * y + 0.25
    entropy = -np.mean(s * np.log(p) + (1 - s) * np.log(1 - p))
    assert flat["smooth"] == pytest.approx(entropy, rel=1e-5)


def test_metrics_of_models_that_are_loaded_or_have_classes_stay() -> None:
    _, left = ported(f"{WIDE}tf.keras.models.load_model('m.keras')\n")
    assert len([each for each in left if "see that labels are [n, 1]" in each]) == 5
    score = WIDE.replace("*more", "tf.keras.metrics.F1Score(threshold=0.5)")
    _, left = ported(score)
    assert ["Keras 3 refuses labels [n]" in each for each in left] == [True]
    for made, is_left in (("m", True), ("4", False)):
        units = score.replace("1, activation", f"{made}, activation")
        _, left = ported(units)
        assert any("Keras 3 refuses labels" in each for each in left) == is_left
    score = score.replace('activation="sigmoid", ', "")
    text, left = ported(score.replace('"mse"', '"categorical_crossentropy"'))
    assert left == []
    assert "MeanMetricWrapper" not in text


FRACTIONS = """
import numpy as np
import tensorflow as tf

x = np.ones((20, 3), "float32")
def batches():
    while True:
        yield x[:8], x[:8, :1]
steps = np.ceil(len(x) / 8)
model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(batches(), steps_per_epoch=len(x) / 8, verbose=0)
model.fit(batches(), steps_per_epoch=steps, verbose=0)
rows = len(model.predict(batches(), steps=1 + len(x) / 8, verbose=0))
count = int(model.optimizer.iterations.numpy())
model.fit(batches(), steps_per_epoch=len(x) // 8, verbose=0)
"""


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_numbers_of_steps_are_integers() -> None:
    """TensorFlow runs 3 batches for 2.5 steps."""
    text, left = ported(FRACTIONS)
    assert left == []
    assert text.count("steps_per_epoch=int(") == 2
    names = executed(text)
    assert (names["count"], names["rows"]) == (6, 32)


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
