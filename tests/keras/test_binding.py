"""The first strategy installs the hooks; objects made earlier do not change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import replicax as rx
import keras
import numpy as np

folder = sys.argv[1]
rows = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")


def made():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((4,)),
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def fit(fit, epochs=1, **options):
    keras.utils.set_random_seed(1)
    found = fit(rows, rows[:, :1], batch_size=8, epochs=epochs, verbose=0, **options)
    return [round(x, 5) for x in found.history["loss"]]


def used(model):
    keras.utils.set_random_seed(2)
    found = model.evaluate(rows, rows[:, :1], verbose=0)
    found += model.train_on_batch(rows, rows[:, :1])
    return np.round([*found, *model.predict(rows, verbose=0).ravel()], 4).tolist()


plain_fit = keras.Model.fit
before, early, inline, whole = made(), made(), made(), made()
bound = early.fit  # Looked up before the hooks are installed.
weight, other = (keras.Variable(np.ones(3, "float32")) for _ in range(2))
seeds = keras.random.SeedGenerator(7)
first = fit(before.fit)
expected = fit(whole.fit, epochs=2)
assert keras.Model.fit is plain_fit

# `fit` is looked up first; then the callbacks install the hooks.
found = fit(inline.fit, epochs=2, callbacks=[
    rx.BackupAndRestore(folder + "/backup", delete_checkpoint=False),
    rx.callbacks.Report(folder + "/report.html"),
])
assert keras.Model.fit is not plain_fit
assert found == expected, (found, expected)
assert inline._replicax_fit is None
assert os.path.exists(folder + "/report.html") and os.listdir(folder + "/backup")

strategy = rx.OneDeviceStrategy("cpu:0")
with strategy.scope():
    theirs = made()
assert fit(theirs.fit, epochs=2) == expected
# Cached train functions stay valid; new ones give the same.
before.stop_training, again = False, made()
assert fit(again.fit) == first == fit(bound)
assert fit(again.fit) == fit(before.fit) == fit(bound)
assert used(again) == used(before) == used(early)

for model in (before, early, inline):
    try:
        with strategy.scope():
            fit(model.fit)
    except rx.ContextError as error:
        assert "made outside the scope" in str(error)
    else:
        raise SystemExit("a model of outside was trained in a scope")
try:
    with strategy.scope():
        fit(bound)
except rx.ContextError:
    pass
else:
    raise SystemExit("`fit` that was looked up early does not know of the scope")

weight.assign(weight * 2)
result = rx.get_strategy().run(lambda: weight + 1)
assert np.asarray(result).tolist() == [3, 3, 3]
try:
    strategy.run(lambda: other + 1)
except rx.ContextError as error:
    assert "outside the scope" in str(error)
else:
    raise SystemExit("a variable of outside was used in a strategy")
assert keras.random.normal((2,), seed=seeds).shape == (2,)
copy = keras.models.clone_model(before)
copy.set_weights(before.get_weights())
before.save(folder + "/model.keras")
loaded = keras.models.load_model(folder + "/model.keras")
assert used(loaded)[:2] == used(before)[:2]
print("done")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_objects_of_before_the_first_strategy(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.stdout.splitlines()[-1:] == ["done"], process.stderr
