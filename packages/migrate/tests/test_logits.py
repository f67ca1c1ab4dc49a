"""Losses of probabilities become losses of logits where all of it is in sight."""

import pytest

from replicax_migrate import port

SEQUENTIAL = """import tensorflow as tf
layers = tf.keras.layers
model = tf.keras.Sequential([layers.Dense(9), layers.Dense(3, activation="softmax")])
"""
COMPILED = 'model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])\n'
LOGITS = "keras.losses.CategoricalCrossentropy(from_logits=True)"


def text(source: str) -> tuple[str, list[str]]:
    """The ported text, and the notes."""
    ported = port(source.encode())
    assert ported.left == ()
    return ported.source.decode(), [note.reason for note in ported.notes]


def test_a_compiled_model_gives_logits_and_its_predictions_get_the_activation() -> None:
    result, notes = text(f"{SEQUENTIAL}{COMPILED}p = model.predict(x, verbose=0)\n")
    assert "layers.Dense(9), layers.Dense(3)])" in result
    assert f'model.compile("adam", {LOGITS}, metrics=["accuracy"])' in result
    assert "p = keras.ops.softmax(model.predict(x, verbose=0))" in result
    assert any("the model returns logits" in note for note in notes)


@pytest.mark.parametrize(
    ("made", "after"),
    [
        (
            "model = tf.keras.Sequential()\nmodel.add(layers.Dense(9))\n"
            "model.add(layers.Activation('softmax'))\n",
            "model.add(layers.Dense(9))\nmodel.compile",
        ),
        (
            "y = layers.Dense(3, tf.nn.softmax)(x)\nmodel = tf.keras.Model(x, y)\n",
            "y = layers.Dense(3)(x)\n",
        ),
        (
            "y = layers.Dense(3)(x)\ny = layers.Activation('softmax')(y)\n"
            "model = tf.keras.Model(x, y)\n",
            "y = layers.Dense(3)(x)\nmodel = keras.Model(x, y)\n",
        ),
        (
            "z = layers.Dense(3)(x)\ny = layers.Softmax()(z)\n"
            "model = tf.keras.Model(x, y)\n",
            "y = z\nmodel = keras.Model(x, y)\n",
        ),
        (
            "y = layers.Activation('softmax', dtype='float32')(x)\n"
            "model = tf.keras.Model(x, y)\n",
            "y = layers.Activation(\"linear\", dtype='float32')(x)\n",
        ),
        (
            "def make():\n    return tf.keras.Sequential([\n        layers.Dense(3),\n"
            "        layers.Softmax(),\n    ])\nmodel = make()\n",
            "        layers.Dense(3),\n    ])\n",
        ),
    ],
)
def test_the_last_activation_is_found(made: str, after: str) -> None:
    result, _ = text(
        f"import tensorflow as tf\nlayers = tf.keras.layers\n{made}{COMPILED}"
    )
    assert after in result
    assert LOGITS in result


LOOP = """import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, activation=tf.nn.sigmoid)])
    loss_fn = tf.keras.losses.BinaryCrossentropy(reduction="none", from_logits=False)


def step(x, y):
    with tf.GradientTape() as tape:
        p = model(x, training=True)
        loss = loss_fn(y, p)
    {more}
    return loss


strategy.run(step, args=(x, y))
"""


def test_the_function_of_a_loss_becomes_a_loss_of_logits() -> None:
    loss = "tf.keras.losses.categorical_crossentropy"
    result, _ = text(SEQUENTIAL + COMPILED.replace('"categorical_crossentropy"', loss))
    assert "keras.losses.CategoricalCrossentropy(from_logits=True)" in result


def test_a_loop_gives_its_loss_the_logits() -> None:
    result, _ = text(LOOP.format(more="print(loss)"))
    assert "keras.layers.Dense(1)])" in result
    assert 'BinaryCrossentropy(reduction="none", from_logits=True)' in result
    assert "p = model(x, training=True)" in result


