"""Callbacks that compare epochs: Keras 3 asks metrics for what is better."""

import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port

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


OWN = """
import numpy as np
import tensorflow as tf


class Show(tf.keras.callbacks.Callback):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.shown = [len(self.model.weights)]

    def set_model(self, model):
        self.model = model

    def on_epoch_end(self, epoch, logs=None):
        self.shown.append(len(self.model.weights))


model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
show = Show(model)
show.model = model
model.fit(np.ones((4, 3)), np.ones((4, 1)), callbacks=[show], verbose=0)
"""


def test_the_model_of_a_callback_is_set_by_the_method_of_keras_3() -> None:
    text, left = ported(OWN)
    assert left == []
    assert text.count("self.set_model(model)") == 1
    assert text.count("super().set_model(model)") == 1
    assert "show.set_model(model)" in text
    assert executed(text)["show"].shown == [2, 2]


@pytest.mark.parametrize(
    ("base", "line", "name"),
    [
        ("callbacks.Callback", "self.model, self.x = x", "model of a callback"),
        ("layers.Layer", "self.path = x", "path of a layer"),
        ("Model", "self.path = x", "path of a model"),
        ("losses.Loss", "self.dtype = x", "dtype of a loss"),
    ],
)
def test_attributes_that_keras_3_does_not_let_one_set_are_left(
    base: str, line: str, name: str
) -> None:
    source = (
        f"{START}class Own(tf.keras.{base}):\n    def use(self, x):\n        {line}\n"
    )
    _, left = ported(source)
    assert [finding for finding in left if name in finding]
    plain = source.replace(f"tf.keras.{base}", "object")
    assert ported(plain)[1] == []
