"""Callbacks that compare epochs: Keras 3 asks metrics for what is better."""

import pytest
from tests.migrate.porting import executed, ported

from replicax.migrate import port

START = "import tensorflow as tf\n"
CALLBACKS = "tf.keras.callbacks."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('EarlyStopping("val_f")', 'EarlyStopping("val_f", mode="min")'),
        (
            'EarlyStopping(monitor="my_auc")',
            'EarlyStopping(monitor="my_auc", mode="max")',
        ),
        (
            'EarlyStopping("my_acc_2", mode="auto")',
            'EarlyStopping("my_acc_2", mode="min")',
        ),
        ('EarlyStopping("val_f", mode="max")', 'EarlyStopping("val_f", mode="max")'),
        ("EarlyStopping(patience=3)", "EarlyStopping(patience=3)"),
        ('EarlyStopping("val_loss")', 'EarlyStopping("val_loss")'),
        ('ReduceLROnPlateau("my_acc_2")', 'ReduceLROnPlateau("my_acc_2", mode="max")'),
        (
            'ModelCheckpoint("m.keras", "val_out_accuracy", save_best_only=True)',
            '"val_out_accuracy", save_best_only=True, mode="max")',
        ),
        (
            'ModelCheckpoint("m.keras", monitor="val_f")',
            'ModelCheckpoint("m.keras", monitor="val_f")',
        ),
    ],
)
def test_the_direction_is_that_of_the_name(before: str, after: str) -> None:
    text, left = ported(f"{START}callback = {CALLBACKS}{before}")
    assert after in text
    assert left == []


def test_the_direction_of_a_metric_of_keras_is_known() -> None:
    compiled = "model.compile('sgd', 'mse', metrics=['accuracy'])\n"
    stopping = f"stop = {CALLBACKS}EarlyStopping('val_accuracy')"
    assert "EarlyStopping('val_accuracy')" in ported(f"{START}{compiled}{stopping}")[0]


def test_a_direction_that_is_hardly_meant_is_noted() -> None:
    source = f"{START}stop = {CALLBACKS}EarlyStopping('val_precision')"
    ported_ = port(source.encode())
    assert b"EarlyStopping('val_precision', mode='min')" in ported_.source
    assert "takes the smallest val_precision" in ported_.notes[0].reason


FIT = """
import numpy as np
import tensorflow as tf


def far(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_true - y_pred))


inputs = tf.keras.Input((2,))
first = tf.keras.layers.Dense(1, name="first")(inputs)
second = tf.keras.layers.Dense(1, name="second")(inputs)
model = tf.keras.Model(inputs, [first, second])
model.compile("sgd", ["mse", "mse"], metrics=[[far], []])
x, y = np.ones((8, 2)), np.ones((8, 1))
callbacks = [
    tf.keras.callbacks.EarlyStopping("first_far"),
    tf.keras.callbacks.ReduceLROnPlateau("second_loss"),
]
history = model.fit(x, [y, y], epochs=2, callbacks=callbacks, verbose=0)
"""


def test_own_metrics_and_losses_of_outputs_are_compared() -> None:
    text, left = ported(FIT)
    assert left == []
    history = executed(text)["history"].history
    assert len(history["first_far"]) == len(history["second_loss"]) == 2
