"""Labels and weights on the host, metrics and predictions of heads."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.metrics import average_precision_score
from tests.conftest import mirrored

import replicax as rx
from replicax_estimator import feature_column as fc
from replicax_estimator.preprocessing import Preprocessor

E = rx.estimator
X = fc.numeric_column("x")
WEIGHTS = fc.numeric_column("w")
FEATURES = {"x": np.arange(3.0), "w": np.ones(3)}


def host(**kwargs) -> Preprocessor:
    return Preprocessor(columns=(X,), **kwargs)


def test_labels_are_numbers_for_the_program() -> None:
    def labels(raw, **kwargs):
        predictions = host(**kwargs).prepare(FEATURES, raw)[1]
        assert predictions is not None
        return predictions.dtype.name, predictions.tolist()

    column = [[1.0], [0.0], [1.0]]
    assert labels([1, 0, 1]) == ("float32", column)
    assert labels(np.array([[1.0], [0.0], [1.0]])) == ("float32", column)
    assert labels([True, False, True], n_classes=2) == ("float32", column)
    assert labels([0.5, 0.0, 1.0], n_classes=2)[1] == [[0.5], [0.0], [1.0]]
    assert labels([1, 0, 2], n_classes=3) == ("int32", [[1], [0], [2]])
    words = {"n_classes": 3, "label_vocabulary": ("a", "b", "c")}
    assert labels(np.array(["b", "a", "c"]), **words) == ("int32", [[1], [0], [2]])
    assert labels(np.array([b"b", "a", "c"], object), **words)[1] == [[1], [0], [2]]
    two = {"n_classes": 2, "label_vocabulary": ("a", "b")}
    assert labels(["b", "a", "b"], **two) == ("float32", column)
    pairs = np.arange(6).reshape(3, 2)
    assert labels(pairs, label_dimension=2) == ("float32", pairs.tolist())


WORDS = {"n_classes": 7, "label_vocabulary": tuple("abcdefg")}


@pytest.mark.parametrize(
    ("kwargs", "labels", "error", "message"),
    [
        ({}, [[1, 2]] * 3, ValueError, r"shape \[b, 1\], or .* got \[3, 2\]"),
        ({"label_dimension": 2}, [1, 2, 3], ValueError, r"\[b, 2\], or .*; got \[3\]"),
        ({}, ["a", "b", "c"], TypeError, "must be numbers"),
        ({}, {"y": [1, 2, 3]}, TypeError, "one array; got a dict"),
        ({"n_classes": 2}, [0, 1, 2], ValueError, r"0 to n_classes - 1 = 1; got 2"),
        ({"n_classes": 2}, [0, 1, np.nan], ValueError, "got nan"),
        ({"n_classes": 3}, [0, 1, -1], ValueError, "got -1"),
        ({"n_classes": 3}, [0.0, 1.0, 2.0], TypeError, "must be integers"),
        ({"n_classes": 3}, ["a", "b", "c"], TypeError, "needs label_vocabulary"),
        (WORDS, ["a", "b", "z"], ValueError, r"'z' is not in .* 'd', 'e'\]"),
        (WORDS, [0, 1, 2], ValueError, "0 is not in the label_vocabulary"),
    ],
)
def test_wrong_labels(kwargs, labels, error, message) -> None:
    with pytest.raises(error, match=message):
        host(**kwargs).prepare(FEATURES, labels)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ({"w": np.ones(3)}, ValueError, "there is no feature 'x'"),
        ({"x": np.arange(3)}, ValueError, "there is no feature 'w'"),
        ({"x": np.ones(3), "w": [1, -0.5, 1]}, ValueError, "'w'.*got -0.5"),
        ({"x": np.ones(3), "w": [1, np.nan, 1]}, ValueError, "'w'.*got nan"),
        (np.ones(3), TypeError, "must be a dict"),
    ],
)
def test_wrong_features(features, error, message) -> None:
    with pytest.raises(error, match=message):
        host(weight_column=WEIGHTS).prepare(features, [1, 2, 3])


def test_prediction_needs_no_weights() -> None:
    arrays, labels = host(weight_column=WEIGHTS).prepare({"x": [1.0, 2.0]})
    assert labels is None
    assert list(arrays) == list(X.outputs)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"n_classes": 1}, ValueError, "n_classes must be .* at least 2; got 1"),
        ({"n_classes": 2.0}, ValueError, "n_classes"),
        ({"n_classes": 3, "label_vocabulary": ["a", "b"]}, ValueError, "n_classes=3"),
        ({"label_vocabulary": ["a", "a"]}, ValueError, "different strings; .* 'a'"),
        ({"label_vocabulary": [0, 1]}, ValueError, r"different strings; got \(0"),
        ({"label_dimension": 2}, TypeError, "has no argument 'label_dimension'"),
        ({"optimiser": "SGD"}, TypeError, "Classifier: has no argument 'optimiser'"),
        ({"label_vocabulary": "ab"}, TypeError, "got the string 'ab'"),
        ({"weight_column": 3}, TypeError, "key must be a str; got 3"),
        ({"loss_reduction": "mean"}, ValueError, "loss_reduction must be .*'mean'"),
    ],
)
def test_wrong_arguments(kwargs, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        E.LinearClassifier([X], tmp_path, **kwargs)


def trained(kind, input_fn, *args, **kwargs) -> tuple[E.Estimator, dict[str, float]]:
    """Train and evaluate on one replica; check that 3 replicas return equal results."""
    estimator = kind(*args, **kwargs).train(input_fn)
    results = estimator.evaluate(input_fn)
    config = E.RunConfig(eval_distribute=mirrored(3))
    on_more = kind(*args, config=config, **kwargs).evaluate(input_fn)
    # The order of float32 sums differs.
    assert on_more == pytest.approx(results, rel=2e-6)
    return estimator, results


def weighted(x, labels, weights):
    features = {"x": x, "w": weights}
    # 7 batches of 16 and one of 8, which 3 replicas do not divide.
    return E.numpy_input_fn(features, labels, 16, shuffle=False), features


def mean_over_batches(losses, reduce=np.mean):
    return np.mean([reduce(losses[i : i + 16]) for i in range(0, 120, 16)])


def roc_of(labels, scores, weights) -> float:
    """The area under the curve of TF's 200 thresholds, two of them outside [0, 1]."""
    thresholds = np.concatenate([[-1e-7], np.arange(1, 199) / 199, [1 + 1e-7]])
    is_above = scores[None] > thresholds[:, None]
    rates = [
        (is_above * weights * (labels == i)).sum(1) / (weights * (labels == i)).sum()
        for i in (0, 1)
    ]
    return float(-np.trapezoid(rates[1], rates[0]))