OWN_LOSS = """import tensorflow as tf
bce = tf.keras.losses.binary_crossentropy
def loss(y_true, y_pred):
"""
SIGMOID = """
model = tf.keras.Sequential([tf.keras.layers.Dense(1, activation="sigmoid")])
model.compile("adam", loss)
"""
OTHER = """
other = tf.keras.Sequential([tf.keras.layers.Dense(1, activation="sigmoid")])
other.compile("adam", "mse")
"""


def test_a_loss_of_the_script_gets_logits_where_it_uses_them_for_nothing_else() -> None:
    result, _ = text(f"{OWN_LOSS}    return 2 * bce(y_true, y_pred){SIGMOID}")
    assert "bce(y_true, y_pred, from_logits=True)" in result
    assert "keras.layers.Dense(1)])" in result


@pytest.mark.parametrize(
    "source",
    [
        LOOP.format(more="print(p)"),
        LOOP.format(more="other(p)"),
        SEQUENTIAL + COMPILED + "use(model)\n",
        SEQUENTIAL + COMPILED.replace('"accuracy"', '"mse"'),
        SEQUENTIAL + "model = tf.keras.models.load_model('m.keras')\n" + COMPILED,
        "import tensorflow as tf\nfrom models import model\n" + COMPILED,
        f"{OWN_LOSS}    return bce(y_true, y_pred) + tf.reduce_sum(y_pred){SIGMOID}",
        f"{OWN_LOSS}    return bce(y_true, y_pred){SIGMOID}{OTHER}",
    ],
)
def test_what_is_not_in_sight_is_noted(source: str) -> None:
    result, notes = text(source)
    assert "from_logits=True" not in result
    assert any("leave the last activation out" in note for note in notes)


@pytest.mark.parametrize(
    "loss", ["['mse', 'binary_crossentropy']", "{'a': 'categorical_crossentropy'}"]
)
def test_losses_of_several_outputs_are_noted(loss: str) -> None:
    source = f"import tensorflow as tf\nloss = {loss}\nmodel.compile('sgd', loss=loss)"
    _, notes = text(source)
    assert ["leave the last activation out" in note for note in notes] == [True]


def test_a_model_that_a_function_gets_in_several_calls_is_one_model() -> None:
    loss = "tf.keras.losses.categorical_crossentropy(y, model(x))"
    function = f"def loss_of(model, x, y):\n    return {loss}\n"
    result, _ = text(
        f"{SEQUENTIAL}{function}loss_of(model, x, y)\nloss_of(model, z, y)"
    )
    assert "categorical_crossentropy(y, model(x), from_logits=True)" in result
    assert "layers.Dense(9), layers.Dense(3)])" in result


def test_logits_of_a_model_with_an_activation_are_what_goes_into_it() -> None:
    """TensorFlow takes them there, also where `from_logits=True`."""
    loss = "tf.keras.losses.CategoricalCrossentropy(from_logits=True)"
    compiled = f"model.compile('adam', {loss})\n"
    result, _ = text(f"{SEQUENTIAL}{compiled}p = model.predict(x)\n")
    assert "layers.Dense(9), layers.Dense(3)])" in result
    assert f"model.compile('adam', {LOGITS})" in result
    assert "p = keras.ops.softmax(model.predict(x))" in result
    plain = SEQUENTIAL.replace(', activation="softmax"', "")
    result, notes = text(f"{plain}{compiled}p = model.predict(x)\n")
    assert "p = model.predict(x)" in result
    assert notes == []
    left = port(f"{SEQUENTIAL}{compiled}f(model)\np = model(x) + 1\n".encode()).left
    assert any("Keras 3 applies softmax twice" in each.reason for each in left)


CROSSED = """import tensorflow as tf
UNITS = 3
model = tf.keras.Sequential([tf.keras.layers.Dense(UNITS, activation={activation})])
model.compile("adam", "{loss}", metrics=["accuracy"])
"""


