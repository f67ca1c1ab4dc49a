"""Calls of `tensorflow_datasets`, which become data sources."""

from typing import Any

import keras
import numpy as np
import pytest
from packages.migrate.tests.porting import ported, run

START = "import tensorflow as tf\nimport tensorflow_datasets as tfds\n"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras' files without a download: 20 and 10 small images."""

    def images(*shape: int) -> Any:
        def load_data() -> Any:
            x, y = np.zeros((30, *shape), "uint8"), np.arange(30, dtype="uint8")
            y = y[:, None] if len(shape) == 3 else y
            return (x[:20], y[:20]), (x[20:], y[20:])

        return load_data

    monkeypatch.setattr(keras.datasets.mnist, "load_data", images(2, 2))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", images(2, 2, 3))


@pytest.mark.usefixtures("files")
def test_a_split_of_tensorflow_datasets() -> None:
    load = "tfds.load('cifar10', split=tfds.Split.TRAIN, as_supervised=True)"
    names = run(f"{START}tfds.disable_progress_bar()\ndata = {load}.batch(4)")
    batches = list(names["data"])
    assert [x.shape for x, _ in batches] == 5 * [(4, 2, 2, 3)]
    assert [y.dtype for _, y in batches] == 5 * [np.dtype("int64")]
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), range(20))


@pytest.mark.usefixtures("files")
def test_splits_and_sizes_of_tensorflow_datasets() -> None:
    names = run(
        f"{START}(a, b, c), info = tfds.load('mnist', with_info=True,\n"
        "    split=['train[:90%]', 'train[90%:]', 'test[2:5]'], as_supervised=True)\n"
        "d = a.cache().batch(2)\nn = info.features['label'].num_classes\n"
        'k = info.splits["train"].num_examples'
    )
    labels = {key: [int(y) for _, y in names[key]] for key in "abc"}
    assert labels == {"a": [*range(18)], "b": [18, 19], "c": [22, 23, 24]}
    assert next(iter(names["a"]))[0].shape == (2, 2, 1)
    assert (names["n"], names["k"], len(names["d"])) == (10, 20, 9)


@pytest.mark.usefixtures("files")
def test_a_split_of_tensorflow_datasets_that_a_condition_chooses() -> None:
    names = run(
        f"{START}def f(train):\n    split = 'train' if train else 'test[2:5]'\n"
        "    a = tfds.load('mnist', split=split, as_supervised=True)\n"
        "    b = tfds.load('mnist', split='train[:9]' if train else 'test',\n"
        "                  as_supervised=True)\n    return [len(a), len(b)]\n"
        "data = f(True), f(False)"
    )
    assert names["data"] == ([20, 9], [3, 10])


@pytest.mark.usefixtures("files")
def test_all_splits_of_tensorflow_datasets() -> None:
    names = run(f"{START}def f():\n    return tfds.load(name='mnist')\ndata = f()")
    sizes = {split: len(data) for split, data in names["data"].items()}
    assert sizes == {"train": 20, "test": 10}
    assert names["data"]["test"][3]["label"] == 23


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("d = tfds.load('cats_vs_dogs')", "TensorFlow Datasets"),
        ("d = tfds.load('cifar10', split='train')", "of cifar10 have an id"),
        ("d = tfds.load('mnist', split='train+test')", "'train+test' has no count"),
        ("d = tfds.load('mnist', batch_size=-1)", "remove batch_size="),
        ("d, i = tfds.load('mnist', with_info=True)\nprint(i)", "`i` has no counter"),
        ("both = tfds.load('mnist', with_info=True)", "assign the info object"),
        ("def f(n): return tfds.load(n)\nf('mnist')", "TensorFlow Datasets"),
    ],
)
def test_other_calls_of_tensorflow_datasets_are_left(call: str, reason: str) -> None:
    text, left = ported(f"{START}{call}")
    assert any(reason in each for each in left)
    assert "import tensorflow_datasets as tfds" in text


@pytest.mark.usefixtures("files")
def test_an_import_of_a_function_of_tensorflow_datasets_is_left() -> None:
    start = "import tensorflow as tf\nfrom tensorflow_datasets import load\n"
    text, left = ported(f"{start}d = load('mnist').batch(2)")
    assert any("needs TensorFlow" in each for each in left)
    assert "from tensorflow_datasets import load" in text
