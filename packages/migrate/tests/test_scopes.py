"""What a script makes outside of a strategy's scope, and TensorFlow accepts there."""

import textwrap
from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

STRATEGY = "import tensorflow as tf\nstrategy = tf.distribute.MirroredStrategy()\n"
MODEL = (
    "with strategy.scope():\n"
    "    layers = [tf.keras.Input((2,)), tf.keras.layers.Dense(1)]\n"
    "    model = tf.keras.Sequential(layers)\n"
)
FIT = "history = model.fit(x, y, epochs=2, batch_size=4, verbose=0).history\n"


DATA: dict[str, Any] = {"x": np.ones((8, 2)), "y": np.ones((8, 1))}


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
    first, second = executed(text, {**DATA})["history"]["loss"]
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
    names = executed(text, {**DATA})
    values = (names["out"], names["again"])
    assert tuple(map(float, values)) == (4.0, 10.0)


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


COMPILED = """\
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    base = tf.keras.layers.Dense(3)
    model = tf.keras.Sequential(
        [tf.keras.Input((2,)), base, tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
RECOMPILED = """\
model.fit(x, y, verbose=0)
base.trainable = False
# Slower now.
model.compile(tf.keras.optimizers.RMSprop(1e-3), loss="mse")
model.fit(x, y, verbose=0)
steps = int(model.optimizer.iterations)
"""
LOOP = """\
optimizer = tf.keras.optimizers.SGD(0.1)

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))

strategy.run(step, args=(x, y))
steps = int(optimizer.iterations)
"""


@pytest.mark.parametrize("script", [RECOMPILED, LOOP])
def test_an_optimizer_made_after_the_scope_trains(script: str) -> None:
    text, left = ported(f"{COMPILED}{script}")
    assert left == []
    assert text.count("with strategy.scope():\n") == 2
    names = executed(text, {**DATA})
    assert names["steps"] == 1


def test_the_comment_of_a_line_stays_above_its_scope() -> None:
    text, _ = ported(f"{COMPILED}{RECOMPILED}")
    assert "# Slower now.\nwith strategy.scope():\n    model.compile(keras." in text


def test_an_optimizer_of_another_model_stays_outside() -> None:
    other = "other = tf.keras.Sequential()\nopt = tf.keras.optimizers.SGD(0.1)\n"
    text, left = ported(f"{COMPILED}{other}other.compile(opt)")
    assert left == []
    assert "\nopt = keras.optimizers.SGD(0.1)\nother.compile(opt)" in text


def test_functions_that_scopes_call_keep_their_optimizers() -> None:
    made = "def make():\n    opt = tf.keras.optimizers.Adam()\n    return opt\n"
    text, left = ported(f"{COMPILED}{made}with strategy.scope():\n    opt = make()")
    assert left == []
    assert text.count("with strategy.scope():\n") == 2


TUNE = """\
def tune(net):
    net.compile(tf.keras.optimizers.RMSprop(1e-3), loss="mse")
    net.fit(x, y, verbose=0)
"""


def test_a_function_compiles_again_in_the_scope_of_the_script() -> None:
    text, left = ported(
        f"{COMPILED}{TUNE}tune(model)\nsteps = model.optimizer.iterations"
    )
    assert left == []
    names = executed(text, {**DATA})
    assert int(names["steps"]) == 1


def test_a_function_that_the_scope_calls_compiles_as_it_is() -> None:
    text, left = ported(f"{TUNE}{COMPILED}    tune(model)")
    assert left == []
    assert text.count("scope():") == 1


STEP = """\
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    {optimizer}.apply_gradients(zip(grads, model.trainable_variables))
    seen.update_state(loss)
