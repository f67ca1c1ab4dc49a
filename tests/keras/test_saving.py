"""Models go to files and come back, with replicax and without."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from keras import layers


@pytest.fixture
def data(digits):
    return tuple(a[:72] for a in digits)


def classifier():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(12, activation="relu"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, 0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(model, data):
    return model.fit(*data, batch_size=24, shuffle=False, verbose=0).history


def run_without_replicax(script, folder):
    script = "import sys, keras, numpy as np\n" + textwrap.dedent(script)
    script += "\nassert 'replicax' not in sys.modules\n"
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_files_open_in_plain_keras(data, strategy_of, tmp_path):
    x, _ = data
    with strategy_of(4).scope():
        # Synchronized batch normalization is for JAX only with replicax.
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(12),
                layers.Dropout(0.2),
                layers.Dense(10),
            ]
        )
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    train(model, data)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.save(tmp_path / "x.npy", x)
    run_without_replicax(
        """
        x = np.load("x.npy")
        model = keras.models.load_model("model.keras")
        assert int(model.optimizer.iterations) == 3
        np.save("from_model.npy", model.predict(x, verbose=0))
        model.set_weights([0 * w for w in model.get_weights()])
        model.load_weights("model.weights.h5")
        np.save("from_weights.npy", model.predict(x, verbose=0))
        model.fit(x, x.argmax(1) % 10, verbose=0)
        """,
        tmp_path,
    )
    expected = model.predict(x, verbose=0)
    for name in ("from_model.npy", "from_weights.npy"):
        # The same weights; one program of 72 rows and four of 18 each.
        np.testing.assert_allclose(np.load(tmp_path / name), expected, 1e-5, 1e-6)


@pytest.mark.slow(but=["0-2", "8-2"])
@pytest.mark.parametrize("saved_on", [0, 2])
@pytest.mark.parametrize("loaded_on", [0, 8])
def test_training_goes_on_after_loading(
    data, outcome, assert_same, tmp_path, saved_on, loaded_on
):
    """Weights, optimizer slots and iterations come back."""
    path = tmp_path / "model.keras"

    def without_stopping():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(keras.optimizers.Adam(epsilon=1e-3), loss())
        return [train(model, data) for _ in range(2)], model.get_weights()

    def loss():
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def save():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(keras.optimizers.Adam(epsilon=1e-3), loss())
        history = train(model, data)
        model.save(path)
        return history

    def load():
        model = keras.models.load_model(path)
        return train(model, data), model.get_weights()

    histories, weights = outcome(without_stopping, 0)
    first = outcome(save, saved_on)
    second, loaded = outcome(load, loaded_on)
    assert_same([[first, second], loaded], [histories, weights])


@pytest.mark.parametrize("inside", [True, False], ids=["in scope", "outside"])
def test_weights_come_back(data, strategy_of, tmp_path, inside):
    path = tmp_path / "model.weights.h5"
    strategy = strategy_of(4)
    with strategy.scope():
        model = classifier()
    train(model, data)
    model.save_weights(path)
    saved = model.get_weights()
    saved_slots = [v.numpy() for v in model.optimizer.variables]
    train(model, data)
    if inside:
        with strategy.scope():
            model.load_weights(path)
    else:
        model.load_weights(path)
    for actual, expected in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(actual, expected)
    for variable, expected in zip(model.optimizer.variables, saved_slots, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)
    strategy.check_replicas()
    train(model, data)


def test_clones_and_weights_set(data, strategy_of):
    x, _ = data
    strategy = strategy_of(4)
    with strategy.scope():
        model = classifier()
        train(model, data)
        clone = keras.models.clone_model(model)
        clone.compile("sgd", model.loss)
    clone.set_weights(model.get_weights())
    predictions = clone.predict(x, verbose=0)
    np.testing.assert_array_equal(predictions, model.predict(x, verbose=0))
    train(clone, data)  # The two share nothing.
    assert not np.allclose(predictions, clone.predict(x, verbose=0))
    np.testing.assert_array_equal(predictions, model.predict(x, verbose=0))
