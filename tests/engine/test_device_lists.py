"""Lists of devices, and random layers that were made outside the scope."""

import subprocess
import sys

import keras
import numpy as np

import replicax as rx

CODE = """
import replicax as rx
from jax._src import xla_bridge
names = [d.name for d in rx.config.list_physical_devices()]
print(names, xla_bridge.backends_are_initialized())
rx.set_logical_devices(2)
print([d.name for d in rx.config.list_logical_devices("CPU")])
"""


def test_the_cpu_can_be_divided_after_looking_at_the_machine() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    first, second = ended.stdout.splitlines()
    assert first.startswith("['cpu:0'")
    assert first.endswith("False")
    assert second == "['cpu:0', 'cpu:1']"


def test_augmentation_that_was_made_outside_the_scope() -> None:
    flip = keras.layers.RandomFlip("horizontal", seed=1)
    strategy = rx.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = keras.Sequential([flip, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.zeros((4, 8, 8, 1), "float32")
    history = model.fit(x, x[:, 0, 0], verbose=0)
    assert np.isfinite(history.history["loss"]).all()