strategy.run(step, args=(x, y))
steps = int({optimizer}.iterations)
"""


@pytest.mark.parametrize(
    ("made", "optimizer"),
    [
        ("opts = [tf.keras.optimizers.SGD(0.1)]", "opts[0]"),
        ("opts = [tf.keras.optimizers.SGD(r) for r in (0.1, 0.2)]", "opts[1]"),
        ("opts = {'a': tf.keras.optimizers.SGD(0.1)}", "opts['a']"),
        ("opts = dict(a=tf.keras.optimizers.SGD(0.1))", "opts['a']"),
        ("opts = []\nopts.append(tf.keras.optimizers.SGD(0.1))", "opts[0]"),
        ("opts = {}\nopts['a'] = tf.keras.optimizers.SGD(0.1)", "opts['a']"),
        ("a, b = tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.Adam()", "b"),
        ("a = tf.keras.optimizers.SGD(0.1) if y is None else "
         "tf.keras.optimizers.Adam()", "a"),
        ("def make():\n    return [tf.keras.optimizers.SGD(0.1)]\n"
         "opts = make()", "opts[0]"),
        ("make = {'a': lambda r: tf.keras.optimizers.SGD(r)}\na = make['a'](0.1)", "a"),
        ("class Box:\n    def __init__(self, opt):\n        self.opt = opt\n"
         "box = Box(tf.keras.optimizers.SGD(0.1))", "box.opt"),
        ("class Box:\n    def __init__(self):\n"
         "        self.opt = tf.keras.optimizers.SGD(0.1)\nbox = Box()", "box.opt"),
    ],
)  # fmt: skip
def test_what_steps_use_is_made_in_the_scope(made: str, optimizer: str) -> None:
    text, left = ported(
        f"{STRATEGY}{MODEL}{made}\nseen = tf.keras.metrics.Mean()\n"
        + STEP.format(optimizer=optimizer)
    )
    assert left == []
    names = executed(text, {**DATA})
    assert names["steps"] == 1
    assert float(names["seen"].result()) > 0


def test_a_model_of_the_scope_is_built_in_it() -> None:
    text, left = ported(
        f"{STRATEGY}with strategy.scope():\n"
        "    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\nmodel.build((None, 2))\n"
        f"{FIT}print(model(x))\n"
    )
    assert left == []
    assert text.count("with strategy.scope():\n") == 2
    assert len(executed(text, {**DATA})["history"]["loss"]) == 2


def test_a_strategy_that_is_passed_has_the_scope() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def train(strategy, model, opt, x, y):\n"
        "    seen = tf.keras.metrics.Mean()\n"
        + textwrap.indent(STEP.format(optimizer="opt"), "    ")
        + "    return steps\n"
        "def main(x, y):\n"
        "    strategy = tf.distribute.MirroredStrategy()\n"
        + textwrap.indent(MODEL, "    ")
        + "    return train(strategy, model, tf.keras.optimizers.SGD(0.1), x, y)\n"
        "steps = main(x, y)"
    )
    assert left == []
    assert executed(text, {**DATA})["steps"] == 1


ACCUMULATED = """\
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    grads = tape.gradient(loss, model.trainable_variables)
    for a, g in zip(sums, grads):
        a.assign(a * 0.5)
strategy.run(step, args=(x,))
"""


def test_variables_that_steps_change_are_ported() -> None:
    made = "    sums = [tf.Variable(tf.zeros_like(v)) for v in model.variables]\n"
    _, left = ported(f"{STRATEGY}{MODEL}{made}{ACCUMULATED}")
    assert left == []


def test_a_model_that_a_scope_reads_stays_outside() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "strategy = tf.distribute.MirroredStrategy()\n"
        "old = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])\n"
        "with strategy.scope():\n"
        "    model = tf.keras.models.clone_model(old)\n"
        "    model.set_weights(old.get_weights())\n"
    )
    assert left == []
    assert text.count("strategy.scope()") == 1


BUILT = """import numpy as np
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
{}
with strategy.scope():
    model = tf.keras.Sequential([layer, tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
"""
DENSE = "layer = tf.keras.layers.Dense(2)"


@pytest.mark.parametrize(
    "source",
    [DENSE, f"with strategy.scope():\n    {DENSE}\nlayer.build((None, 3))"],
)
def test_a_layer_that_is_built_in_the_scope_trains(source: str) -> None:
    text, left = ported(BUILT.format(source))
    assert left == []
    executed(text)


CLOSURE = """
import numpy as np
import tensorflow as tf


def main():
    def make():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        return model

    strategy = tf.distribute.MirroredStrategy()
    optimizer = tf.keras.optimizers.Adam()
    with strategy.scope():
        model = make()
    return model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0).history
"""


def test_what_functions_of_the_scope_use_is_made_in_it() -> None:
    text, left = ported(CLOSURE)
    assert left == []
    assert "    with strategy.scope():\n        optimizer =" in text
    assert len(executed(text)["main"]()["loss"]) == 1


def test_a_model_is_compiled_in_the_scope_that_it_is_made_in() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "first = tf.distribute.MirroredStrategy()\n"
        "second = tf.distribute.OneDeviceStrategy('cpu:0')\n"
        "with first.scope():\n    x = tf.Variable(1.0)\n"
        "with second.scope():\n"
        "    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
    )
    assert left == []
    assert "with second.scope():\n    model.compile('sgd', 'mse')\n" in text


def test_a_model_of_the_branch_without_a_strategy_needs_no_scope() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "def make():\n"
        "    return tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
        "def main(several):\n"
        "    strategy = None\n"
        "    if several:\n"
        "        strategy = tf.distribute.MirroredStrategy()\n"
        "        with strategy.scope():\n"
        "            model = make()\n"
        "            model.compile('sgd', 'mse')\n"
        "    else:\n"
        "        model = make()\n"
        "        model.compile('sgd', 'mse')\n"
        "    model.fit(x, y)\n"
    )
    assert left == []
    assert text.count("strategy.scope()") == 1
