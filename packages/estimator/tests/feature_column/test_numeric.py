"""Numbers as they are, and in buckets."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replicax_estimator import feature_column as fc


def values(column, features):
    return fc.features_of(column, features)[column.outputs[0]]


@pytest.mark.parametrize("raw", [[1, np.nan], [[1], [np.nan]], [True, np.nan]])
def test_numbers_become_float32_of_two_dimensions(raw) -> None:
    output = values(fc.numeric_column("x"), {"x": raw})
    assert output.dtype == np.float32
    np.testing.assert_array_equal(output, [[1], [np.nan]])


def test_several_dimensions_are_kept() -> None:
    raw = np.arange(12).reshape(2, 2, 3)
    column = fc.numeric_column("x", shape=(2, 3))
    np.testing.assert_array_equal(values(column, {"x": raw}), raw)
    flat = fc.DenseFeatures([column])({"x": raw})
    np.testing.assert_array_equal(flat, raw.reshape(2, 6))


def test_default_stands_for_a_missing_feature() -> None:
    column = fc.numeric_column("x", shape=2, default_value=1.5)
    output = values(column, {"other": np.zeros((3, 5))})
    np.testing.assert_array_equal(output, [[1.5, 1.5]] * 3)


@pytest.mark.parametrize(("dtype", "seen"), [("float32", "f4"), ("float64", "f8")])
def test_normalizer_sees_the_dtype_of_the_column(dtype, seen) -> None:
    dtypes = []

    def normalized(x):
        dtypes.append(x.dtype)
        return np.log1p(x)

    column = fc.numeric_column("x", dtype=dtype, normalizer_fn=normalized)
    output = values(column, {"x": np.array([0.0, 1.0])})
    assert dtypes == [np.dtype(seen)]
    np.testing.assert_allclose(output, np.log1p([[0.0], [1.0]]), rtol=1e-6)
    assert output.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"key": 3}, TypeError, "key must be a str; got 3"),
        ({"key": "x", "shape": (0,)}, ValueError, r"size in shape=\(0,\)"),
        ({"key": "x", "dtype": "string"}, TypeError, "dtype must be one of real"),
        ({"key": "x", "dtype": "int9"}, TypeError, "'int9' not understood"),
        ({"key": "x", "default_value": [1, 2]}, TypeError, "must be a Real"),
        ({"key": "x", "normalizer_fn": 2}, TypeError, "normalizer_fn must be"),
    ],
)
def test_wrong_numeric_columns(arguments, error, match) -> None:
    with pytest.raises(error, match=match):
        fc.numeric_column(**arguments)


@pytest.mark.parametrize(
    ("raw", "error", "match"),
    [
        ([[1, 2]], ValueError, r"shape \[B, 1\] or \[B\]; got \[1, 2\]"),
        (3.0, ValueError, r"got \[\]"),
        (["a"], TypeError, "feature 'x' must have numbers; got dtype <U1"),
        ([1j], TypeError, "complex128"),
    ],
)
def test_wrong_numbers(raw, error, match) -> None:
    with pytest.raises(error, match=match):
        values(fc.numeric_column("x"), {"x": raw})


def test_a_normalizer_that_changes_the_shape_is_refused() -> None:
    column = fc.numeric_column("x", normalizer_fn=np.sum)
    with pytest.raises(ValueError, match=r"must keep the shape \[2, 1\]; got \[\]"):
        values(column, {"x": [1, 2]})


def test_buckets_as_documented_by_tensorflow() -> None:
    column = fc.bucketized_column(fc.numeric_column("x", shape=2), [0, 10, 100])
    raw = np.array([[-5, 10000], [150, 10], [5, 100], [0, 99.5]])
    expected = np.array([[0, 3], [3, 2], [1, 3], [1, 2]])
    np.testing.assert_array_equal(
        column.host_ids({"x": raw}), expected + np.array([0, 4])
    )
    dense = fc.DenseFeatures([column])({"x": raw})
    np.testing.assert_array_equal(dense, np.eye(4)[expected].reshape(4, 8))
    assert column.name == "x_bucketized"
    assert (column.num_buckets, column.variable_shape) == (8, (2, 4))


# XLA treats subnormal numbers as zero.
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@settings(max_examples=15)
@given(
    raw=hnp.arrays(np.float32, (6,), elements=finite | st.just(np.nan)),
    edges=st.lists(finite, min_size=3, max_size=3, unique=True).map(sorted),
)
def test_buckets_are_the_same_on_host_and_in_the_program(raw, edges) -> None:
    column = fc.bucketized_column(fc.numeric_column("x"), edges)
    counted = (raw[:, None] >= np.float32(edges)).sum(axis=1)
    expected = np.where(np.isnan(raw), 3, counted)
    np.testing.assert_array_equal(column.host_ids({"x": raw})[:, 0], expected)
    ids, weights = jax.jit(column.ids)(fc.features_of(column, {"x": raw}))
    np.testing.assert_array_equal(ids[:, 0], expected)
    assert weights is None


@pytest.mark.parametrize(
    ("source", "boundaries", "match"),
    [
        (fc.numeric_column("x"), [2, 1], r"ascending order.*\[2.0, 1.0\]"),
        (fc.numeric_column("x"), [1, 1], "each once"),
        (fc.numeric_column("x"), [], "list of numbers|ascending"),
        (fc.numeric_column("x"), [np.nan], "list of numbers"),
        (fc.numeric_column("x"), "ab", "list of numbers"),
        (fc.numeric_column("x", shape=(2, 2)), [1], "one dimension"),
        ("x", [1], "source_column must be a NumericColumn; got 'x'"),
    ],
)
def test_wrong_bucketized_columns(source, boundaries, match) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        fc.bucketized_column(source, boundaries)
