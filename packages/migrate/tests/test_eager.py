"""Steps that TensorFlow compiles without a strategy: the default one runs them."""

from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

STEP = """\
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
opt = tf.keras.optimizers.SGD(0.1)
@tf.function
def train_step(x, y, scale=1.0):
    with tf.GradientTape() as tape:
        predicted = model(x)
        loss = tf.reduce_mean((predicted - y) ** 2) * scale
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss, predicted
"""
RUN = "rx.get_strategy().run(train_step, args=(x, y)"


def test_a_compiled_step_is_run_and_gives_arrays() -> None:
    text, left = ported(
        f"{STEP}loss, p = train_step(x, y)\ntrain_step(x, y, scale=2.0)"
    )
    assert left == []
    assert f'= rx.get_strategy().reduce("sum", {RUN}), axis=None)' in text
    assert f'\n{RUN}, kwargs={{"scale": 2.0}})' in text
    names = executed(text, {"x": np.ones((4, 2)), "y": np.ones((4, 1))})
    assert names["p"].shape == (4, 1)
    assert float(names["loss"]) == pytest.approx(float(np.mean((names["p"] - 1) ** 2)))


def test_a_step_gets_unpacked_arguments() -> None:
    text, left = ported(
        f"{STEP}batch = [x, y]\nmore = {{'scale': 2.0}}\n"
        "loss, p = train_step(*batch, **more)"
    )
    assert left == []
    assert "args=(*batch,), kwargs={**more})" in text
    names = executed(text, {"x": np.ones((4, 2)), "y": np.ones((4, 1))})
    expected = 2.0 * float(np.mean((names["p"] - 1) ** 2))
    assert float(names["loss"]) == pytest.approx(expected)


def test_a_step_whose_tape_is_in_another_function_is_run() -> None:
    inner = STEP.replace("@tf.function\n", "").replace("train_step", "inner")
    text, left = ported(
        f"{inner}@tf.function\ndef train_step(x, y):\n    return inner(x, y)\n"
        "loss, p = train_step(x, y)"
    )
    assert left == []
    assert text.count(".run(") == 1
    names = executed(text, {"x": np.ones((4, 2)), "y": np.ones((4, 1))})
    assert float(names["loss"]) == pytest.approx(float(np.mean((names["p"] - 1) ** 2)))


def test_a_step_that_a_compiled_step_calls_is_not_run_by_itself() -> None:
    text, left = ported(
        f"{STEP}@tf.function\ndef twice(x, y):\n"
        "    train_step(x, y)\n    return train_step(x, y)\n"
        "loss, p = twice(x, y)"
    )
    assert left == []
    assert text.count(".run(") == 1
    assert "run(twice, args=(x, y))" in text


def test_a_step_of_a_class_of_the_script_is_run_as_well() -> None:
    """It has the name of one that Keras compiles, and is none of Keras'."""
    step = STEP.partition("@tf.function\n")[2].replace("(x, y,", "(self, x, y,")
    method = "".join(f"    {line}\n" for line in step.splitlines())
    text, left = ported(
        f"{STEP.partition('@')[0]}class Trainer(object):\n"
        f"    @tf.function\n{method}"
        "    def fit(self, x, y): return self.train_step(x, y)[0]\n"
        "loss = Trainer().fit(x, y)"
    )
    assert left == []
    names = executed(text, {"x": np.ones((4, 2)), "y": np.ones((4, 1))})
    assert names["loss"].shape == ()


@pytest.mark.parametrize(
    "use",
    [
        "list(map(train_step, [x], [y]))",
        "step = train_step\nstep(x, y)",
        "strategy = tf.distribute.MirroredStrategy()\n"
        "with strategy.scope(): pass\ntrain_step(x, y)",
    ],
)
def test_a_step_with_other_uses_is_left(use: str) -> None:
    _, left = ported(f"{STEP}{use}")
    assert any("works in a function that a strategy runs" in why for why in left)


EAGER = """\
import tensorflow as tf
def train_step(model, optimizer, x, y):
    with tf.GradientTape() as tape:
        predicted = model(x, training=True)
        loss = loss_fn(y, predicted)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    mean(loss)
    return loss
def train(model, optimizer, n):
    for epoch in range(n):
        for step, (x, y) in enumerate(dataset):
            loss = train_step(model, optimizer, x, y)
    return float(loss)
loss_fn = tf.keras.losses.MeanSquaredError()
mean = tf.keras.metrics.Mean()
net = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
final = train(net, tf.keras.optimizers.SGD(0.25), 2)
"""


