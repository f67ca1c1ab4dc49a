"""Functions of indices, and arrays of tensors, compute what those of TensorFlow do."""

from typing import Any

import numpy as np
import pytest
from packages.migrate.tests.porting import executed, ported

X = np.arange(24.0, dtype="float32").reshape(2, 3, 4)


def computed(source: str) -> Any:
    """The value of `y` after a script of which nothing is left by hand."""
    text, left = ported(f"import numpy as np\nimport tensorflow as tf\n{source}")
    assert left == []
    return np.asarray(executed(text, {"x": X})["y"]).tolist()


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ("[[1, 2], [0, 1]]", X[[1, 0], [2, 1]]),
        ("np.array([[1, 2, 3]])", X[[1], [2], [3]]),
        ("tf.constant([[[1], [0]], [[0], [0]]])", X[[[1, 0], [0, 0]]]),
    ],
)
def test_gather_nd(indices: str, expected: np.ndarray) -> None:
    assert computed(f"y = tf.gather_nd(x * 1, {indices})") == expected.tolist()


@pytest.mark.parametrize(
    ("name", "value"), [("update", 9.0), ("add", 32.0), ("sub", 14.0)]
)
def test_tensors_are_changed_at_indices(name: str, value: float) -> None:
    changed = X.copy()
    changed[1, 2, 3] = value
    call = f"tf.tensor_scatter_nd_{name}(tf.constant(x), [[[1, 2, 3]]], [[9.]])"
    assert computed(f"y = {call}") == changed.tolist()


def test_variables_of_a_list_are_assigned() -> None:
    made = "v = tf.Variable([1., 2., 3.])\nvs = [tf.Variable(0.), v]"
    assert computed(f"{made}\nvs[1].assign([1., 2., 4.])\ny = v") == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "call",
    [
        "tf.scatter_nd(i, x, f())",
        "tf.gather_nd(x, i, batch_dims=1)",
    ],
)
def test_what_is_not_in_sight_is_left(call: str) -> None:
    _, left = ported(f"import tensorflow as tf\ny = {call}")
    assert len(left) == 1


FILLED = """\
def f(n):
    out = tf.TensorArray(tf.float32, size=n)
    for i in tf.range(n):
        out = out.write(i, x[i] + {first})
    return {value}
y = f(2)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("out.write(i, ", "out.write(n - i - 1, "),  # In another order.
        ("return out", "out = out.write(0, x[0])\n    return out"),
        ("return out", "for i in range(1, 2):\n        f(out)\n    return out"),
        ("out = out.write", "out = g(out) if i else out.write"),
        ("        out =", "        if i > 0:\n            continue\n        out ="),
        ("tf.range(n)", "tf.range(1, n)"),
        ("return out.stack()", "return out"),
    ],
)
def test_other_arrays_stay(before: str, after: str) -> None:
    source = FILLED.format(value="out.stack()", first=0.0).replace(before, after, 1)
    text, left = ported(f"import tensorflow as tf\n{source}")
    assert any("use a Python list" in each for each in left)
    assert "out = tf.TensorArray(tf.float32, size=n)" in text


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("tf.math.l2_normalize(x)", X / np.sqrt((X**2).sum())),
        ("tf.linalg.trace(x)", np.trace(X, axis1=-2, axis2=-1)),
        ("tf.linalg.diag_part(x)", X.diagonal(axis1=-2, axis2=-1)),
    ],
)
def test_norms_and_traces_are_over_the_axes_of_tensorflow(
    call: str, expected: np.ndarray
) -> None:
    found = computed(f"y = {call}")
    assert np.allclose(found, expected, rtol=1e-6)


def test_numbers_that_are_given_to_operations_stay_numbers() -> None:
    text, left = ported(
        "import tensorflow as tf\n"
        "class Gate(tf.keras.layers.Layer):\n"
        "    def __init__(self, k, size):\n"
        "        super().__init__()\n"
        "        self.k, self.size = k, size\n"
        "        self.table = tf.Variable([[3.0, 1.0, 2.0]])\n"
        "    def best(self):\n"
        "        return tf.math.top_k(self.table, k=self.k)\n"
        "    def resized(self, image):\n"
        "        return tf.image.resize(image, self.size)\n"
        "gate = Gate(2, (4, 4))\n"
        "values, _ = gate.best()\n"
        "shape = gate.resized(tf.ones((1, 2, 2, 3))).shape"
    )
    assert left == []
    names = executed(text)
    np.testing.assert_array_equal(names["values"], [[3.0, 2.0]])
    assert names["shape"] == (1, 4, 4, 3)
