"""Files of models and weights, whose names end as Keras 3 wants."""

import pytest
from packages.migrate.tests.porting import ported


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "model.save('m/')\nm = tf.keras.models.load_model('m/')",
            "model.save('m.keras')\nm = keras.models.load_model('m.keras')\n",
        ),
        (
            "model.save_weights('w.h5')\nmodel.load_weights('w.h5')",
            "model.save_weights('w.weights.h5')\nmodel.load_weights('w.weights.h5')\n",
        ),
        (
            "p = os.path.join(d, 'ckpt')\ntf.keras.callbacks.ModelCheckpoint(p)\n"
            "model.save(p)\nprint(p)",
            "p = os.path.join(d, 'ckpt.keras')\n",
        ),
    ],
)
def test_files_whose_uses_are_in_sight_get_the_end_that_keras_wants(
    before: str, after: str
) -> None:
    text, left = ported(f"import tensorflow as tf\n{before}")
    assert after in text
    assert left == []


PLACE = """
def place(path, number):
    folder, name = os.path.dirname(path), os.path.basename(path)
    base = os.path.basename(path)
    if number:
        folder = os.path.join(folder, str(number))
    return os.path.join(folder, base)

"""


def test_a_path_is_followed_through_a_function_that_places_it() -> None:
    text, left = ported(
        f"import os\nimport tensorflow as tf\n{PLACE}"
        "path = '/tmp/m'\nmodel.save(place(path, n))\n"
        "tf.train.CheckpointManager(c, place('/tmp/ckpt', n))\n"
        "tf.keras.models.load_model(path)"
    )
    assert left == []
    assert "path = '/tmp/m.keras'\n" in text
    assert "place('/tmp/ckpt', n)" in text


def test_a_model_of_another_module_is_one_of_keras_where_keras_loads_it() -> None:
    text, left = ported(
        "import parts\nimport tensorflow as tf\nmodel = parts.make()\n"
        "model.save('m')\ntf.keras.models.load_model('m')"
    )
    assert "model.save('m.keras')" in text
    assert left == []
