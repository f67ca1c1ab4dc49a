"""What a script makes outside of a strategy's scope, and TensorFlow accepts there."""

import textwrap
from typing import Any

import numpy as np
import pytest
from tests.migrate.porting import ported

STRATEGY = "import tensorflow as tf\nstrategy = tf.distribute.MirroredStrategy()\n"
MODEL = (
    "with strategy.scope():\n"
    "    layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]\n"
    "    model = tf.keras.Sequential(layers)\n"
)
FIT = "history = model.fit(x, y, epochs=2, batch_size=4, verbose=0).history\n"


def _run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"x": np.ones((8, 2)), "y": np.ones((8, 1))}
    exec(text, names)
    return names


def test_an_optimizer_and_compile_outside_of_the_scope_are_moved_in() -> None:
    text, left = ported(
        f"{STRATEGY}# Of the paper.\nopt = tf.keras.optimizers.SGD(0.1)\n{MODEL}"
        f"model.compile(opt,\n              loss='mse')\n{FIT}"
    )
    assert left == []
    assert (
        "# Of the paper.\nwith strategy.scope():\n    opt = keras.optimizers.SGD(0.1)\n"
    ) in text
    assert "with strategy.scope():\n    model.compile(opt,\n" in text
    first, second = _run(text)["history"]["loss"]
    assert second < first


def test_an_optimizer_of_a_branch_is_made_in_the_scope_there() -> None:
    text, left = ported(
        f"{STRATEGY}if fast:\n    opt = tf.keras.optimizers.Adam()\n"
        f"else:\n    opt = tf.keras.optimizers.SGD()\n"
        f"{MODEL}    model.compile(opt, 'mse')"
    )
    assert left == []
    assert text.count("    with strategy.scope():\n        opt = ") == 2


def test_a_variable_that_a_step_reads_is_made_in_the_scope() -> None:
    text, left = ported(
        f"{STRATEGY}scale = tf.Variable(2.0)\n{MODEL}"
        "def step(): return scale * 2.0\n"
        "out = strategy.run(step)\nscale.assign(5.0)\nagain = strategy.run(step)"
    )
    assert left == []
    names = _run(text)
    values = (names["out"].values[0], names["again"].values[0])
    assert tuple(map(float, values)) == (4.0, 10.0)


def test_an_optimizer_above_its_strategy_is_reported() -> None:
    _, left = ported(
        "import tensorflow as tf\nopt = tf.keras.optimizers.SGD(0.1)\n"
        f"strategy = tf.distribute.MirroredStrategy()\n{MODEL}    model.compile(opt)"
    )
    assert len(left) == 1
    assert "in whose scope they are made" in left[0]


@pytest.mark.parametrize(
    "source",
    [
        # The function is called in the scope.
        "def build():\n    opt = tf.keras.optimizers.SGD(0.1)\n"
        "    m = tf.keras.Sequential()\n    m.compile(opt)\n    return m\n"
        "with strategy.scope():\n    model = build()\n",
        # The layer is made in the scope, and its variable with it.
        "class Scale(tf.keras.layers.Layer):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = tf.Variable(1.0)\n"
        "    def call(self, x): return x * self.scale\n"
        f"{MODEL}    model.add(Scale())\n",
        # The other model is in no scope at all.
        f"{MODEL}other = tf.keras.Sequential()\nother.compile('sgd', 'mse')\n",
    ],
)
def test_what_is_made_where_it_is_used_stays_there(source: str) -> None:
    text, left = ported(STRATEGY + source)
    assert left == []
    assert text.count("with strategy.scope():") == 1


LOSS = (
    "class Anneal(tf.keras.callbacks.Callback):\n"
    "    def __init__(self, weight):\n"
    "        super().__init__()\n"
    "        self.weight = weight\n"
    "    def on_epoch_end(self, epoch, logs=None):\n"
    "        tf.keras.backend.set_value(self.weight, epoch + 1.0)\n"
    "def make_loss(weight):\n"
    "    def loss(y_true, y_pred):\n"
    "        return tf.abs(y_pred) * 0.0 + weight * 1.0\n"
    "    return loss\n"
)
COMPILE = "    model.compile('sgd', make_loss(kl))\n"
ANNEALED = FIT.replace("verbose=0", "verbose=0, callbacks=[Anneal(kl)]")


MADE = ["tf.Variable(0.0)", "tf.keras.backend.variable(0.0)"]


@pytest.mark.parametrize("made", MADE)
def test_a_variable_that_a_loss_reads_and_a_callback_sets_is_made_in_the_scope(
    made: str,
) -> None:
    """Steps read it there; of another one they have the first value."""
    source = f"{STRATEGY}{LOSS}kl = {made}\n{MODEL}{COMPILE}{ANNEALED}"
    text, left = ported(source)
    assert left == []
    losses = _run(text)["history"]["loss"]
    assert losses == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("made", MADE)
def test_a_variable_that_a_callback_sets_is_reported_without_a_strategy(
    made: str,
) -> None:
    imports, model = STRATEGY.partition("\n")[0], MODEL.partition("\n")[2]
    body = textwrap.dedent(f"{model}{COMPILE}")
    _, left = ported(f"{imports}\n{LOSS}kl = {made}\n{body}{ANNEALED}")
    assert len(left) == 1
    assert "with rx.get_strategy().scope()" in left[0]


@pytest.mark.parametrize(
    "source",
    [
        # Nothing sets it.
        f"{LOSS}kl = tf.Variable(0.0)\n{MODEL}{COMPILE}{FIT}",
        # The callback's variable is none of the loss's.
        f"{LOSS}kl = 1.0\nseen = tf.Variable(0.0)\n{MODEL}{COMPILE}"
        + ANNEALED.replace("kl", "seen"),
        # A layer has it.
        "class Gate(tf.keras.layers.Layer):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.gate = tf.Variable(1.0)\n"
        "    def call(self, x): return x * self.gate\n"
        "    def close(self): self.gate.assign(0.0)\n"
        f"{MODEL}    model.add(Gate())\n    model.compile('sgd', 'mse')\n{FIT}",
    ],
)
def test_other_variables_are_not_reported(source: str) -> None:
    _, left = ported(STRATEGY + source)
    assert left == []