def test_probabilities_of_a_function_of_tensorflow_stay_for_another_loss() -> None:
    crossed = {"activation": "tf.nn.sigmoid", "loss": "categorical_crossentropy"}
    result, _ = text(CROSSED.format(**crossed))
    assert "Dense(UNITS, activation=keras.activations.sigmoid)" in result


def test_the_accuracy_of_several_sigmoids_compares_the_largest() -> None:
    given = {"activation": '"sigmoid"', "loss": "binary_crossentropy"}
    result, _ = text(CROSSED.format(**given))
    assert 'metrics=["accuracy"]' in result
    one = CROSSED.format(**given).replace("UNITS = 3", "UNITS = 1")
    for argument in ("metrics=", "weighted_metrics=", ""):
        result, _ = text(one.replace("metrics=", argument))
        assert 'BinaryAccuracy(name="accuracy", threshold=0)' in result


def test_the_last_layer_of_a_list_may_be_added_later() -> None:
    start, added = SEQUENTIAL.rpartition(", layers.Dense(3")[::2]
    after, _ = text(f"{start}])\nmodel.add(layers.Dense(3{added[:-3]})\n{COMPILED}")
    assert "model.add(layers.Dense(3))" in after
    assert LOGITS in after


INPUT = "x = layers.Input((4,))\n"
OWN = (
    "class Net(tf.keras.Model):\n    def __init__(self):\n        super().__init__()\n"
)


@pytest.mark.parametrize(
    ("made", "after"),
    [
        (
            f"{INPUT}model = tf.keras.Model(x, layers.Dense(3, 'softmax')(x))\n",
            "keras.Model(x, layers.Dense(3)(x))",
        ),
        (
            f"{INPUT}model = tf.keras.Model(\n    inputs=[x],\n"
            "    outputs=[layers.Softmax(axis=-1, name='p')(layers.Dense(3)(x))])\n",
            "Activation(\"linear\", name='p')(layers.Dense(3)(x))])",
        ),
        (
            f"{INPUT}y = layers.Dense(3)(x)\n"
            "model = tf.keras.Model(x, layers.Lambda(tf.nn.softmax)(y))\n",
            "model = keras.Model(x, y)\n",
        ),
        (
            f"{INPUT}soft = layers.Lambda(lambda t: tf.nn.softmax(t))\n"
            "model = tf.keras.Model(x, soft(layers.Dense(3)(x)))\n",
            "soft = layers.Lambda(lambda t: t)\n",
        ),
        (
            f"{INPUT}wide = layers.Dense(3, 'softmax')\n"
            "y = wide(x) if flag else layers.Dense(3, activation='softmax')(x)\n"
            "model = tf.keras.Model(x, y)\n",
            "layers.Dense(3)\ny = wide(x) if flag else layers.Dense(3)(x)\n",
        ),
        (
            f"def head(t):\n    return layers.Dense(3, 'softmax')(t)\n{INPUT}"
            "model = tf.keras.Model(x, head(x))\n",
            "    return layers.Dense(3)(t)\n",
        ),
        (
            "head = tf.keras.Sequential([layers.Dense(3, 'softmax')])\n"
            "model = tf.keras.Sequential([layers.Dense(8), head])\n",
            "head = keras.Sequential([layers.Dense(3)])\n",
        ),
        (
            "parts = [layers.Dense(8)]\nparts.append(layers.Dense(3, 'softmax'))\n"
            "model = tf.keras.Sequential(parts)\n",
            "parts.append(layers.Dense(3))\n",
        ),
        (
            f"{OWN}        self.wide = layers.Dense(3)\n"
            "    def call(self, t):\n        return tf.nn.softmax(self.wide(t))\n"
            "model = Net()\n",
            "        return self.wide(t)\n",
        ),
        (
            f"{OWN}        self.wide = layers.Dense(3)\n"
            "        self.soft = layers.Softmax()\n"
            "    def call(self, t):\n        t = self.wide(t)\n"
            "        return self.soft(t)\nmodel = Net()\n",
            '        self.soft = keras.layers.Activation("linear")\n',
        ),
    ],
)
def test_the_last_activation_is_followed(made: str, after: str) -> None:
    source = f"import tensorflow as tf\nlayers = tf.keras.layers\n{made}{COMPILED}"
    result, _ = text(f"{source}p = model.predict(x)\n")
    assert after in result
    assert LOGITS in result
    assert "p = keras.ops.softmax(model.predict(x))" in result


