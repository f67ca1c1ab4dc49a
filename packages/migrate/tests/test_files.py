"""Files of models and weights, whose names end as Keras 3 wants."""

import pytest
from packages.migrate.tests.porting import ported

from replicax_migrate import port


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
        (
            "p = 'c' if a else 'cp-{epoch}'\nmodel.save_weights(p.format(epoch=0))",
            "p = 'c.weights.h5' if a else 'cp-{epoch}.weights.h5'\n",
        ),
        (
            "end = '{epoch:02d}.hdf5'\np = ''.join([folder, '/', end])\n"
            "tf.keras.callbacks.ModelCheckpoint(filepath=p)",
            "end = '{epoch:02d}.h5'\n",
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


def test_a_path_that_a_function_uses_otherwise_is_left() -> None:
    function = "def place(p):\n    open(p)\n    return os.path.join(d, p)\n"
    text, left = ported(
        f"import tensorflow as tf\n{function}model.save(place('m'))\nplace('n')"
    )
    assert "model.save(place('m'))" in text
    assert len(left) == 1


def test_a_model_of_another_module_is_one_of_keras_where_keras_loads_it() -> None:
    text, left = ported(
        "import parts\nimport tensorflow as tf\nmodel = parts.make()\n"
        "model.save('m')\ntf.keras.models.load_model('m')"
    )
    assert "model.save('m.keras')" in text
    assert left == []


@pytest.mark.parametrize(
    "before",
    [
        "p = 'm'\nmodel.save(p)\nos.remove(p)",
        "model.save('m')\nprint(os.path.exists('m'))",
        "model.save_weights('m')\nprint(os.path.exists('m.index'))",
        "model.save('m/')\nprint(os.path.exists('m/saved_model.pb'))",
        "import gensim\nw2v_model = gensim.W()\nw2v_model.save('m')",
        "model.save('export/1')",
        "m = tf.keras.models.load_model('m')",
        "model.save('m')\nmodel.save_weights('m')",
        "def f(p): model.save(p)\nf('m')\nf('n.keras')",
    ],
)
def test_other_files_are_left_by_their_names(before: str) -> None:
    text, left = ported(f"import tensorflow as tf\n{before}")
    assert all("wants a file name that ends with" in each for each in left)
    assert left
    assert ".keras')" not in text.replace("f('n.keras')", "")


def test_a_path_that_cannot_be_seen_is_left() -> None:
    ported = port(b"import tensorflow as tf\nmodel.save(args.path)\n")
    assert [left.line for left in ported.left] == [2]
    assert "see that `args.path` does" in ported.left[0].reason


@pytest.mark.parametrize(
    ("default", "num_left"), [("default='m.h5'", 0), ("default='m'", 1), ("", 1)]
)
def test_a_path_of_the_command_line_ends_as_its_default(
    default: str, num_left: int
) -> None:
    ported = port(
        "import tensorflow as tf\nparser.add_argument('--path', type=str, "
        f"{default})\nargs = parser.parse_args()\nmodel.save(args.path)\n".encode()
    )
    assert len(ported.left) == num_left
    assert len(ported.notes) == 1 - num_left
    for note in ported.notes:
        assert "also those that the command line gives" in note.reason


@pytest.mark.parametrize(
    "use", ["load_weights('w.weights.h5')", "save_weights('w.weights.h5')"]
)
@pytest.mark.parametrize(
    ("lines", "is_left"),
    [
        ("net = Net()\n", True),
        ("net = make()\nnet.compile('sgd', 'mse')\n", True),
        ("net = tf.keras.Sequential([tf.keras.layers.Dense(2)])\n", True),
        ("net = Net()\nnet(x)\n", False),
        ("net = Net()\nnet.fit(x, y)\n", False),
        ("net = Net()\ntrain(net)\n", False),
        ("net = tf.keras.Sequential([tf.keras.Input((3,))])\n", False),
    ],
)
def test_weights_are_loaded_into_models_with_variables_and_saved_from_them(
    lines: str, is_left: bool, use: str
) -> None:
    _, left = ported(
        "import tensorflow as tf\nclass Net(tf.keras.Model):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.wide = tf.keras.layers.Dense(2)\n"
        "    def call(self, x):\n        return self.wide(x)\n"
        "def make():\n    made = Net()\n    return made\n"
        f"{lines}net.{use}\nnet.fit(x, y)\n"
    )
    assert any("a model that has its variables" in each for each in left) == is_left
