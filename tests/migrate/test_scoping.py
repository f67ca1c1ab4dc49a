"""Optimizers that are made outside the scope of a strategy, which TensorFlow takes."""

from typing import Any

import numpy as np
import pytest
from tests.migrate.porting import ported

MODEL = """\
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
    text, left = ported(f"{MODEL}{script}")
    assert left == []
    assert text.count("with strategy.scope():\n") == 2
    names: dict[str, Any] = {"x": np.ones((8, 2)), "y": np.ones((8, 1))}
    exec(text, names)
    assert names["steps"] == 1


def test_the_comment_of_a_line_stays_above_its_scope() -> None:
    text, _ = ported(f"{MODEL}{RECOMPILED}")
    assert "# Slower now.\nwith strategy.scope():\n    model.compile(keras." in text


def test_an_optimizer_made_before_the_strategy_is_reported() -> None:
    imports, _, rest = MODEL.partition("\n")
    text, left = ported(
        f"{imports}\noptimizer = tf.keras.optimizers.Adam()\n"
        + rest.replace('"sgd"', "optimizer")
    )
    assert len(left) == 1
    assert "in whose scope they are made" in left[0]
    assert "\noptimizer = keras.optimizers.Adam()\n" in text


def test_an_optimizer_of_another_model_stays_outside() -> None:
    other = "other = tf.keras.Sequential()\nopt = tf.keras.optimizers.SGD(0.1)\n"
    text, left = ported(f"{MODEL}{other}other.compile(opt)")
    assert left == []
    assert "\nopt = keras.optimizers.SGD(0.1)\nother.compile(opt)" in text


def test_functions_that_scopes_call_keep_their_optimizers() -> None:
    made = "def make():\n    opt = tf.keras.optimizers.Adam()\n    return opt\n"
    text, left = ported(f"{MODEL}{made}with strategy.scope():\n    opt = make()")
    assert left == []
    assert text.count("with strategy.scope():\n") == 2


TUNE = """\
def tune(net):
    net.compile(tf.keras.optimizers.RMSprop(1e-3), loss="mse")
    net.fit(x, y, verbose=0)
"""


def test_a_function_compiles_again_in_the_scope_of_the_script() -> None:
    text, left = ported(f"{MODEL}{TUNE}tune(model)\nsteps = model.optimizer.iterations")
    assert left == []
    names: dict[str, Any] = {"x": np.ones((8, 2)), "y": np.ones((8, 1))}
    exec(text, names)
    assert int(names["steps"]) == 1


def test_a_function_that_the_scope_calls_compiles_as_it_is() -> None:
    text, left = ported(f"{TUNE}{MODEL}    tune(model)")
    assert left == []
    assert text.count("scope():") == 1


def test_a_strategy_out_of_sight_is_reported() -> None:
    imports, _, rest = MODEL.partition("\n")
    main = "".join(f"    {line}\n" for line in rest.splitlines())
    _, left = ported(f"{imports}\n{TUNE}def main():\n{main}    tune(model)")
    assert len(left) == 1
    assert "in whose scope they are made" in left[0]


def test_a_method_compiles_again_in_the_scope_of_its_strategy() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.strategy = tf.distribute.MirroredStrategy()\n"
        "        with self.strategy.scope():\n"
        "            self.model = tf.keras.Sequential()\n"
        "    def tune(self):\n"
        "        self.model.compile(tf.keras.optimizers.Adam(1e-5), 'mse')\n"
    )
    assert left == []
    assert "        with self.strategy.scope():\n            self.model.com" in text
