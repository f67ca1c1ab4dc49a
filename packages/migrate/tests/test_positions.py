"""Arguments by position, where Keras 3 has another order of them, or takes fewer."""

import inspect
from typing import Any

import keras
import pytest
from packages.migrate.tests.porting import ported, run

from replicax_migrate.tables import ORDERS, find_target

START = "import tensorflow as tf\n"
GRU = "2, 'tanh', 'relu', True" + 3 * ", 'zeros'" + 7 * ", None" + ", 0, 0"


@pytest.mark.parametrize(
    ("call", "attributes"),
    [
        (
            "keras.layers.Embedding(3, 4, 'uniform', None, None, None, True)",
            {"mask_zero": True, "embeddings_constraint": None},
        ),
        (
            f"keras.layers.GRU({GRU}, True, True)",
            {"return_sequences": True, "return_state": True},
        ),
        ("keras.layers.Layer(False, 'a')", {"trainable": False, "name": "a"}),
        (
            "keras.layers.Conv3DTranspose(2, 3, 2, 'same', 1)",
            {"output_padding": (1,) * 3},
        ),
        ("keras.utils.Progbar(3, 30, 1, 0.05, None, 'x')", {"unit_name": "x"}),
        ("optimizers.legacy.SGD(0.1, 0.5)", {"momentum": 0.5}),
        ("losses.Loss('sum', 'a')", {"reduction": "sum", "name": "a"}),
    ],
)
def test_arguments_whose_position_has_changed_are_named(
    call: str, attributes: dict[str, Any]
) -> None:
    made = run(f"{START}x = tf.{call}")["x"]
    assert {name: getattr(made, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("keras.optimizers.Adam(0.1, 0.9, 0.99, 1e-7, False, 'a')", "name its arg"),
        ("keras.layers.Conv2D(2, 3, 1, 'same', None, 1, 'relu')", "name its arguments"),
        ("matmul(a, b, adjoint_a=True)", "no argument 'adjoint_a'"),
    ],
)
def test_arguments_that_are_gone_are_left(call: str, reason: str) -> None:
    _, left = ported(f"{START}x = tf.{call}")
    assert reason in "".join(left)


def test_columns_of_tensorflow_1_take_their_arguments_by_position() -> None:
    call = "feature_column.categorical_column_with_vocabulary_file('a', 'b', 9, 2)"
    text, left = ported(f"{START}x, y = tf.compat.v1.{call}, tf.{call}")
    assert left == []
    assert "'b', 9, num_oov_buckets=2), rx." in text
    assert text.endswith("'b', 9, 2)\n")


def test_files_are_opened_and_found_by_keyword() -> None:
    source = (
        f"{START}x = tf.io.gfile.isdir(path='/'), tf.io.gfile.GFile(name='/dev/null')"
    )
    is_there, file = run(source)["x"]
    file.close()
    assert is_there


def test_orders_are_needed() -> None:
    """Where Keras 3 has the same order, a row would only lengthen ports."""
    for path, names in ORDERS.items():
        target = find_target(path) or ""
        if "optimizers" in path or not target.startswith("keras."):
            continue
        found: Any = keras
        for part in target.split(".")[1:]:
            found = getattr(found, part)
        made = found.__init__ if inspect.isclass(found) else found
        parameters = [p for p in inspect.signature(made).parameters if p != "self"]
        kept = sum(name == "-" for name in names)
        assert parameters[kept : kept + 1] != names[kept : kept + 1], path
