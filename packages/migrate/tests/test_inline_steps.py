"""Training steps that stand in a loop: they become a function that a strategy runs."""

import re
from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port

MODEL = """\
import tensorflow as tf
loss_fn = tf.keras.losses.MeanSquaredError()
mean = tf.keras.metrics.Mean()
net = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
optimizer = tf.keras.optimizers.SGD(0.25)
losses = []
"""
LOOP = """\
for epoch in range(2):
    total = 0.0
    for step, (x, y) in enumerate(dataset):
        # Of one batch.
        with tf.GradientTape() as tape:
            predicted = net(x, training=True)
            loss = loss_fn(y, predicted)
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables))
        mean(loss)
        total += loss
        losses.append(float(loss))
        if step % 10 == 0:
            print(step, total, predicted[0])
"""
FUNCTION = f"""\
def train(net, optimizer):
{"".join(f"    {line}" for line in LOOP.splitlines(keepends=True))}
train(net, optimizer)
"""


def names_for(text: str) -> dict[str, Any]:
    data = [(np.eye(2, dtype="float32"), np.ones((2, 1), "float32"))]
    return executed(text, {"dataset": data})


@pytest.mark.parametrize("loop", [LOOP, FUNCTION])
def test_a_step_in_a_loop_becomes_a_function(loop: str) -> None:
    text, left = ported(MODEL + loop)
    assert left == []
    assert "def train_step(x, y):\n" in text
    assert "predicted, loss = rx.get_strategy().reduce(" in text
    assert text.index("def train_step") < text.index("for epoch in")
    names = names_for(text)
    # The weights and the bias are 0, then 0.25, 0.25 and 0.5.
    assert names["losses"] == pytest.approx([1.0, 0.25**2])
    assert float(names["mean"].result()) == pytest.approx((1 + 0.25**2) / 2)


STEP = """\
    with tf.GradientTape() as tape:
        loss = loss_fn(y, net(x))
    grads = tape.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(grads, net.trainable_variables))
"""
VARIABLES = """\
import tensorflow as tf
w = tf.Variable([[1.0], [1.0]])
values = []
for step in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
        loss += sum(tf.nn.l2_loss(v) for v in [w])
    grads = tape.gradient(loss, [w])
    for variable, grad in zip([w], grads):
        variable.assign_sub(0.1 * grad)
    values.append(w.numpy()[0, 0])
"""


def test_a_step_in_a_loop_may_assign_to_variables() -> None:
    text, left = ported(VARIABLES)
    assert left == []
    assert "def train_step():\n" in text
    names = executed(text, {"x": np.eye(2, dtype="float32")})
    # The gradient is 2 w + w.
    assert names["values"] == pytest.approx([0.7, 0.7**2, 0.7**3])


def test_two_steps_are_two_functions_and_the_other_lines_keep_their_places() -> None:
    source = f"{MODEL}{LOOP}{LOOP}x = tf.io.read_file('d')\n"
    found = port(source.encode())
    text = found.source.decode()
    assert text.count("def train_step") == 2
    assert [(each.line, each.source) for each in found.left] == [
        (len(source.splitlines()), "tf.io.read_file")
    ]
    before, _, _ = text.replace("import tensorflow as tf\n", "").partition("# replicax")
    assert len(names_for(before)["losses"]) == 4


@pytest.mark.parametrize(
    "line",
    [
        "out = loss * 2.0",
        "out = -loss",
        "out = predicted[0]",
        "out = [loss, predicted]",
        "out = [tf.norm(grad) for grad in grads]",
        "out = loss",
    ],
)
def test_a_step_returns_what_is_seen_to_be_arrays(line: str) -> None:
    update = "        optimizer.apply"
    loop = LOOP.replace(update, f"        {line}\n{update}") + "        print(out)\n"
    text, left = ported(f"{MODEL}{loop}")
    assert left == []
    results = re.search(r"( *)(.*) = rx.get_strategy\(\).reduce\(", text)
    assert results is not None
    assert "out" in results[2].split(", ")


