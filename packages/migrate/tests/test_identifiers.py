"""Names of losses and of parts of layers, and files of checkpoints, by Keras 3."""

from pathlib import Path

import keras
import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port

MODEL = (
    "import tensorflow as tf\n"
    "model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])\n"
)


@pytest.mark.parametrize(
    "loss", ["'logcosh'", "['kullback_leibler_divergence']", "{'dense': 'huber_loss'}"]
)
def test_losses_have_the_names_of_keras_3(loss: str) -> None:
    text, left = ported(
        "import tensorflow as tf\ninputs = tf.keras.Input((2,))\n"
        "outputs = tf.keras.layers.Dense(1, name='dense')(inputs)\n"
        f"model = tf.keras.Model(inputs, outputs)\nmodel.compile('sgd', loss={loss})"
    )
    assert left == []
    names = executed(text)
    model = names["model"]
    assert np.isfinite(model.evaluate(np.ones((4, 2)), np.ones((4, 1)), verbose=0))


@pytest.mark.parametrize(
    "argument",
    [
        "kernel_constraint='maxnorm'",
        "bias_constraint='nonneg'",
        "kernel_constraint='unitnorm'",
        "kernel_regularizer='l1_l2'",
        "bias_initializer='constant'",
    ],
)
def test_parts_of_layers_have_the_names_of_keras_3(argument: str) -> None:
    text, left = ported(
        f"import tensorflow as tf\nlayer = tf.keras.layers.Dense(1, {argument})"
    )
    assert left == []
    executed(f"{text}\nlayer(np.ones((1, 2)))", {"np": np})


def test_a_checkpoint_as_hdf5_is_written_and_loaded_by_the_suffix_h5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, left = ported(
        f"{MODEL}model.compile('sgd', 'mse')\n"
        "best = tf.keras.callbacks.ModelCheckpoint('best.hdf5', period=1)\n"
        "model.fit(x, y, callbacks=[best], verbose=0)\n"
        "loss = model.evaluate(x, y, verbose=0)\n"
        "model.set_weights([w * 0 for w in model.get_weights()])\n"
        "model.load_weights('best.hdf5')\n"
        "again = model.evaluate(x, y, verbose=0)"
    )
    assert left == []
    assert text.count("'best.h5'") == 2
    names = executed(text, {"x": np.ones((4, 2)), "y": np.ones((4, 1))})
    assert names["again"] == pytest.approx(names["loss"])


def test_a_checkpoint_of_every_other_epoch_is_reported() -> None:
    _, left = ported(
        f"{MODEL}c = tf.keras.callbacks.ModelCheckpoint('best.h5', period=2)"
    )
    assert left == ["ModelCheckpoint has no period=: use save_freq= in steps"]


def test_the_default_of_an_option_with_a_dash_counts() -> None:
    _, left = ported(
        f"{MODEL}import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--checkpoint-format', default='./c-{epoch}.h5')\n"
        "args = parser.parse_args()\n"
        "c = tf.keras.callbacks.ModelCheckpoint(args.checkpoint_format)"
    )
    assert left == []


def test_the_epsilon_of_a_plateau_is_its_min_delta() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "plateau = tf.keras.callbacks.ReduceLROnPlateau(epsilon=0.25)"
    )
    assert left == []
    names = executed(text)
    assert names["plateau"].min_delta == 0.25


def test_averages_of_weights_that_begin_otherwise_are_noted() -> None:
    source = (
        "import tensorflow as tf\n"
        "optimizer = tf.keras.optimizers.Adam(use_ema=True, ema_momentum=0.9)\n"
    )
    result = port(source.encode())
    assert "use_ema=True" in result.source.decode()
    assert ["begin with the weights" in note.reason for note in result.notes] == [True]


def test_averages_of_weights_begin_as_the_note_says() -> None:
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9)
    weight = keras.Variable([5.0])
    optimizer.apply([np.ones(1, "float32")], [weight])
    optimizer.finalize_variable_values([weight])
    np.testing.assert_allclose(weight, [4.0])  # TensorFlow's: 0.9 * 5 + 0.1 * 4.
