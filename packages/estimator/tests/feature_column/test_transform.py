"""`features_of`, and properties of all columns."""

import pickle

import numpy as np
import pytest

from replicax_estimator import feature_column as fc

NUMBER = fc.numeric_column("n", shape=2, default_value=1)
AGES = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
IDS = fc.categorical_column_with_identity("i", 10)
WORDS = fc.categorical_column_with_vocabulary_list("w", ["a", "b"])
HASHED = fc.categorical_column_with_hash_bucket("w", 10)
CROSSED = fc.crossed_column([AGES, "w"], 100)
WEIGHTED = fc.weighted_categorical_column(IDS, "f")
INDICATOR = fc.indicator_column(WORDS)
EMBEDDING = fc.embedding_column(HASHED, 4, max_norm=1.0)
COLUMNS = {  # By their names in TensorFlow.
    "n": NUMBER,
    "age_bucketized": AGES,
    "i": IDS,
    "w": WORDS,
    "age_bucketized_X_w": CROSSED,
    "i_weighted_by_f": WEIGHTED,
    "w_indicator": INDICATOR,
    "w_embedding": EMBEDDING,
}
FEATURES = {
    "n": [[1, 2], [3, 4]],
    "age": [3, 30],
    "i": [0, 9],
    "w": ["a", "c"],
    "f": [0.5, 2.0],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_values(name) -> None:
    column = COLUMNS[name]
    assert column.name == name
    arrays = column.transform({key: FEATURES[key] for key in column.keys})
    assert tuple(arrays) == column.outputs
    again = pickle.loads(pickle.dumps(column))
    assert again == column
    assert hash(again) == hash(column)
    assert again.outputs == column.outputs
    with pytest.raises(AttributeError, match="cannot assign"):
        column.key = "y"


def test_shared_hosts_are_transformed_once() -> None:
    arrays = fc.features_of(COLUMNS.values(), FEATURES)
    # The vocabulary column and its indicator share an array; the hash has another.
    assert len(arrays) == 7
    assert set(INDICATOR.outputs) | set(EMBEDDING.outputs) | set(AGES.outputs) <= set(
        arrays
    )
    assert all(array.dtype in (np.float32, np.int32) for array in arrays.values())


def test_names_of_arrays_are_stable() -> None:
    assert IDS.outputs == ("i-ids-7c172b",)
    column = fc.numeric_column("age", normalizer_fn=np.log1p)
    assert column.outputs != fc.numeric_column("age").outputs


def test_columns_that_differ_only_in_a_function_are_refused() -> None:
    columns = [
        fc.numeric_column("n", normalizer_fn=lambda x, by=by: x / by) for by in (2, 3)
    ]
    with pytest.raises(ValueError, match="two columns 'n' differ only in a function"):
        fc.features_of(columns, {"n": [1]})


@pytest.mark.parametrize("name", sorted(set(COLUMNS) - {"n"}))
def test_a_missing_feature_is_named(name) -> None:
    with pytest.raises(ValueError, match=r"there is no feature '.'|'age'") as caught:
        fc.features_of(COLUMNS[name], {"z": [1], "b": [1]})
    assert "got features ['b', 'z']" in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ([], r"one or more feature columns; got \(\)"),
        ({"x": NUMBER}, "one or more feature columns; got .*'x'"),
        ([NUMBER, "x"], "one or more feature columns; got .*'x'"),
    ],
)
def test_wrong_columns(columns, match) -> None:
    with pytest.raises(ValueError, match=match):
        fc.features_of(columns, FEATURES)


def test_wrong_features() -> None:
    with pytest.raises(TypeError, match="must be a dict of arrays by name; got a list"):
        fc.features_of(NUMBER, [1])
    with pytest.raises(ValueError, match="same number of rows"):
        fc.features_of([IDS, AGES], {"i": [1], "age": [1, 2]})
    with pytest.raises(ValueError, match="no feature has a known length"):
        fc.features_of(NUMBER, {})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fc.indicator_column(NUMBER), "must be a CategoricalColumn"),
        (lambda: fc.indicator_column(INDICATOR), "must be a CategoricalColumn"),
        (lambda: fc.embedding_column("x", 3), "must be a CategoricalColumn; got 'x'"),
        (lambda: fc.embedding_column(IDS, 0), "dimension must be an integer"),
        (lambda: fc.embedding_column(IDS, None), "dimension.*got None"),
        (lambda: fc.embedding_column(IDS, 3, "max"), "combiner must be one of 'mean'"),
        (lambda: fc.embedding_column(IDS, 3, max_norm=0), "max_norm must be above 0"),
        (lambda: fc.shared_embeddings([IDS, WORDS], 3), "equal num_buckets; got"),
        (lambda: fc.shared_embeddings([NUMBER], 3), "must be a CategoricalColumn"),
    ],
)
def test_wrong_dense_columns(make, match) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make()