@pytest.mark.parametrize(
    "loop",
    [
        "for x, y in dataset:",
        "for x, y in zip(xs, ys):",
        "for x, y in [(x0, y0), (x1, y1)]:",
        "for i, (x, y) in enumerate(dataset):",
        "for x, y in dataset.take(3):",
        "for x, n in dataset:\n    y = np.eye(3)[n]",
        "for x, n in dataset:\n    y = n * 2.0 - x.max()",
    ],
)
def test_a_step_gets_the_arrays_of_the_data(loop: str) -> None:
    text, left = ported(f"import numpy as np\n{MODEL}{loop}\n{STEP}")
    assert left == []
    assert "def train_step(y, x):" in text


@pytest.mark.parametrize(
    "loop", ["for y in range(3):", "for y, x in enumerate(dataset):"]
)
def test_a_step_that_counts_stays(loop: str) -> None:
    text, left = ported(f"{MODEL}x = data\n{loop}\n{STEP}")
    assert ["works in a function" in each for each in left] == [True]
    assert "def train_step" not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Python reads what would be an array without a value.
        ("loss = loss_fn(y, predicted)", "loss = loss_fn(y, predicted[:step])"),
        ("loss = loss_fn(y, predicted)", "loss = 1.0 if step else loss_fn(y, net(x))"),
        # What the lines do besides would happen once, where they are traced.
        (
            "loss = loss_fn(y, predicted)",
            "loss = loss_fn(y, predicted); seen.append(1)",
        ),
        # The model is another one in the second epoch.
        ("    total = 0.0\n", "    total = 0.0\n    net = make()\n"),
        # A number that the lines make would be an array behind them.
        ("predicted = net(x", "n = len(x)\n            predicted = net(x"),
    ],
)
def test_steps_that_cannot_be_compiled_stay(old: str, new: str) -> None:
    assert old in LOOP
    loop = LOOP.replace(old, new).replace("print(step,", "print(step, n,")
    text, left = ported(f"{MODEL}n = seen = []\n{loop}")
    assert ["works in a function" in each for each in left] == [True]
    assert "def train_step" not in text


@pytest.mark.parametrize(
    "mean_of",
    [
        "mean_of = lambda y, p: tf.reduce_mean(tf.square(y - p))",
        "def mean_of(y, p):\n    return tf.reduce_mean(tf.square(y - p))",
    ],
)
def test_results_of_functions_and_lambdas_of_the_script_are_returned(
    mean_of: str,
) -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "w = tf.Variable(tf.zeros([2, 1]))\n"
        "predict = lambda x: tf.matmul(x, w)\n"
        f"{mean_of}\n"
        "near = lambda y, p: tf.keras.metrics.mean_absolute_error(y, p)\n"
        "optimizer = tf.keras.optimizers.SGD(0.5)\n"
        "for x, y in dataset:\n"
        "    with tf.GradientTape() as tape:\n"
        "        p = predict(x)\n"
        "        loss = mean_of(y, p)\n"
        "    error = near(y, p)\n"
        "    grads = tape.gradient(loss, [w])\n"
        "    optimizer.apply_gradients(zip(grads, [w]))\n"
        "    print(loss.numpy(), error)\n"
    )
    assert left == []
    assert "loss, error = rx.get_strategy().reduce(" in text
    names = names_for(text)
    assert float(names["loss"]) == pytest.approx(1.0)
    np.testing.assert_allclose(names["w"].value, 0.5)


def test_results_of_functions_that_count_are_no_arrays() -> None:
    text = (MODEL + LOOP).replace("grads =", "n = count(x)\n        grads =")
    text = text.replace("print(step,", "print(n,")
    count = "count = lambda x: len(x)\n"
    assert any("works in a function" in why for why in ported(count + text)[1])
