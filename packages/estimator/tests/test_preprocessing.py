"""Saved models of canned estimators, which read and return strings."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import (
    RunConfig,
    build_raw_serving_input_receiver_fn,
    load_saved_model,
    preprocessing,
)
from replicax_estimator import feature_column as fc

# A saved model is another program, in which XLA may order sums differently.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

X = np.arange(12, dtype="float32").reshape(6, 2) / 10
Y = X.sum(axis=1)
RAW = {
    "age": np.array([17, 30, 70, 45], "int64"),
    "city": np.array(["Ulm", "Bonn", "", "Rome"]),
    "tags": np.array([[0, 2], [1, -1], [2, 2], [-1, -1]]),
    "rating": np.array([[0.5, 1], [2, 0], [1, 1], [0, 0]], "float64"),
    "height": np.array([1.5, 1.8, 1.6, 1.7], "float32"),
}
LABELS = np.array(["no", "yes", "yes", "no"])


def logged(height: Any) -> Any:
    return jnp.log(height) * 10


def columns() -> list[Any]:
    ages = fc.bucketized_column(fc.numeric_column("age"), [18, 65])
    city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
    tags = fc.weighted_categorical_column(
        fc.categorical_column_with_identity("tags", np.int64(3)), "rating"
    )
    return [
        ages,
        fc.embedding_column(city, 3),
        fc.indicator_column(tags),
        fc.embedding_column(fc.crossed_column([ages, "city"], 50), 2),
        fc.embedding_column(fc.categorical_column_with_hash_bucket("city", 9), 2),
        fc.numeric_column("height", normalizer_fn=logged),
    ]


def predicted(estimator: Any, features: Any) -> Any:
    return next(estimator.predict(lambda: features, yield_single_examples=False))


def test_a_saved_canned_model_reads_and_returns_strings(tmp_path) -> None:
    # Two columns are named city_embedding.
    estimator = rx.estimator.DNNClassifier(
        [4],
        [c for c in columns() if c.name != "city_embedding"],
        tmp_path / "model",
        label_vocabulary=["no", "yes"],
        config=RunConfig(tf_random_seed=1),
    )
    estimator.train(lambda: (RAW, LABELS), steps=3)
    path = estimator.export_saved_model(
        tmp_path / "export", build_raw_serving_input_receiver_fn(RAW), platforms=["cpu"]
    )
    saved = load_saved_model(path)
    assert str(saved.inputs()["city"]) == "string[b]"
    assert str(saved.outputs()["classes"]) == "string[b, 1]"
    expected = predicted(estimator, RAW)
    for outputs in (saved(RAW), saved({k: v.tolist() for k, v in RAW.items()})):
        assert sorted(outputs) == sorted(expected)
        assert outputs["classes"].tolist() == expected["classes"].tolist()
        assert set(outputs["classes"].ravel()) <= {"no", "yes"}
        # Both programs use JAX's logarithm, compiled differently.
        np.testing.assert_allclose(outputs["logits"], expected["logits"], **CLOSE)
    with pytest.raises(TypeError, match=r"'city' must be string\[b\]; got dtype int64"):
        saved({**RAW, "city": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="ids must be from 0 to num_buckets"):
        saved({**RAW, "tags": RAW["tags"] + 9})


def test_normalizers_of_float64_cannot_be_exported() -> None:
    column = fc.numeric_column("height", dtype="float64", normalizer_fn=np.cbrt)
    with pytest.raises(ValueError, match="which has no float64"):
        preprocessing.preprocessor_config(preprocessing.Preprocessor((column,)))
