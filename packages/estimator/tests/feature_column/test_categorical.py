"""Ids of categories on the host."""

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax_estimator import feature_column as fc

WORDS = ["a", "b", "c"]


def ids(column, raw, **others):
    result = fc.features_of(column, {"x": raw, **others})[column.outputs[0]]
    assert result.dtype == np.int32
    return result.tolist()


def vocabulary(words=WORDS, **options):
    return fc.categorical_column_with_vocabulary_list("x", words, **options)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_identity(dtype) -> None:
    column = fc.categorical_column_with_identity("x", 5)
    assert ids(column, np.array([0, 4], dtype)) == [[0], [4]]
    assert column.name == "x"


def test_missing_ids_stay_missing_and_others_get_the_default() -> None:
    raw = np.array([[1, -1], [-1, -1]])
    assert ids(fc.categorical_column_with_identity("x", 5), raw) == raw.tolist()
    column = fc.categorical_column_with_identity("x", 5, default_value=3)
    assert ids(column, raw) == raw.tolist()
    assert ids(column, [5, -2, 2]) == [[3], [3], [2]]


@pytest.mark.parametrize("value", [5, -2])
def test_identity_out_of_range_without_default(value) -> None:
    column = fc.categorical_column_with_identity("x", 5)
    with pytest.raises(ValueError, match=f"num_buckets - 1 = 4.*got {value}"):
        ids(column, [1, value])


@pytest.mark.parametrize(
    ("raw", "error", "match"),
    [
        (["a"], TypeError, "must fit dtype='int64'; got strings"),
        ([1.0], TypeError, "must have strings, or integers .* got dtype float64"),
        ([True], TypeError, "got dtype bool"),
        (np.zeros((1, 1, 1), int), ValueError, r"\[B\] or \[B, k\]; got \[1, 1, 1\]"),
        (np.array([3, None], object), TypeError, "got 3 in an array"),
        (np.array([2**63], np.uint64), TypeError, "'x' .* fit int64; .* dtype uint64"),
    ],
)
def test_wrong_categories(raw, error, match) -> None:
    with pytest.raises(error, match=match):
        ids(fc.categorical_column_with_identity("x", 5), raw)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: fc.categorical_column_with_identity("x", 0), ValueError, "got 0"),
        (lambda: fc.categorical_column_with_identity(1, 2), TypeError, "key must be"),
        (
            lambda: fc.categorical_column_with_identity("x", 3, 3),
            ValueError,
            "default_value must be an id from 0 to num_buckets - 1 = 2; got 3",
        ),
        (lambda: fc.categorical_column_with_hash_bucket("x", 0), ValueError, "got 0"),
        (lambda: vocabulary([]), ValueError, r"one or more values.*got \(\)"),
        (lambda: vocabulary(["a", "b", "a"]), ValueError, "each once; got .*'b', 'a'"),
        (lambda: vocabulary(["a", 1]), TypeError, "all strings or all integers"),
        (lambda: vocabulary([0.5]), TypeError, "all strings or all integers"),
        (lambda: vocabulary(default_value=3), ValueError, "size 3; got 3"),
        (
            lambda: vocabulary(default_value=0, num_oov_buckets=2),
            ValueError,
            "not both",
        ),
        (lambda: vocabulary(num_oov_buckets=-1), ValueError, "num_oov_buckets"),
    ],
)
def test_wrong_categorical_columns(make, error, match) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "raw",
    [
        ["b", "", "z"],
        [b"b", b"", b"z"],
        np.array(["b", None, "z"], object),
        np.array(["b", float("nan"), b"z"], object),
        np.array([b"b", b"", b"z"], object),
    ],
)
def test_vocabulary_reads_str_bytes_and_objects(raw) -> None:
    assert ids(vocabulary(), raw) == [[1], [-1], [-1]]
    assert ids(vocabulary(default_value=2), raw) == [[1], [-1], [2]]
    assert ids(vocabulary(num_oov_buckets=1), raw) == [[1], [-1], [3]]


def test_vocabulary_of_integers() -> None:
    column = vocabulary([10, 20], num_oov_buckets=3)
    (first,), (missing,), (unknown,) = ids(column, [20, -1, 7])
    assert (first, missing) == (1, -1)
    assert unknown in (2, 3, 4)
    assert column.num_buckets == 5


def test_vocabulary_file(tmp_path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes("grün\r\nblau\nrot\n".encode())
    make = fc.categorical_column_with_vocabulary_file
    assert ids(make("x", path), ["rot", "grün", "?"]) == [[2], [0], [-1]]
    assert ids(make("x", path, 2), ["rot", "blau"]) == [[-1], [1]]
    assert make("x", path) == fc.categorical_column_with_vocabulary_list(
        "x", ["grün", "blau", "rot"]
    )
    with pytest.raises(ValueError, match=r"vocabulary_size=4, but .* has 3 lines"):
        make("x", path, 4)
    with pytest.raises(ValueError, match="invalid literal for int"):
        make("x", path, dtype="int64")
    path.write_text("7\n5\n")
    assert ids(make("x", path, dtype="int64"), [5, 7]) == [[1], [0]]


def test_hash_buckets_are_fixed() -> None:
    """Trained weights are worthless if this fails."""
    column = fc.categorical_column_with_hash_bucket("x", 1000)
    assert ids(column, ["a", "Zürich", "", "42"]) == [[928], [368], [-1], [983]]
    integers = fc.categorical_column_with_hash_bucket("x", 1000, "int64")
    assert ids(integers, [42, -1]) == [[983], [-1]]
    with pytest.raises(TypeError, match="must fit dtype='string'; got integers"):
        ids(column, [1])


texts = st.lists(st.text(string.printable + "éß漢", max_size=8), min_size=1, max_size=9)


@settings(max_examples=25)
@given(words=texts, size=st.integers(1, 2**31 - 1), seed=st.randoms())
def test_a_bucket_depends_on_the_value_alone(words, size, seed) -> None:
    column = fc.categorical_column_with_hash_bucket("x", size)
    result = dict(zip(words, ids(column, np.array(words, object)), strict=True))
    assert all(-1 <= i < size and (i < 0) == (w == "") for w, (i,) in result.items())
    shuffled = list(words)
    seed.shuffle(shuffled)
    assert ids(column, np.array(shuffled, object)) == [result[w] for w in shuffled]


def test_weights() -> None:
    column = fc.weighted_categorical_column(vocabulary(), "w")
    assert column.name == "x_weighted_by_w"
    features = {"x": [["a", "c"], ["b", ""]], "w": [[1, 2.5], [3, 4]]}
    result = fc.features_of(column, features)
    np.testing.assert_array_equal(result[column.outputs[0]], [[0, 2], [1, -1]])
    np.testing.assert_array_equal(result[column.outputs[1]], [[1, 2.5], [3, 4]])
    hot = fc.DenseFeatures(fc.indicator_column(column))(features)
    np.testing.assert_array_equal(hot, [[1, 0, 2.5], [0, 3, 0]])


def test_wrong_weights() -> None:
    with pytest.raises(TypeError, match="column must be a CategoricalColumn"):
        fc.weighted_categorical_column(fc.numeric_column("x"), "w")
    column = fc.weighted_categorical_column(vocabulary(), "w")
    with pytest.raises(ValueError, match=r"feature 'w' must have the shape \[B, 1\]"):
        fc.features_of(column, {"x": ["a", "b"], "w": [[1, 2], [3, 4]]})
