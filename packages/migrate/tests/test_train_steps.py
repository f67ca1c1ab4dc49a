"""What a `train_step` of the script logs, and how `fit` sums its gradients."""

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

STEP = """\
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = tf.keras.layers.Dense(1, kernel_initializer="zeros")
    def call(self, x):
        return self.layer(x)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}
with strategy.scope():
    net = Net()
    net.compile(tf.keras.optimizers.SGD(0.0))
logs = net.fit(x, y, verbose=0, batch_size=4).history
"""


def test_a_step_that_logs_its_loss_alone_updates_the_metric() -> None:
    text, left = ported(STEP)
    assert left == []
    names = executed(text, {"x": np.ones((8, 2)), "y": 2.0 * np.ones((8, 1))})
    assert names["logs"]["loss"] == pytest.approx([4.0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"loss": loss}', '{"loss": loss, "twice": 2 * loss}'),
        ('{"loss": loss}', '{"loss": self.seen.result()}'),
        (
            "    def call",
            "    @property\n    def metrics(self): return []\n    def call",
        ),
    ],
)
def test_other_logs_stay(before: str, after: str) -> None:
    text, _ = ported(STEP.replace(before, after))
    assert "update_state" not in text


# The step's gradients: TensorFlow sums them over replicas.

FACTOR = " * rx.get_strategy().num_replicas_in_sync"
OWN = "tf.reduce_mean((self(x) - y) ** 2)"
APPLIED = "zip(tape.gradient(loss, variables), variables)"


@pytest.mark.parametrize(
    "loss",
    [
        OWN,
        f"0.5 * {OWN} + sum(self.losses)",
        f"{OWN} / strategy.num_replicas_in_sync",
        "tf.reduce_mean(self.loss_fn(y, self(x)))",
        "tf.keras.losses.MeanSquaredError(reduction='none')(y, self(x))",
        "(lambda a, b: tf.reduce_mean((a - b) ** 2))(y, self(x))",
    ],
)
def test_a_loss_of_the_step_is_multiplied_where_it_is_differentiated(
    loss: str,
) -> None:
    text, left = ported(STEP.replace(OWN, loss))
    assert left == []
    assert f"tape.gradient(loss{FACTOR}, variables)" in text
    assert "metric.update_state(loss)" in text


@pytest.mark.parametrize(
    "loss",
    [
        "self.compute_loss(x, y, self(x))",
        "0.5 * self.compute_loss(x, y, self(x))",
        "tf.nn.compute_average_loss((self(x) - y) ** 2, global_batch_size=8)",
        "tf.keras.losses.MeanSquaredError(reduction='sum')(y, self(x))",
    ],
)
def test_a_loss_that_is_scaled_already_stays(loss: str) -> None:
    text, left = ported(STEP.replace(OWN, loss))
    assert left == []
    assert FACTOR not in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (OWN, "self.compute_loss(x, y, self(x)) + sum(self.losses)"),
        (OWN, "self.unknown(y, self(x))"),
        (APPLIED, "zip(self.gradients(loss), variables)"),
        (APPLIED, "zip([2 * g for g in tape.gradient(loss, variables)], variables)"),
        (
            APPLIED,
            "zip(tf.clip_by_global_norm(tape.gradient(loss, variables), 1)[0], y)",
        ),
    ],
)
def test_losses_that_are_not_understood_are_left(before: str, after: str) -> None:
    text, left = ported(STEP.replace(before, after))
    assert ["TensorFlow sums" in each for each in left] == [True]
    assert FACTOR not in text


@pytest.mark.parametrize(
    "after",
    [
        "[(g, v) for g, v in zip(grads, variables) if g is not None]",
        "list(zip(grads, variables))",
    ],
)
def test_gradients_are_followed_to_where_they_are_applied(after: str) -> None:
    line = "        grads = tape.gradient(loss, variables)\n        self.optimizer"
    text, left = ported(
        STEP.replace(APPLIED, after).replace("        self.optimizer", line)
    )
    assert left == []
    assert f"tape.gradient(loss{FACTOR}, variables)" in text


def test_a_step_that_minimizes_is_scaled_as_well() -> None:
    applied = f"self.optimizer.apply_gradients({APPLIED})"
    text, _ = ported(
        STEP.replace(applied, "self.optimizer.minimize(loss, variables, tape=tape)")
    )
    assert f"zip(tape.gradient(loss{FACTOR}, variables), variables)" in text


def test_losses_that_compile_is_given_are_followed() -> None:
    script = STEP.replace(OWN, "self.own(y, self(x))").replace(
        "    def call",
        "    def compile(self, optimizer, own):\n"
        "        super().compile(optimizer)\n"
        "        self.own = own\n"
        "    def call",
    )
    script = script.replace("SGD(0.0))", "SGD(0.0), own=error)").replace(
        "class Net", "def error(a, b): return tf.reduce_mean((a - b) ** 2)\nclass Net"
    )
    text, left = ported(script)
    assert left == []
    assert f"tape.gradient(loss{FACTOR}, variables)" in text


TENSORFLOW = {
    OWN: [0.2927770, 0.3128228, 0.4811005],
    "self.compute_loss(x, y, self(x))": [0.1634097, 0.1743847, 0.2634018],
}
"""The kernel and the bias after an epoch, by the step's loss."""


@pytest.mark.parametrize("loss", TENSORFLOW)
def test_two_replicas_train_to_the_numbers_of_tensorflow(loss: str) -> None:
    """Measured with TensorFlow 2.21 and tf_keras on two logical CPUs."""
    script = STEP.replace(OWN, loss).replace("SGD(0.0)", "SGD(0.05), loss='mse'")
    script = script.replace("verbose=0", "verbose=0, shuffle=False")
    script = script.replace("Strategy()", "Strategy(['cpu:0', 'cpu:1'])")
    x = np.arange(24.0, dtype="float32").reshape(12, 2) / 24
    y = x.sum(1, keepdims=True)
    names = executed(ported(script)[0], {"x": x, "y": y})
    kernel, bias = (w.ravel().tolist() for w in names["net"].get_weights())
    expected = TENSORFLOW[loss]
    assert [*kernel, *bias] == pytest.approx(expected, abs=1e-6)


TWIN = """import tensorflow as tf
class Net(tf.keras.Model):
    def compute_loss(self, x):
        return tf.reduce_mean(x)
class Twin(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.net.compute_loss(data)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"mean": loss}
with tf.distribute.MirroredStrategy().scope():
    model = Twin()
"""


def test_a_compute_loss_of_a_part_of_the_model_is_multiplied() -> None:
    assert f"tape.gradient(loss{FACTOR}" in ported(TWIN)[0]
