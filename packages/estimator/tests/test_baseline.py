"""Baseline estimators learn means and frequencies."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_wine
from tests.conftest import mirrored

import replicax as rx

E = rx.estimator


def test_the_mean_of_the_labels(tmp_path) -> None:
    x, y = load_diabetes(return_X_y=True)
    labels = np.stack([y / 100, -y / 50], axis=1)
    w = 1 + (y > 150)
    features = {"x": x, "word": np.array(["a"] * len(y)), "w": w}
    config = E.RunConfig(train_distribute=mirrored(2), eval_distribute=mirrored(2))
    estimator = E.BaselineRegressor(
        tmp_path, label_dimension=2, weight_column="w", optimizer="SGD", config=config
    )
    # A step reads all data, in two batches.
    input_fn = E.numpy_input_fn(features, labels, len(y) // 2, 60, shuffle=False)
    estimator.train(input_fn)
    mean = np.average(labels, axis=0, weights=w)
    bias = estimator.get_variable_value("baseline/bias")
    np.testing.assert_allclose(bias, mean, rtol=1e-4)
    all_once = E.numpy_input_fn(features, labels, 100, shuffle=False)
    results = estimator.evaluate(all_once)
    spread = np.average(((labels - mean) ** 2).mean(1), weights=w)
    assert results["average_loss"] == pytest.approx(spread, rel=1e-4)
    # Of the features only the number of rows counts.
    (predicted,) = estimator.predict(
        lambda: {"word": np.array(["b"] * 3)}, yield_single_examples=False
    )
    np.testing.assert_array_equal(predicted["predictions"], np.tile(bias, (3, 1)))


def test_the_classes_frequencies(tmp_path) -> None:
    x, y = load_wine(return_X_y=True)
    names = np.array(["Barolo", "Grignolino", "Barbera"])
    estimator = E.BaselineClassifier(
        tmp_path, n_classes=3, label_vocabulary=names.tolist()
    )
    estimator.train(lambda: ({"x": x}, names[y]), steps=200)
    shares = np.bincount(y) / len(y)
    predicted = next(estimator.predict(lambda: x))
    np.testing.assert_allclose(predicted["probabilities"], shares, rtol=1e-2)
    assert predicted["classes"].tolist() == [names[shares.argmax()]]
    results = estimator.evaluate(lambda: ({"x": x}, names[y]))
    assert results["accuracy"] == pytest.approx(shares.max())
