import grain
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.input.grain_datasets import (
    class_weighted,
    next_epoch,
    numpy_dataset,
    reshuffled,
    windows,
)

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10)


def test_elements_are_single_examples():
    dataset = numpy_dataset({"x": X, "y": (Y,)})
    assert isinstance(dataset, grain.MapDataset)
    assert len(dataset) == 10
    for index, element in enumerate(dataset):
        np.testing.assert_array_equal(element["x"], X[index])
        assert element["y"][0] == index


def test_rows_of_arrays_of_jax_are_arrays_of_numpy() -> None:
    dataset = numpy_dataset({"x": jnp.asarray(X), "y": Y}).map(lambda row: row["x"])
    assert {type(row) for row in dataset} == {np.ndarray}
    np.testing.assert_array_equal(list(dataset), X)


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_epoch_is_shuffled_anew(is_stream: bool) -> None:
    rows = numpy_dataset(Y).shuffle(seed=0)
    dataset = rows.to_iter_dataset() if is_stream else rows
    epochs = [[int(y) for y in next_epoch(dataset)] for _ in range(3)]
    assert epochs[0] == [int(y) for y in rows]
    assert len(set(map(tuple, epochs))) == 3
    assert [sorted(epoch) for epoch in epochs] == [Y.tolist()] * 3


def test_datasets_of_one_shuffled_dataset_count_their_epochs_together() -> None:
    dataset = numpy_dataset(Y).shuffle(seed=0)
    parts = [[int(y) for y in next_epoch(dataset[:4])] for _ in range(3)]
    assert len(set(map(tuple, parts))) == 3
    assert [int(y) for y in next_epoch(numpy_dataset(Y))] == Y.tolist()
    assert next_epoch(parts) is parts


@pytest.mark.parametrize("of_columns", [False, True])
def test_rows_of_pandas_are_indexed_by_position(of_columns: bool) -> None:
    """As after `train_test_split`: labels are not positions."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    index = np.array([2, 0, 1])
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}, index=index)
    x = dict(frame) if of_columns else frame
    rows = list(numpy_dataset((x, pd.Series([7, 8, 9], index=index))))
    assert [int(y) for _, y in rows] == [7, 8, 9]
    result = [list(x.values()) if of_columns else x.tolist() for x, _ in rows]
    assert result == [[1, 4], [2, 5], [3, 6]]


def test_lists_of_numbers_and_strings_are_arrays() -> None:
    lists = {"a": [1, 2], "b": [0.5, 1], "c": [True, False], "d": ["u", "v"]}
    second = numpy_dataset((dict(lists), X[:2]))[1][0]
    assert second == {"a": 2, "b": 1.0, "c": False, "d": "v"}
    kinds = [second[key].dtype.str[1:] for key in "abcd"]
    assert kinds == ["i4", "f4", "b1", "U1"]


@pytest.mark.parametrize("is_batched", [False, True])
def test_random_maps_of_streams_draw_anew_in_each_iteration(is_batched: bool) -> None:
    stream = grain.MapDataset.range(8).to_iter_dataset()
    stream = stream.random_map(lambda x, rng: x + rng.random(), seed=3)
    stream = stream.batch(2) if is_batched else stream

    def read(iteration: int) -> list[float]:
        return np.ravel(list(reshuffled(stream, iteration))).tolist()

    assert read(0) == np.ravel(list(stream)).tolist()
    assert read(1) == read(1)
    assert not set(read(0)) & set(read(1))
    assert not set(read(1)) & set(read(2))
    assert np.floor(read(2)).tolist() == [*range(8)]


@pytest.mark.parametrize(
    "labels", [[0, 2, 1, 2], [[0], [2], [1], [2]], np.eye(3)[[0, 2, 1, 2]]]
)
def test_class_weights_are_those_of_the_labels(labels: object) -> None:
    x, y = np.zeros((4, 2)), np.asarray(labels)
    weights = {0: 0.5, 1: 2.0, 2: 3.0}
    (batch,) = class_weighted(numpy_dataset((x, y)).batch(4), weights)
    np.testing.assert_array_equal(batch[1], y)
    assert batch[2].tolist() == [0.5, 3.0, 2.0, 3.0]
    (batch,) = class_weighted(numpy_dataset((x, y, np.arange(4))).batch(4), weights)
    assert batch[2].tolist() == [0.0, 3.0, 4.0, 9.0]


def test_a_class_without_a_weight_is_an_error() -> None:
    dataset = class_weighted(numpy_dataset((X, Y)).batch(4), {0: 1.0, 1: 1.0, 3: 1.0})
    with pytest.raises(ValueError, match="class 2 has no weight"):
        list(dataset)


@pytest.mark.parametrize(
    ("size", "shift", "first"), [(3, 1, [*range(8)]), (4, 3, [0, 3, 6]), (10, 2, [0])]
)
def test_windows_have_neighbouring_examples(
    size: int, shift: int, first: list[int]
) -> None:
    pairs = numpy_dataset({"a": np.arange(10), "b": np.ones((10, 2))})
    result = list(windows(pairs, size, shift))
    expected = [[*range(i, i + size)] for i in first]
    assert [window["a"].tolist() for window in result] == expected
    assert {window["b"].shape for window in result} == {(size, 2)}


@pytest.mark.parametrize(("size", "shift"), [(0, 1), (5, 1), (2, 0)])
def test_windows_that_do_not_fit_are_an_error(size: int, shift: int) -> None:
    with pytest.raises(ValueError, match=f"size={size} and shift={shift} for"):
        windows(numpy_dataset(np.arange(4)), size, shift)