@pytest.mark.parametrize(
    "line", ["z = [1] * options['n']", "for i in range(options):\n        pass"]
)
def test_a_step_that_counts_with_what_it_gets_is_left(line: str) -> None:
    step = STEP.replace("y, scale=1.0):", f"y, options, scale=1.0):\n    {line}")
    _, left = ported(f"{step}loss, p = train_step(x, y, {{'n': 3}})")
    assert ["rx.GradientTape works in a function" in each for each in left] == [True]


def test_an_eager_step_that_jax_can_trace_is_run() -> None:
    text, left = ported(EAGER)
    assert left == []
    assert "strategy().run(train_step, args=(model, optimizer, x, y))" in text
    x = np.eye(2, dtype="float32")
    names = executed(text, {"dataset": [(x, np.ones((2, 1), "float32"))]})
    # The weights and the bias are 0, then 0.25, 0.25 and 0.5.
    assert names["final"] == pytest.approx(0.25**2)
    assert float(names["mean"].result()) == pytest.approx((1 + 0.25**2) / 2)


@pytest.mark.parametrize(
    "outside",
    [
        "rate = 1\nrate = 2",
        "for rate in range(3): pass",
        "rate = 1\nrate += 1",
        "rate = [1]\nrate[0] = 2",
        "rate = 1\nnet.layers[0].trainable = False",
    ],
)
def test_an_eager_step_that_reads_what_changes_is_left(outside: str) -> None:
    text = EAGER.replace("loss_fn(y, predicted)", "loss_fn(y, predicted) * rate")
    _, (reason,) = ported(f"{text}{outside}\n")
    assert "works in a function that a strategy runs" in reason
    assert ported(f"{text}rate = 1\n")[1] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    mean(loss)\n", "    print(loss)\n"),
        ("    mean(loss)\n", "    losses.append(loss)\n"),
        ("    mean(loss)\n", "    model.loss = loss\n"),
        ("return loss", "return loss.numpy()"),
        ("loss_fn(y, predicted)", "loss_fn(np.sqrt(y), predicted)"),
        ("optimizer, x, y)\n    return", "optimizer, step, y)\n    return"),
        ("optimizer, x, y)\n    return", "optimizer, epoch, y)\n    return"),
        ("optimizer, x, y)\n    return", "optimizer, 2, y)\n    return"),
        ("    with tf.G", "    for x, y in dataset:\n      with tf.G"),
    ],
)
def test_an_eager_step_that_does_more_is_left(before: str, after: str) -> None:
    assert EAGER.count(before) == 1
    if after.endswith("tf.G"):
        text = EAGER.replace("        predicted", "          predicted")
        text = text.replace("        loss = loss_fn", "          loss = loss_fn")
    else:
        text = EAGER
    _, left = ported(text.replace(before, after))
    assert any("works in a function that a strategy runs" in why for why in left)


def test_a_step_without_a_scope_draws_numbers_of_a_generator_above_it() -> None:
    step = STEP.replace("model(x)", "model(x + tf.random.normal([2]))")
    text, left = ported(f"{step}train_step(x, y)")
    assert left == []
    generator = "seed_generator = keras.random.SeedGenerator(seed=0)\n"
    assert f"{generator}def train_step(" in text
    assert "keras.random.normal([2], seed=seed_generator)" in text


def test_build_of_a_subclassed_model_is_a_call_that_builds_it() -> None:
    """Keras 3 marks it as built, and lists none of its variables."""
    net = (
        "import tensorflow as tf\nclass Net(tf.keras.Model):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.d = tf.keras.layers.Dense(2)\n"
        "    def call(self, x): return self.d(x)\n"
        "n = Net()\nn.build({})\nv = len(n.trainable_variables)"
    )
    for shape in ("(None, 3)", "input_shape=[4, 3]"):
        text, left = ported(net.format(shape))
        assert left == []
        names: dict[str, Any] = {}
        exec(text, names)
        assert names["v"] == 2
    _, (reason,) = ported(net.format("(None, None, 3)"))
    assert "builds nothing in Keras 3" in reason
    own = net.replace("    def call", "    def build(self, s): pass\n    def call")
    assert "n.build((None, 3))" in ported(own.format("(None, 3)"))[0]


MODEL = """\
import tensorflow as tf
class M(tf.keras.Model):
    def train_step(self, data):
        x, y = data
        return {"loss": tf.reduce_sum(x)}
"""


