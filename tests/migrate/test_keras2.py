"""What tf.keras and Keras 2 had and Keras 3 has not, or has otherwise."""

import pytest

from replicax.migrate import port

START = (
    "import tensorflow as tf\n"
    "from tensorflow.keras import backend as K\n"
    "opt = tf.keras.optimizers.Adam(1e-3)\n"
)


def ported(source: str) -> tuple[str, list[str]]:
    """The ported text, and what is left."""
    result = port(f"{START}{source}\n".encode())
    compile(result.source, "ported", "exec")
    assert port(result.source).source == result.source
    return result.source.decode(), [finding.reason for finding in result.left]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("K.concatenate([a, b])", "keras.ops.concatenate([a, b], axis=-1)"),
        ("K.argmax(x)", "keras.ops.argmax(x, axis=-1)"),
        ("K.clip(x, min_value=0, max_value=1)", "keras.ops.clip(x, x_min=0, x_max=1)"),
        ("K.expand_dims(K.squeeze(x, 0))", "squeeze(x, 0), axis=-1)"),
        ("K.eval(x)", "keras.ops.convert_to_numpy(x)"),
        ("tf.math.divide_no_nan(a, b)", "keras.ops.divide_no_nan(a, b)"),
    ],
)
def test_what_is_ported(before: str, after: str) -> None:
    text, left = ported(before)
    assert after in text
    assert left == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("K.batch_dot(a, b)", "use `keras.ops`"),
        ("K.relu(x, 0.1)", "has no argument 'alpha'"),
    ],
)
def test_what_is_left(before: str, reason: str) -> None:
    text, left = ported(before)
    assert any(reason in each for each in left), left
    assert all(f"# replicax: {each}\n" in text for each in left)


@pytest.mark.parametrize("end", ["", "import tensorflow as tf\nprint(tf.zeros(3))\n"])
def test_names_of_the_package_keras_are_those_of_keras_2(end: str) -> None:
    source = f"from keras.utils import multi_gpu_model as m\nx = m(n, 2)\n{end}"
    left = port(source.encode()).left
    assert [finding.line for finding in left] == [1, 2]
    assert all("use `rx.MirroredStrategy`" in finding.reason for finding in left)


def test_a_script_for_keras_3_stays_byte_for_byte() -> None:
    source = b"import keras\nfrom keras import ops\nprint(ops.ones(3), keras.Model)\n"
    assert port(source).source == source