@pytest.mark.slow
def test_two_classes(tmp_path) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0))[:120, :2].astype("float32")
    y = y[:120]
    w = np.random.default_rng(0).uniform(0, 3, 120).round(2)
    words = np.array(["bad", "good"])
    input_fn, features = weighted(x, words[y], w)
    estimator, results = trained(
        E.LinearClassifier,
        input_fn,
        [fc.numeric_column("x", 2)],
        tmp_path,
        weight_column="w",
        label_vocabulary=words.tolist(),
    )

    del features["w"]
    rows = list(estimator.predict(lambda: features))
    predictions = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    p = predictions["logistic"][:, 0]
    assert all(array.shape[0] == 120 for array in predictions.values())
    guess = (p > 0.5).astype(int)
    np.testing.assert_array_equal(predictions["class_ids"][:, 0], guess)
    np.testing.assert_array_equal(predictions["classes"][:, 0], words[guess])
    np.testing.assert_array_equal(predictions["all_classes"], np.tile(words, (120, 1)))
    np.testing.assert_array_equal(predictions["all_class_ids"][5], [0, 1])
    np.testing.assert_allclose(
        predictions["probabilities"], np.stack([1 - p, p], 1), 1e-5
    )
    np.testing.assert_allclose(
        predictions["logits"][:, 0], np.log(p / (1 - p)), rtol=1e-4, atol=1e-6
    )

    hit = (guess == 1) & (y == 1)
    mean = np.average(y, weights=w)
    losses = -np.log(np.where(y == 1, p, 1 - p))
    expected = {
        "accuracy": np.average(guess == y, weights=w),
        "accuracy_baseline": max(mean, 1 - mean),
        "auc": roc_of(y, p, w),
        "average_loss": np.average(losses, weights=w),
        "label/mean": mean,
        "loss": mean_over_batches(losses * w),
        "precision": (hit * w).sum() / (guess * w).sum(),
        "prediction/mean": np.average(p, weights=w),
        "recall": (hit * w).sum() / (y * w).sum(),
        "global_step": 8,
    }
    # Keras interpolates between 200 thresholds; scikit-learn's curve has steps.
    pr = average_precision_score(y, p, sample_weight=w)
    assert results.pop("auc_precision_recall") == pytest.approx(pr, abs=0.01)
    # Sums of 120 numbers in float32.
    assert results == pytest.approx(expected, rel=1e-5)


def test_more_classes(tmp_path) -> None:
    x, y = load_wine(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(y))[:120]
    x = ((x - x.mean(0)) / x.std(0))[order][:, :3].astype("float32")
    y = y[order]
    w = np.random.default_rng(0).uniform(0, 3, 120).round(2)
    input_fn, features = weighted(x, y, w)
    estimator, results = trained(
        E.LinearClassifier,
        input_fn,
        [fc.numeric_column("x", 3)],
        tmp_path,
        n_classes=3,
        weight_column="w",
    )
    (predictions,) = estimator.predict(lambda: features, yield_single_examples=False)
    p = predictions["probabilities"]
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)
    guess = p.argmax(1)
    assert set(guess) == {0, 1, 2}
    np.testing.assert_array_equal(predictions["class_ids"], guess[:, None])
    np.testing.assert_array_equal(predictions["classes"], guess[:, None].astype(str))
    assert predictions["all_classes"].tolist() == [["0", "1", "2"]] * 120
    losses = -np.log(p[np.arange(120), y])
    expected = {
        "accuracy": np.average(guess == y, weights=w),
        "average_loss": np.average(losses, weights=w),
        "loss": mean_over_batches(losses * w),
        "global_step": 8,
    }
    assert results == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow(but=["SUM"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "SUM"])
def test_regression_of_several_numbers(reduction, tmp_path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2)).astype("float32")
    y = x @ [[1.0, 2, 3], [0, 1, 0]] + 0.5
    w = rng.uniform(0, 3, 120).round(2)
    input_fn, features = weighted(x, y, w)
    estimator, results = trained(
        E.LinearRegressor,
        input_fn,
        [fc.numeric_column("x", 2)],
        tmp_path,
        label_dimension=3,
        weight_column="w",
        loss_reduction=reduction,
    )
    rows = list(estimator.predict(lambda: features, predict_keys=["predictions"]))
    predictions = np.stack([row["predictions"] for row in rows])
    assert predictions.shape == (120, 3)
    squares = (predictions - y) ** 2
    reduce = np.sum if reduction == "SUM" else np.mean
    expected = {
        "average_loss": np.average(squares.mean(1), weights=w),
        "label/mean": np.average(y.mean(1), weights=w),
        "loss": mean_over_batches(squares * w[:, None], reduce),
        "prediction/mean": np.average(predictions.mean(1), weights=w),
        "global_step": 8,
    }
    assert results == pytest.approx(expected, rel=1e-5)
