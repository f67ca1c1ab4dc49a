"""Labels that are dicts with those of a model's one output."""

from packages.migrate.tests.porting import ported

START = """import numpy as np
import tensorflow as tf

x, y = np.ones((8, 5), "float32"), np.ones((8, 1), "float32")
last = tf.keras.layers.Dense(1, name="out", kernel_initializer="ones")
"""
FUNCTIONAL = """i = tf.keras.Input((5,))
model = tf.keras.Model(i, last(i))
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


def test_labels_of_named_outputs_stay() -> None:
    model = FUNCTIONAL.replace("last(i))", "{'out': last(i)})")
    assert '{"out": y}' in ported(START + model + COMPILED + DATA["generator"])[0]
