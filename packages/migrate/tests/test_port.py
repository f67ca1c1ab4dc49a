"""Properties of the port that hold for any script."""

import libcst
import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

from replicax_migrate import port


def text(source: str) -> str:
    return port(source.encode()).source.decode()


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"import numpy as np\nx = np.ones(3)  # three\n",
        b"import keras\nimport torch\nmodel.minimize(x)\nx.numpy()\n",
        "# -*- coding: latin-1 -*-\nname = 'Zo\xeb'\n".encode("latin-1"),
        b"import os\r\nprint( os.name )\r\n",
        b"tf = load()\ntf.reduce_sum(1)\n",
    ],
)
def test_scripts_without_tensorflow_come_back_byte_for_byte(source: bytes) -> None:
    ported = port(source)
    assert ported.source == source
    assert ported.left == ported.notes == ()


def test_encoding_and_newlines_stay() -> None:
    lines = ["# -*- coding: latin-1 -*-", "import tensorflow as tf"]
    source = "\r\n".join([*lines, "x = tf.abs(-1)  # Zo\xeb", ""])
    ported = port(source.encode("latin-1")).source
    assert "keras.ops.abs(-1)  # Zo\xeb\r\n" in ported.decode("latin-1")
    assert ported.count(b"\n") == ported.count(b"\r\n")


def test_what_is_not_python_is_an_error_with_its_line() -> None:
    with pytest.raises(libcst.ParserSyntaxError) as error:
        port(b"import tensorflow as tf\nx = (\n")
    assert error.value.raw_line >= 2


def test_names_that_mean_something_else_are_not_taken() -> None:
    ported = text(
        "import tensorflow as tf\nrx = 1\nstrategy = tf.distribute.Strategy\n"
    )
    assert "import replicax\n" in ported
    assert "strategy = replicax.Strategy" in ported


def test_a_local_tf_is_not_tensorflow() -> None:
    source = "import tensorflow as tf\ndef f(tf):\n    return tf.reduce_sum(1)\n"
    assert "return tf.reduce_sum(1)" in text(source)


@pytest.mark.parametrize(
    ("imported", "used"),
    [
        ("import tensorflow as t", "t.reduce_sum(x)"),
        ("import tensorflow", "tensorflow.reduce_sum(x)"),
        ("import tensorflow.compat.v1 as tf", "tf.reduce_sum(x)"),
        ("import tensorflow.compat.v2 as tf", "tf.math.reduce_sum(x)"),
        ("from tensorflow import reduce_sum", "reduce_sum(x)"),
        ("from tensorflow import math as m", "m.reduce_sum(x)"),
        ("from tensorflow.math import reduce_sum as rs", "rs(x)"),
    ],
)
def test_names_are_seen_through_imports(imported: str, used: str) -> None:
    ported = text(f"{imported}\ny = {used}\n")
    assert ported.endswith("y = keras.ops.sum(x)\n")
    assert "tensorflow" not in ported


@pytest.mark.parametrize(
    ("imported", "expected"),
    [
        ("from tensorflow import keras", "import keras\n"),
        ("import tensorflow.keras as k", "import keras as k\n"),
        ("from tensorflow.keras import layers", "from keras import layers\n"),
        (
            "from tensorflow.keras.layers import Dense",
            "from keras.layers import Dense\n",
        ),
        ("import tf_keras as keras", "import keras\n"),
        ("import tf_keras", "import keras as tf_keras\n"),
    ],
)
def test_replicax_is_imported_before_keras(imported: str, expected: str) -> None:
    ported = text(f"{imported}\n")
    assert ported.startswith("import replicax as rx  # Before keras")
    assert ported.endswith(expected)


@pytest.mark.parametrize(
    ("pipeline", "is_left"),
    [
        ("d = d.repeat().shuffle(9)", True),
        ("d = d.repeat().batch(2).shuffle(9)", True),
        ("e = d.repeat()\nd = e.shuffle(9)\nprint(next(iter(e)))", True),
        ("d = d.repeat(count=-1)\nd = d.batch(2)\nd = d.shuffle(9)", True),
        ("d = d.repeat(2).shuffle(9)", False),
        ("d = d.shuffle(9).repeat()", False),
    ],
)
def test_pipelines_that_shuffle_endless_data_are_left(
    pipeline: str, is_left: bool
) -> None:
    made = "d = tf.data.Dataset.from_tensor_slices(x)"
    left = port(f"import tensorflow as tf\n{made}\n{pipeline}\n".encode()).left
    assert any("swap them" in finding.reason for finding in left) is is_left


