"""Columns in Keras layers, against NumPy."""

import jax
import keras
import numpy as np
import pytest

from replicax_estimator import feature_column as fc

AGE = fc.numeric_column("age")
AGES = fc.bucketized_column(AGE, [18, 65])
TAGS = fc.categorical_column_with_vocabulary_list("tags", ["a", "b", "c", "d"])
RATED = fc.weighted_categorical_column(TAGS, "w")
FEATURES = {
    "age": np.array([10.0, 40.0, 70.0]),
    "tags": np.array([["a", "c"], ["d", ""], ["", ""]]),
    "w": np.array([[0.5, 2.0], [-1.0, 3.0], [1.0, 1.0]]),
}
TAG_IDS = np.array([[0, 2], [3, -1], [-1, -1]])
TABLE = np.arange(8.0, dtype="float32").reshape(4, 2) + 1


def table_of(shape, dtype=None):
    del shape
    return keras.ops.convert_to_tensor(TABLE, dtype)


def combine(weights, combiner):
    """By hand, row by row."""
    rows = []
    for ids, factors in zip(TAG_IDS, weights, strict=True):
        used = [
            (TABLE[i], w)
            for i, w in zip(ids, factors, strict=True)
            if i >= 0 and (w > 0 or combiner == "sum")
        ]
        total = sum((v * w for v, w in used), np.zeros(2))
        ws = np.array([w for _, w in used])
        divisor = {
            "sum": 1.0,
            "mean": ws.sum(),
            "sqrtn": np.sqrt((ws**2).sum()),
        }[combiner]
        rows.append(total / divisor if used else total)
    return np.array(rows)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_embeddings(combiner, is_weighted) -> None:
    source = RATED if is_weighted else TAGS
    column = fc.embedding_column(source, 2, combiner, initializer=table_of)
    weights = FEATURES["w"] if is_weighted else np.ones((3, 2))
    output = fc.DenseFeatures(column)(FEATURES)
    np.testing.assert_allclose(output, combine(weights, combiner), rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_linear_model_of_categories(combiner, is_weighted) -> None:
    layer = fc.LinearModel(
        RATED if is_weighted else TAGS, units=2, sparse_combiner=combiner
    )
    assert not np.any(layer(FEATURES))
    layer.variables[1].assign(TABLE)
    layer.variables[0].assign([10, 20])
    weights = FEATURES["w"] if is_weighted else np.ones((3, 2))
    expected = combine(weights, combiner) + np.array([10, 20])
    np.testing.assert_allclose(layer(FEATURES), expected, rtol=1e-6)


def test_max_norm_clips_vectors() -> None:
    column = fc.embedding_column(TAGS, 2, "sum", initializer=table_of, max_norm=4)
    output = np.asarray(fc.DenseFeatures(column)(FEATURES))
    short = TABLE * np.minimum(1, 4 / np.linalg.norm(TABLE, axis=1, keepdims=True))
    expected = [short[0] + short[2], short[3], np.zeros(2)]
    np.testing.assert_allclose(output, expected, rtol=1e-6)
    zeros = fc.embedding_column(TAGS, 2, initializer="zeros", max_norm=4)
    layer = fc.DenseFeatures(zeros)
    (gradient,) = gradients(layer, fc.features_of(zeros, FEATURES))
    assert np.isfinite(gradient).all()
    assert gradient.any()


def gradients(layer, features):
    """Gradients of the sum of the layer's output."""
    layer(features)

    def loss(values):
        output, _ = layer.stateless_call(values, [], features)
        return output.sum()

    return jax.jit(jax.grad(loss))([v.value for v in layer.trainable_variables])


def test_gradients_flow_to_rows_that_were_used() -> None:
    column = fc.embedding_column(TAGS, 2, "sum")
    layer = fc.DenseFeatures([column, AGE])
    features = fc.features_of([column, AGE], FEATURES)
    (gradient,) = gradients(layer, features)
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [1, 1], [1, 1]])
    frozen = fc.DenseFeatures(fc.embedding_column(TAGS, 2, trainable=False))
    frozen(features)
    assert frozen.trainable_variables == []


def test_columns_come_in_the_order_of_their_names() -> None:
    columns = [fc.indicator_column(TAGS), AGES, AGE]
    output = fc.DenseFeatures(columns)(FEATURES)
    np.testing.assert_array_equal(output, fc.DenseFeatures(columns[::-1])(FEATURES))
    hot = np.zeros((3, 4))
    hot[[0, 0, 1], [0, 2, 3]] = 1
    expected = np.hstack([FEATURES["age"][:, None], np.eye(3), hot])
    np.testing.assert_array_equal(output, expected)


