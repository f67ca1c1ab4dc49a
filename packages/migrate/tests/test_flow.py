"""Datasets by what their names are bound to where they are used."""

import pytest

from replicax_migrate import port

BOTH = "import tensorflow as tf\nimport tensorflow_datasets as tfds\n"


def ported_lines(source: str) -> tuple[list[str], list[str]]:
    """The lines of the ported script without its imports, and what is left."""
    ported = port(source.encode())
    assert port(ported.source).source == ported.source
    lines = [
        line
        for line in ported.source.decode().splitlines()
        if line and not line.lstrip().startswith(("import ", "from ", "#"))
    ]
    return lines, [finding.source for finding in ported.left]


def test_a_name_that_is_bound_again_keeps_only_what_it_is_then() -> None:
    lines, left = ported_lines(
        "import tensorflow as tf\n"
        "data = tf.data.Dataset.from_tensor_slices(x).batch(2)\n"
        "use(data)\n"
        "data = tf.data.TFRecordDataset(names)\n"
        "data = data.batch(3)\n"
        "use(data)\n"
        "data = tf.data.Dataset.range(4).batch(2)\n"
    )
    assert lines[0] == "data = rx.input.numpy_dataset(x).batch(2)"
    assert lines[2:4] == [
        "data = tf.data.TFRecordDataset(names)",
        "data = data.batch(3)",
    ]
    assert lines[5] == "data = grain.MapDataset.range(4).batch(2)"
    assert left == ["tf.data.TFRecordDataset(names)"]


@pytest.mark.parametrize(
    "choice",
    [
        "data = tfds.load('x') if real else tf.data.Dataset.range(4)\n",
        "if real:\n    data = tfds.load('x')\n"
        "else:\n    data = tf.data.Dataset.range(4)\n",
        "data = tf.data.Dataset.range(4)\nwhile real:\n    data = tfds.load('x')\n",
        "try:\n    data = tfds.load('x')\n"
        "except OSError:\n    data = tf.data.Dataset.range(4)\n",
        "def get():\n    return tfds.load('x') if real else tf.data.Dataset.range(4)\n"
        "data = get()\n",
    ],
)
def test_what_may_come_from_tensorflow_stays_with_all_it_is_made_of(
    choice: str,
) -> None:
    lines, _ = ported_lines(f"{BOTH}{choice}data = data.batch(2)\n")
    assert lines[-1] == "data = data.batch(2)"
    assert any("tf.data.Dataset.range(4)" in line for line in lines)


def test_parts_of_what_a_function_returns_are_datasets_of_their_own() -> None:
    lines, _ = ported_lines(
        f"{BOTH}def get():\n    return tfds.load('x'), tf.data.Dataset.range(4)\n"
        "train, test = get()\ntrain = train.batch(2)\ntest = test.take(2).batch(2)\n"
    )
    assert lines[-2:] == ["train = train.batch(2)", "test = test[:2].batch(2)"]


POLICY = "tf.data.experimental.AutoShardPolicy.OFF"
OPTIONS = f"""import tensorflow as tf
from data import make
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = {POLICY}
"""


def test_options_go_with_the_pipelines_that_they_are_for() -> None:
    lines, left = ported_lines(f"{OPTIONS}d = make(2)\nd = d.with_options(options)\n")
    assert lines == ["d = make(2)"]
    assert left == []


@pytest.mark.parametrize(
    "use",
    [
        "d = tf.data.TFRecordDataset(n).with_options(options)",
        "strategy.experimental_distribute_dataset(d, options)",
    ],
)
def test_options_that_something_needs_stay_as_they_were(use: str) -> None:
    lines, left = ported_lines(f"{OPTIONS}{use}\n")
    assert lines == [*OPTIONS.splitlines()[2:], use]
    assert "tf.data.Options()" in left


def test_functions_see_all_bindings_of_the_names_around_them() -> None:
    lines, _ = ported_lines(
        "import tensorflow as tf\n"
        "data = tf.data.Dataset.range(4)\n"
        "def batches():\n    return data.batch(2)\n"
        "data = tf.data.TFRecordDataset(n)\n"
    )
    assert lines[0] == "data = tf.data.Dataset.range(4)"
    assert lines[2] == "    return data.batch(2)"