def test_marks_that_nobody_has_done_are_still_left() -> None:
    ported = port(b"import tensorflow as tf\nx = tf.image.rot90(y)\n")
    by_hand = ported.source.replace(b"x = tf.image.rot90", b"x = rot90")
    by_hand = by_hand.replace(b"import tensorflow as tf\n", b"")
    again = port(by_hand)
    assert again.source == by_hand
    assert [f.reason for f in again.left] == [f.reason for f in ported.left]
    assert again.left[0].line == 1


def test_an_operator_of_a_kept_pipeline_keeps_all_of_it() -> None:
    source = """import tensorflow as tf

def read(name):
    return tf.cast(tf.strings.to_number(name), tf.float32)

def make():
    return tf.data.TextLineDataset("x.csv").map(read)

dataset = make().batch(4).prefetch(1)
other = tf.cast(1, tf.float32)
"""
    ported = port(source.encode())
    result = ported.source.decode()
    assert "tf.cast(tf.strings.to_number(name), tf.float32)" in result
    assert "dataset = make().batch(4).prefetch(1)" in result
    assert 'other = keras.ops.cast(1, "float32")' in result
    assert {f.line for f in ported.left} == {7}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("lambda x, y: (y, x)", "lambda example: (example[1], example[0])"),
        ("lambda x: x + 1", "lambda x: x + 1"),
        ("two", "lambda example: two(*example)"),
        ("one", "one"),
        ("partial(two, y=1)", "partial(two, y=1)"),
        ("partial(three, z=1)", "lambda example: partial(three, z=1)(*example)"),
    ],
)
def test_functions_of_map_get_the_example(argument: str, expected: str) -> None:
    source = f"""from functools import partial
import tensorflow as tf
def one(x):
    return x
def two(x, y):
    return x
def three(x, y, z):
    return x
d = tf.data.Dataset.from_tensor_slices(a).map({argument}, num_parallel_calls=4)
"""
    assert f".map({expected})" in text(source)


def test_names_that_a_star_imports_are_ported() -> None:
    text, left = ported(
        "from tensorflow.keras.models import *\n"
        "from tensorflow.keras.layers import *\n"
        "from tensorflow.keras.optimizers import *\n"
        "def made(x): return len(x), Dense(3)(x)\n"
        "Add = 1\n"
        "print(Adam(lr=1), Add, __file__)\n"
        "print(CuDNNLSTM(4))"
    )
    assert "from keras.optimizers import *\n" in text
    assert "return len(x), Dense(3)(x)\n" in text
    assert "print(Adam(learning_rate=1.0), Add, __file__)\n" in text
    assert any("CuDNNLSTM" in reason for reason in left)


def test_names_that_a_star_imports_from_keras_are_ported() -> None:
    text, left = ported(
        "from tensorflow.keras import *\nx = optimizers.Adam(lr=0.1).learning_rate"
    )
    again, _ = ported("import tensorflow as tf\nfrom keras import *\ntf.keras.Input")
    assert left == []
    assert "import keras\nfrom keras import *\nkeras.Input" in again
    assert text.startswith("import replicax as rx  # Before keras")
    assert executed(text)["x"] == np.float32(0.1)


def test_names_of_keras_preprocessing_are_those_of_keras() -> None:
    text, left = ported(
        "from keras_preprocessing.sequence import pad_sequences\n"
        "from keras_preprocessing.image import ImageDataGenerator\n"
        "x = pad_sequences([[1]], 3)\nimages = ImageDataGenerator()"
    )
    assert "from keras.preprocessing.sequence import pad_sequences\n" in text
    assert "preprocessing.image import ImageDataGenerator\n" in text
    assert left == []


def test_names_that_another_star_may_import_stay() -> None:
    text, left = ported(
        "from tensorflow.keras.layers import *\nfrom pylab import *\n"
        "plot(Dense(1), Elu(2))"
    )
    assert "plot(Dense(1), Elu(2))" in text
    assert left == []


def test_a_second_import_of_keras_leaves_that_of_replicax_first() -> None:
    again = "from tensorflow import keras\nx = keras.layers.Dense(3)\n"
    text, left = ported(f"{again}{again}")
    assert left == []
    assert text.startswith("import replicax as rx  # Before keras")
    assert text.count("import keras") == 2


def test_a_second_port_writes_no_line_twice() -> None:
    loss = "def loss(y, p):\n    return tf.reduce_mean((y - p) ** 2)\n"
    text, left = ported(
        f"import tensorflow as tf\n{loss}m = tf.keras.Model()\n"
        "m.compile(metrics=[loss])\ntf.image.rot90(x)"
    )
    assert left
    assert text.count("y.ndim < p.ndim") == 1