def test_shared_embeddings_have_one_table() -> None:
    others = fc.categorical_column_with_identity("i", 4)
    columns = fc.shared_embeddings([TAGS, others], 2, initializer=table_of)
    layer = fc.DenseFeatures(columns)
    output = layer({**FEATURES, "i": [3, 1, 0]})
    assert len(layer.variables) == 1
    assert "i_tags_shared_embedding" in layer.variables[0].path
    # In the order of names: i, tags.
    expected = np.hstack([TABLE[[3, 1, 0]], combine(np.ones((3, 2)), "mean")])
    np.testing.assert_allclose(output, expected)


def test_tables_of_one_name_must_agree() -> None:
    others = fc.categorical_column_with_identity("i", 4)
    columns = [
        *fc.shared_embeddings([TAGS], 2, shared_embedding_collection_name="s"),
        *fc.shared_embeddings([others], 3, shared_embedding_collection_name="s"),
    ]
    with pytest.raises(ValueError, match=r"share the table 's' must agree.*got \(4, 3"):
        fc.DenseFeatures(columns)({**FEATURES, "i": [3, 1, 0]})


def test_variables_have_the_names_of_columns() -> None:
    slashed = fc.categorical_column_with_identity("user/kind", 4)
    dense = fc.DenseFeatures(fc.embedding_column(slashed, 2), name="deep")
    wide = fc.LinearModel([slashed, AGES, fc.indicator_column(TAGS)], name="wide")
    features = {**FEATURES, "user/kind": [0, 1, 2]}
    dense(features)
    wide(features)
    assert [v.path for v in dense.variables] == [
        "deep/deep_user_kind_embedding/embeddings"
    ]
    assert [v.path for v in wide.variables] == [
        "wide/bias_weights",
        "wide/age_bucketized/weights",
        "wide/tags_indicator/weights",
        "wide/user_kind/weights",
    ]
    assert [v.shape for v in wide.variables] == [(1,), (3, 1), (4, 1), (4, 1)]


def test_raw_and_transformed_features_give_the_same() -> None:
    columns = [AGE, AGES, fc.indicator_column(RATED)]
    layer = fc.DenseFeatures(columns)
    np.testing.assert_array_equal(
        layer(FEATURES), layer(fc.features_of(columns, FEATURES))
    )
    np.testing.assert_array_equal(layer(FEATURES), fc.input_layer(FEATURES, columns))


def test_raw_numbers_may_be_traced() -> None:
    columns = [
        fc.numeric_column("age", normalizer_fn=lambda x: x / 100),
        AGES,
        fc.numeric_column("none", default_value=7),
    ]
    raw = {"age": FEATURES["age"]}
    output = jax.jit(lambda features: fc.DenseFeatures(columns)(features))(raw)
    np.testing.assert_allclose(output, fc.DenseFeatures(columns)(raw), rtol=1e-6)


def test_raw_categories_may_not_be_traced() -> None:
    layer = fc.LinearModel(fc.categorical_column_with_identity("i", 3))
    with pytest.raises(TypeError, match="looked up on the host"):
        jax.jit(lambda x: layer({"i": x}))(np.array([1]))


def test_layers_in_a_functional_model() -> None:
    inputs = {"age": keras.Input((1,), name="age")}
    output = keras.layers.Dense(1)(fc.DenseFeatures([AGE, AGES])(inputs))
    model = keras.Model(inputs, output)
    assert model.predict({"age": FEATURES["age"]}, verbose=0).shape == (3, 1)


def test_mixed_precision_does_not_touch_boundaries() -> None:
    exact = fc.bucketized_column(AGE, [1.0, 1.0001])
    layer = fc.DenseFeatures([exact], dtype="mixed_bfloat16")
    output = layer({"age": [1.00005]})
    assert output.dtype == "bfloat16"
    np.testing.assert_array_equal(np.asarray(output, "float32"), [[0, 1, 0]])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fc.DenseFeatures([]), "one or more feature columns"),
        (lambda: fc.DenseFeatures([TAGS]), "indicator_column or embedding_column"),
        (lambda: fc.DenseFeatures([AGE, AGE]), "names; got .'age', 'age'"),
        (lambda: fc.LinearModel([AGE], units=0), "units must be an integer"),
        (lambda: fc.LinearModel([AGE], sparse_combiner="max"), "sparse_combiner must"),
    ],
)
def test_wrong_layers(make, match) -> None:
    with pytest.raises(ValueError, match=match):
        make()
