"""Labels that are dicts with those of a model's one output."""

import numpy as np
import pytest
from packages.migrate.tests.porting import ported, run

START = """import numpy as np
import tensorflow as tf

x, y = np.ones((8, 5), "float32"), np.ones((8, 1), "float32")
last = tf.keras.layers.Dense(1, name="out", kernel_initializer="ones")
"""
FUNCTIONAL = """i = tf.keras.Input((5,))
model = tf.keras.Model(i, last(i))
"""
SEQUENTIAL = """model = tf.keras.Sequential([last])
"""
COMPILED = """model.compile("sgd", loss={"out": "mse"})
"""
DATA = {
    "generator": """
def batches():
    while True:
        yield x, {"out": y}, {"out": y / 2}
history = model.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
""",
    "variable": """
def batches():
    while True:
        labels = {"out": y}
        yield x, labels, y[:, 0] / 2
history = model.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
""",
    "sequence": """
class Batches(tf.keras.utils.Sequence):
    def __len__(self):
        return 1
    def __getitem__(self, i):
        return x, {"out": y}, y[:, 0] / 2
history = model.fit(Batches(), verbose=0)
""",
    "map": """
data = tf.data.Dataset.from_tensor_slices((x, y))
data = data.map(lambda a, b: (a, {"out": b}, b[0] / 2)).batch(8)
history = model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
""",
    "slices": """
data = tf.data.Dataset.from_tensor_slices((x, {"out": y}, y[:, 0] / 2)).batch(8)
history = model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
""",
}


@pytest.mark.parametrize("model", [FUNCTIONAL, SEQUENTIAL])
@pytest.mark.parametrize("data", DATA)
def test_labels_of_one_output(model: str, data: str) -> None:
    history = run(START + model + COMPILED + DATA[data])["history"]
    # The sum of five ones, and the label 1, at half the weight.
    np.testing.assert_allclose(history.history["loss"], [8], rtol=1e-5)


def test_labels_that_the_script_reads_are_left() -> None:
    source = START + FUNCTIONAL + COMPILED + DATA["slices"]
    _, left = ported(f"{source}for _, labels in data:\n    print(labels['out'])")
    assert ["dict of one output's labels" in each for each in left] == [True]


def test_labels_of_named_outputs_stay() -> None:
    model = FUNCTIONAL.replace("last(i))", "{'out': last(i)})")
    assert '{"out": y}' in ported(START + model + COMPILED + DATA["generator"])[0]