def test_a_model_with_a_step_is_made_and_compiled_in_a_scope() -> None:
    text, left = ported(
        f"{MODEL}# The model.\nm = M()\nn = 2\nm.compile('adam')\nm.fit(x, y, epochs=n)"
    )
    assert left == []
    assert (
        "# The model.\nwith rx.get_strategy().scope():\n"
        "    m = M()\n    n = 2\n    m.compile('adam')\nm.fit(x, y, epochs=n)" in text
    )


@pytest.mark.parametrize(
    "lines",
    [
        "m = M()\nfor i in range(2):\n    m.compile('adam')\nm.fit(x, y)",
        "m = M()\nm.compile('adam')\nn = M()\nn.compile('adam')\nm.fit(x, y)",
    ],
)
def test_a_model_whose_lines_are_not_in_sight_is_left(lines: str) -> None:
    _, (reason,) = ported(f"{MODEL}{lines}")
    assert "only models of a strategy get (data)" in reason


ACTORS = """\
import tensorflow as tf
class Critic:
    def __init__(self):
        self.opt = tf.keras.optimizers.SGD(0.25)
        self.model = tf.keras.Sequential(
            [tf.keras.layers.Dense(1, kernel_initializer="zeros")])
    def predict(self, states):
        return self.model.predict(states, verbose=0)
    def train(self, states, targets):
        targets = tf.stop_gradient(targets)
        with tf.GradientTape() as tape:
            values = self.model(states, training=True)
            assert values.shape == targets.shape
            loss = tf.reduce_mean(tf.square(targets - values))
        grads = tape.gradient(loss, self.model.trainable_variables)
        self.opt.apply_gradients(zip(grads, self.model.trainable_variables))
        return loss
class Actor(Critic):
    def train(self, states, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(targets - self.model(states)))
        grads = tape.gradient(loss, self.model.trainable_variables)
        self.opt.apply_gradients(zip(grads, self.model.trainable_variables))
        return loss
class Agent:
    def __init__(self):
        self.actor = Actor()
        self.critic = Critic()
    def train(self, states, n):
        for _ in range(n):
            targets = self.critic.predict(states)
            targets[:] = targets + 1
            self.critic.train(states, targets)
            loss = self.actor.train(states, targets)
        return loss
"""


def test_steps_of_one_name_are_run_by_the_class_of_their_object() -> None:
    text, left = ported(f"{ACTORS}agent = Agent()\nloss = agent.train(states, 2)\n")
    assert left == []
    assert "run(self.critic.train, args=(states, targets))" in text
    assert "run(self.actor.train, args=(states, targets))" in text
    assert "agent.train(states, 2)" in text
    names = executed(text, {"states": np.zeros((4, 2), "float32")})
    # The critic's bias goes from 0 by 0.25 * 2 in each step, its targets are 1 more.
    critic = names["agent"].critic.model
    assert float(critic.layers[0].bias.value[0]) == pytest.approx(1.0)
    assert float(names["loss"]) == pytest.approx(1.5 - 0.25)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("assert values.shape == targets.shape", "assert targets[0] == 1"),
        ("self.critic = Critic()", "self.critic = critic"),
        ("    def train(self, states, n):", "    def train(self, states, n, act):"),
    ],
)
def test_steps_of_one_name_are_left_where_their_object_is_not_in_sight(
    before: str, after: str
) -> None:
    text = ACTORS.replace(before, after)
    if after.endswith("act):"):
        text = text.replace("self.actor.train", "act.train")
    _, left = ported(text)
    assert any("works in a function that a strategy runs" in why for why in left)


def test_a_step_may_list_the_variables_of_a_dict() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        'weights = {"w": tf.Variable(tf.zeros([2, 1])), "b": tf.Variable([0.0])}\n'
        "opt = tf.keras.optimizers.SGD(0.25)\n"
        "def step(x, y):\n"
        "    with tf.GradientTape() as tape:\n"
        '        loss = tf.reduce_mean((x @ weights["w"] + weights["b"] - y) ** 2)\n'
        "    variables = list(weights.values())\n"
        "    gradients = tape.gradient(loss, variables)\n"
        "    opt.apply_gradients(zip(gradients, variables))\n"
        "step(x, y)\n"
    )
    assert left == []
    given = {"x": np.ones((4, 2), "float32"), "y": np.ones((4, 1), "float32")}
    names = executed(text, given)
    assert float(names["weights"]["b"].value[0]) == pytest.approx(0.5)