@pytest.mark.parametrize(
    "made",
    [
        f"{INPUT}y = layers.Dense(3, 'softmax')(x)\nmodel = tf.keras.Model(x, y)\n"
        "other = tf.keras.Model(x, layers.Dense(2)(y))\n",
        f"def head(t):\n    return layers.Dense(3, 'softmax')(t)\n{INPUT}"
        "model = tf.keras.Model(x, head(head(x)))\n",
        f"{OWN}        self.wide = layers.Dense(3, 'softmax')\n"
        "    def call(self, t):\n        return self.wide(t)\n"
        "    def score(self, t):\n        return self(t) * self.wide(t)\n"
        "model = Net()\n",
    ],
)
def test_an_activation_with_other_uses_stays(made: str) -> None:
    result, notes = text(
        f"import tensorflow as tf\nlayers = tf.keras.layers\n{made}{COMPILED}"
    )
    assert "softmax" in result
    assert any("Keras on JAX clips the probabilities" in note for note in notes)


def test_a_step_of_the_models_own_gives_its_loss_the_logits() -> None:
    result, _ = text(
        f"import tensorflow as tf\nlayers = tf.keras.layers\n{OWN}"
        "        self.wide = layers.Dense(3, 'softmax')\n"
        "    def call(self, t):\n        return self.wide(t)\n"
        "    def test_step(self, data):\n        t, y = data\n"
        "        p = self(t, training=False)\n"
        "        return {'loss': loss_of(y, p)}\n"
        "loss_of = tf.keras.losses.CategoricalCrossentropy()\n"
        "model = Net()\nmodel.compile('adam')\nmodel.evaluate(x, y)\n"
        "p = model(x)\nprint(p)\n"
    )
    assert "self.wide = layers.Dense(3)\n" in result
    assert "p = self(t, training=False)" in result
    assert "CategoricalCrossentropy(from_logits=True)" in result
    assert "p = keras.ops.softmax(model(x))" in result


def test_a_softmax_around_a_trained_model_stays() -> None:
    result, _ = text(
        "import tensorflow as tf\nlayers = tf.keras.layers\n"
        "model = tf.keras.Sequential([layers.Dense(9), layers.Dense(3)])\n"
        "loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n"
        "model.compile('adam', loss)\nmodel.fit(x, y)\n"
        "shown = tf.keras.Sequential([model, layers.Softmax()])\n"
        "print(shown(x[:5]))\nguesses = shown.predict(x)\nprint(guesses[0])\n"
    )
    assert "shown = keras.Sequential([model, layers.Softmax()])\n" in result
    assert "model.compile('adam', loss)\n" in result
    assert "guesses = shown.predict(x)\n" in result


TWO = """import tensorflow as tf
layers = tf.keras.layers
linear = tf.keras.Sequential([layers.Dense(3)])
linear.compile('sgd', tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
net = tf.keras.Sequential([layers.Dense(3, activation='softmax')])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
def loss(x, y):
    p = net(x)
    return loss_of(y, p)
net.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
other = tf.keras.Sequential([layers.Dense(3, activation='softmax')])
other.compile('sgd', 'sparse_categorical_crossentropy')
show(other)
"""


def test_logits_of_a_softmax_are_reported_beside_losses_of_probabilities() -> None:
    result = port(TWO.encode())
    assert [each.line for each in result.left] == [6, 10]
    assert all("Keras 3 applies softmax twice" in each.reason for each in result.left)
