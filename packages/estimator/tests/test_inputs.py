"""Input functions over arrays and data frames."""

import random

import numpy as np
import pytest

import replicax as rx

E = rx.estimator


def test_batches_may_span_epochs_and_the_last_is_short() -> None:
    x = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
    input_fn = E.numpy_input_fn(x, np.arange(5) * 10, 3, num_epochs=2, shuffle=False)
    batches = list(input_fn())
    assert [features["a"].tolist() for features, _ in batches] == [
        [0, 1, 2],
        [3, 4, 0],
        [1, 2, 3],
        [4],
    ]
    assert [labels.tolist() for _, labels in batches][1] == [30, 40, 0]
    assert batches[1][0]["b"].tolist() == [[6, 7], [8, 9], [0, 1]]
    assert len(list(input_fn())) == 4  # Each call starts again.
    batches = E.numpy_input_fn(np.arange(2), None, 5, None, shuffle=False)()
    assert [next(batches).tolist() for _ in range(2)] == [
        [0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_the_seed_determines_the_order_of_each_epoch() -> None:
    def order(seed):
        input_fn = E.numpy_input_fn(np.arange(50), None, 50, 3, True, seed)
        return [batch.tolist() for batch in input_fn()]

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    assert len({tuple(epoch) for epoch in first}) == 3
    assert all(sorted(epoch) == list(range(50)) for epoch in first)


def test_without_a_seed_pythons_random_state_determines_the_order() -> None:
    input_fn = E.numpy_input_fn(np.arange(50), None, 50, shuffle=True)
    random.seed(3)
    first, second = (next(iter(input_fn())).tolist() for _ in range(2))
    random.seed(3)
    assert next(iter(input_fn())).tolist() == first != second


def test_dicts_of_labels_and_strings() -> None:
    input_fn = E.numpy_input_fn(
        {"word": ["a", "b"]}, {"y": [1, 2], "z": ["p", "q"]}, 2, shuffle=False
    )
    features, labels = next(iter(input_fn()))
    assert features["word"].tolist() == ["a", "b"]
    assert labels["z"].tolist() == ["p", "q"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "shuffle must be True or False; got None"),
        ({"shuffle": 1}, ValueError, "shuffle must be"),
        ({"shuffle": False, "batch_size": 0}, ValueError, "batch_size must be"),
        ({"shuffle": False, "num_epochs": 0}, ValueError, "num_epochs must be"),
        ({"shuffle": False, "y": np.arange(4)}, ValueError, r"got \[3, 4\]"),
        ({"shuffle": False, "y": 4.0}, ValueError, r"got \[3, 0\]"),
        ({"shuffle": False, "x": {}}, ValueError, "at least one"),
        ({"shuffle": False, "x": {"a": []}}, ValueError, "at least one"),
    ],
)
def test_errors(arguments, error, message) -> None:
    arguments = {"x": {"a": np.arange(3)}} | arguments
    with pytest.raises(error, match=message):
        E.numpy_input_fn(**arguments)


def test_data_frames() -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame({"age": [20, 30, 40], "city": ["Ulm", "Bonn", None]})
    y = pd.Series([1.0, 2.0, 3.0])
    features, labels = next(iter(E.pandas_input_fn(frame, y, 2, shuffle=False)()))
    assert features["age"].tolist() == [20, 30]
    assert features["city"].tolist() == ["Ulm", "Bonn"]
    assert labels.tolist() == [1.0, 2.0]
    two = pd.DataFrame({"p": [1, 2, 3], "q": [4, 5, 6]})
    _, labels = next(iter(E.pandas_input_fn(frame, two, 3, shuffle=False)()))
    assert labels["q"].tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="the same index"):
        E.pandas_input_fn(frame, y.set_axis([1, 2, 3]), shuffle=False)
    with pytest.raises(ValueError, match="shuffle must be"):
        E.pandas_input_fn(frame, y)
