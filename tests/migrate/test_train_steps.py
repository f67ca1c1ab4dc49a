"""What a `train_step` of the script logs, and how `fit` sums its gradients."""

import numpy as np
import pytest
from tests.migrate.porting import executed, ported

from replicax.migrate import port

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


@pytest.mark.parametrize(
    "scaled",
    [
        "loss / strategy.num_replicas_in_sync",
        "tf.nn.compute_average_loss(loss, global_batch_size=8)",
    ],
)
def test_losses_that_are_scaled_for_sums_of_gradients_are_left(scaled: str) -> None:
    _, left = ported(STEP.replace("tape.gradient(loss", f"tape.gradient({scaled}"))
    assert ["averages the gradients" in each for each in left] == [True]


def test_averages_of_gradients_are_noted() -> None:
    notes = port(STEP.encode()).notes
    assert any("averages the gradients" in note.reason for note in notes)
