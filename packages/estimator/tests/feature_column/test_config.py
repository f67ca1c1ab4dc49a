"""Columns as JSON, and back."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax_estimator import feature_column as fc
from replicax_estimator.feature_column.config import from_config, to_config

SETTINGS = settings(max_examples=30)

KEYS = st.text(max_size=5)
SIZES = st.integers(1, 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(), max_size=6)  # Also lone surrogates.


@st.composite
def numeric(draw, **limits):
    shape = draw(st.lists(st.integers(1, 3), max_size=2, **limits))
    number = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), FLOATS)
    default = draw(st.one_of(st.none(), number))
    dtype = draw(st.sampled_from(["float32", "float64", "int64"]))
    return fc.numeric_column(draw(KEYS), shape, default, dtype)


@st.composite
def bucketized(draw):
    edges = sorted(draw(st.sets(FLOATS, min_size=1, max_size=4)))
    size = draw(st.integers(1, 3))
    return fc.bucketized_column(fc.numeric_column(draw(KEYS), size), edges)


@st.composite
def identity(draw):
    size = draw(SIZES)
    default = draw(st.one_of(st.none(), st.integers(0, size - 1)))
    return fc.categorical_column_with_identity(draw(KEYS), size, default)


@st.composite
def vocabulary(draw):
    word = draw(st.sampled_from([TEXTS, st.integers(-(2**63), 2**63 - 1)]))
    words = draw(st.lists(word, min_size=1, max_size=5, unique=True))
    options = draw(
        st.one_of(
            st.builds(lambda n: {"num_oov_buckets": n}, st.integers(0, 9)),
            st.builds(lambda n: {"default_value": n}, st.integers(-1, len(words) - 1)),
        )
    )
    return fc.categorical_column_with_vocabulary_list(draw(KEYS), words, **options)


HASHED = st.builds(
    fc.categorical_column_with_hash_bucket,
    KEYS,
    SIZES,
    st.sampled_from(["string", "int32", "int64"]),
)
CROSSABLE = st.one_of(KEYS, bucketized(), identity(), vocabulary())
CROSSED = st.recursive(
    CROSSABLE,
    lambda leaf: st.builds(
        fc.crossed_column,
        st.lists(leaf, min_size=2, max_size=3),
        st.integers(1, 99),
        st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    ),
    max_leaves=4,
).filter(lambda column: not isinstance(column, str))
CATEGORICAL = st.one_of(identity(), vocabulary(), HASHED, bucketized(), CROSSED)
WEIGHTED = st.builds(fc.weighted_categorical_column, CATEGORICAL, KEYS)
COLUMNS = st.one_of(numeric(), CATEGORICAL, WEIGHTED)


@SETTINGS
@given(COLUMNS)
def test_columns_survive_json(column) -> None:
    again = from_config(json.loads(json.dumps(to_config(column))))
    assert again == column
    assert type(again) is type(column)
    assert repr(again) == repr(column)  # True is not 1, and -0.0 not 0.0.
    assert again.outputs == column.outputs


@pytest.mark.parametrize(
    "column",
    [
        fc.numeric_column("x", 2, math.nan),
        fc.numeric_column("x", 2, -math.inf),
        fc.categorical_column_with_identity("x", np.int64(7)),
    ],
    ids=["nan", "infinity", "numpy"],
)
def test_special_numbers_survive_json(column) -> None:
    again = from_config(json.loads(json.dumps(to_config(column))))
    assert repr(again).replace("np.int64(7)", "7") == repr(column).replace(
        "np.int64(7)", "7"
    )


@pytest.mark.parametrize(
    "column",
    [
        fc.numeric_column("x", normalizer_fn=np.log1p),
        fc.bucketized_column(fc.numeric_column("x", normalizer_fn=np.log1p), [1]),
    ],
    ids=["numeric", "bucketized"],
)
def test_functions_are_refused(column) -> None:
    with pytest.raises(ValueError, match=r"feature column 'x.*' contains the function"):
        to_config(column)
