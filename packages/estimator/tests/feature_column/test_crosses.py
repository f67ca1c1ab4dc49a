"""Crossed columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax_estimator import feature_column as fc

AGES = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
IDS = fc.categorical_column_with_identity("id", 10)
HASHED = fc.categorical_column_with_hash_bucket("h", 10)


def ids(column, features):
    result = fc.features_of(column, features)[column.outputs[0]]
    assert result.dtype == np.int32
    return result


def test_names_are_sorted_and_inner_crosses_opened() -> None:
    inner = fc.crossed_column(["y", "b"], 10)
    assert inner.name == "b_X_y"
    outer = fc.crossed_column([inner, AGES, "a"], 10)
    assert outer.name == "a_X_age_bucketized_X_b_X_y"
    assert outer.keys == ("y", "b", "age", "a")


def test_all_combinations_of_a_row() -> None:
    column = fc.crossed_column(["x", "y"], 10**9)
    whole = ids(column, {"x": [["a", "b"]], "y": [["c", "d", "e"]]})[0]
    single = [int(ids(column, {"x": [x], "y": [y]})[0, 0]) for x in "ab" for y in "cde"]
    assert whole.tolist() == single
    assert len(set(single)) == 6


def test_combinations_with_a_missing_value_are_left_out() -> None:
    column = fc.crossed_column(["x", IDS], 100)
    result = ids(column, {"x": [["a", ""], ["", ""]], "id": [[1, -1], [1, 2]]})
    assert (result >= 0).tolist() == [[True, False, False, False], [False] * 4]


def test_buckets_are_fixed() -> None:
    """Trained weights are worthless if this fails."""
    column = fc.crossed_column([AGES, "city", "n"], 1000)
    features = {"age": [3, 70], "city": ["Bonn", "Ulm"], "n": [1, 2]}
    assert ids(column, features).tolist() == [[342], [725]]
    seeded = fc.crossed_column([AGES, "city", "n"], 1000, hash_key=1)
    assert ids(seeded, features).tolist() != [[342], [725]]


def test_crossed_columns_are_crossed_by_their_ids() -> None:
    column = fc.crossed_column([AGES, "y"], 10**9)
    young, also_young, old = ids(column, {"age": [3, 5, 70], "y": ["a"] * 3})
    assert young == also_young
    assert young != old


def test_buckets_are_filled_evenly() -> None:
    features = {"x": [np.arange(100)], "y": [np.arange(160)]}
    result = ids(fc.crossed_column(["x", "y"], 16), features)
    counts = np.bincount(result.ravel(), minlength=16)
    assert counts.min() > 850
    assert counts.max() < 1150


words = st.lists(st.text(max_size=4), min_size=4, max_size=4)


@settings(max_examples=30)
@given(x=words, y=words, size=st.integers(1, 10**6))
def test_rows_are_hashed_independently(x, y, size) -> None:
    column = fc.crossed_column(["x", "y"], size)
    whole = ids(column, {"x": np.array(x, object), "y": np.array(y, object)})
    for row in range(4):
        features = {"x": np.array(x[row:][:1], "O"), "y": np.array(y[row:][:1], "O")}
        np.testing.assert_array_equal(ids(column, features)[0], whole[row])
    assert (whole < size).all()


def test_an_empty_batch() -> None:
    features = {"x": np.empty((0, 2), "U1"), "y": np.empty(0, "U1")}
    assert ids(fc.crossed_column(["x", "y"], 10), features).shape == (0, 2)


@pytest.mark.parametrize(
    ("keys", "options", "match"),
    [
        ([], {}, "keys must not be empty"),
        (["x", fc.numeric_column("n")], {}, "Put a numeric column in a bucketized"),
        (["x", HASHED], {}, "got HashedColumn.* give the feature's name"),
        (["x", fc.weighted_categorical_column(IDS, "w")], {}, "got WeightedColumn"),
        (["x", 3], {}, "got 3"),
        (["x", "y"], {"hash_bucket_size": 0}, "hash_bucket_size"),
    ],
)
def test_wrong_crosses(keys, options, match) -> None:
    with pytest.raises(ValueError, match=match):
        fc.crossed_column(keys, **{"hash_bucket_size": 10, **options})


def test_wrong_features() -> None:
    column = fc.crossed_column(["x", "y"], 10)
    with pytest.raises(ValueError, match=r"same number of rows; got \[1, 2\]"):
        ids(column, {"x": ["a"], "y": ["a", "b"]})
    with pytest.raises(TypeError, match=r"strings, or integers .* got dtype float64"):
        ids(column, {"x": [0.5], "y": ["a"]})
