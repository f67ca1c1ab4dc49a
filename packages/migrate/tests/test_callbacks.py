"""Callbacks that compare epochs: Keras 3 asks metrics for what is better."""

import pytest
from packages.migrate.tests.porting import ported

START = "import tensorflow as tf\n"
CALLBACKS = "tf.keras.callbacks."


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('EarlyStopping("val_f", mode="max")', 'EarlyStopping("val_f", mode="max")'),
        ("EarlyStopping(patience=3)", "EarlyStopping(patience=3)"),
        ('EarlyStopping("val_loss")', 'EarlyStopping("val_loss")'),
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
