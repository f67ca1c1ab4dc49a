"""Modules of Keras 2 that Keras 3 does not have, and what was in them."""

import pytest
from packages.migrate.tests.porting import ported, run

from replicax_migrate import port
from replicax_migrate.names import path_in_tensorflow


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("keras.layers.core.dense.Dense", "keras.layers.Dense"),
        ("keras.layers.core.Dense", "keras.layers.Dense"),
        ("keras.layers.rnn.lstm.LSTMCell", "keras.layers.LSTMCell"),
        ("keras.layers.merging.add.add", "keras.layers.add"),
        ("keras.engine.topology.Layer", "keras.layers.Layer"),
        ("keras.engine.base_layer.Layer", "keras.layers.Layer"),
        ("keras.engine.InputSpec", "keras.layers.InputSpec"),
        ("keras.engine.training.Model", "keras.models.Model"),
        ("tensorflow.python.keras.engine.sequential.Sequential", "keras.models."),
        ("keras.src.engine.data_adapter.unpack_x_y_sample_weight", "keras.utils."),
        ("keras.optimizers.optimizer_v2.adam.Adam", "keras.optimizers.Adam"),
        ("keras.metrics.base_metric.Mean", "keras.metrics.Mean"),
        ("keras.utils.generic_utils.Progbar", "keras.utils.Progbar"),
        ("keras.utils.data_utils.Sequence", "keras.utils.Sequence"),
        ("keras.backend.tensorflow_backend.set_session", "keras.backend.set_session"),
        ("tensorflow.keras.preprocessing.image.load_img", "keras.preprocessing.image."),
        # These are no public names, or none of Keras 3.
        ("keras.optimizers.optimizer_v1.Adam", "keras.optimizers.optimizer_v1."),
        ("keras.preprocessing.text.Tokenizer", "keras.preprocessing.text."),
        ("keras.legacy.interfaces.wraps", "keras.legacy.interfaces."),
        ("keras.utils.experimental.DatasetCreator", "keras.utils.experimental."),
    ],
)
def test_what_was_in_a_module_is_found_in_its_package(name: str, path: str) -> None:
    last = name.rpartition(".")[2] if path.endswith(".") else ""
    assert path_in_tensorflow(name) == f"{path}{last}"


@pytest.mark.parametrize(
    "source",
    [
        "from keras.utils import generic_utils\nx = generic_utils.Progbar(2)",
        "from keras.utils.generic_utils import Progbar\nx = Progbar(2)",
        "import keras.utils.generic_utils\nx = keras.utils.generic_utils.Progbar(2)",
        "import keras.utils.generic_utils as g\nx = g.Progbar(2)",
        "from tensorflow.python.keras.utils.vis_utils import plot_model as x",
        "import keras.layers.experimental.preprocessing\nx = keras.Sequential()",
        "import keras.engine.topology as t\nclass L(t.Layer):\n    pass\nx = L()",
        "from keras.engine import Layer, InputSpec\nx = Layer(), InputSpec(ndim=2)",
        "from keras.engine.training import Model\nx = Model()",
        "import keras.legacy.layers\nx = keras.Sequential()",
    ],
)
def test_scripts_with_modules_that_are_gone_run(source: str) -> None:
    assert run(source)["x"] is not None


def test_a_module_is_not_called() -> None:
    text, left = ported("from keras.layers import merge\nx = merge([1], mode='sum')")
    assert "x = merge([1]" in text
    assert "keras.layers is a module" in left[-1]
    assert not port(b"from keras.layers import merge\nx = merge.add([1])\n").left


def test_generators_and_tokenizers_are_those_that_keras_keeps_for_old_scripts() -> None:
    source = (
        "import numpy as np\n"
        "from tensorflow.keras.preprocessing import image, text\n"
        "from tensorflow.keras.preprocessing.image import load_img, random_shift\n"
        "from tensorflow.keras.preprocessing.sequence import TimeseriesGenerator\n"
        "from tensorflow.keras.preprocessing.sequence import pad_sequences\n"
        "words = text.Tokenizer(num_words=10, oov_token='?')\n"
        "words.fit_on_texts(['a b c', 'a b'])\n"
        "x = pad_sequences(words.texts_to_sequences(['a d']), 3)\n"
        "series = TimeseriesGenerator(np.arange(9.0), np.arange(9.0), length=3)\n"
        "images = image.ImageDataGenerator(rescale=0.5).flow(np.ones((6, 4, 4, 3)))\n"
        "moved = random_shift(np.ones((4, 4, 3)), 0.0, 0.0, 0, 1, 2)\n"
    )
    found = run(source)
    assert found["x"].tolist() == [[0, 2, 1]]
    assert found["series"][0][0].shape == (6, 3)
    assert next(found["images"]).max() == 0.5
    assert found["moved"].shape == (4, 4, 3)
