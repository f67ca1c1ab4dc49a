"""Keras models as estimators: inputs and labels in all forms of TF."""

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import RunConfig, model_to_estimator

A = np.array([[0.0], [1.0], [2.0], [3.0]], "float32")
B = A[::-1].copy()
SUM, DIFFERENCE = A + B, A - B
WEIGHTS = np.array([0.0, 0.5, 1.0, 2.0], "float32")


def two_by_two() -> keras.Model:
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    both = keras.layers.concatenate([a, b])
    outputs = [
        keras.layers.Dense(1, kernel_initializer="ones", name=name)(both)
        for name in ("sum", "difference")
    ]
    model = keras.Model([a, b], outputs)
    model.compile("sgd", {"sum": "mae", "difference": "mse"})
    return model


def expected(model: Any, weights: Any = None) -> float:
    return model.test_on_batch([A, B], [SUM, DIFFERENCE], weights)[0]


def same_weights(folder: Path, model: Any, batch: Any, **config: Any) -> Any:
    """Train a step with a learning rate of 0; return the estimator."""
    model.optimizer.learning_rate = 0.0
    estimator = model_to_estimator(model, config=RunConfig(folder, **config))
    return estimator.train(lambda: batch, steps=1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_inputs_and_labels_in_lists_and_dicts(tmp_path: Path, replicas: int) -> None:
    model = two_by_two()
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    labels = {"difference": DIFFERENCE, "sum": SUM}
    estimator = same_weights(
        tmp_path, model, ([A, B], labels), train_distribute=strategy
    )
    batches: list[Any] = [
        ([A, B], [SUM, DIFFERENCE]),
        ((A, B), labels),
        ({"b": B, "a": A}, (SUM, DIFFERENCE)),
    ]
    for batch in batches:
        result = estimator.evaluate(lambda batch=batch: batch)
        assert result["loss"] == pytest.approx(expected(model), rel=1e-5)
    predicted = next(estimator.predict(lambda: {"a": A, "b": B}))
    assert predicted["sum"] == pytest.approx(SUM[0])


def test_weights_of_the_examples(tmp_path: Path) -> None:
    model = two_by_two()
    features = {"features": (A, B), "sample_weights": (WEIGHTS, WEIGHTS)}
    batch = features, (SUM, DIFFERENCE)
    estimator = same_weights(tmp_path, model, batch)
    weighted = expected(model, [WEIGHTS, WEIGHTS])
    assert weighted != pytest.approx(expected(model), rel=1e-2)
    result = estimator.evaluate(lambda: batch)
    assert result["loss"] == pytest.approx(weighted, rel=1e-5)


def test_labels_of_other_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"outputs \['sum', 'difference'\]; got .*'x'"):
        same_weights(tmp_path, two_by_two(), ((A, B), {"x": A, "sum": SUM}))


def test_an_untrained_estimator_has_the_keras_weights(tmp_path: Path) -> None:
    model = two_by_two()
    model.layers[-1].kernel.assign([[2.0], [3.0]])
    estimator = model_to_estimator(model, model_dir=tmp_path / "model")

    def input_fn() -> Any:
        return (A, B), (SUM, DIFFERENCE)

    def check(step: int) -> None:
        result = estimator.evaluate(input_fn)
        assert result["global_step"] == step
        assert (result["loss"] == pytest.approx(expected(model), rel=1e-5)) != step
        predicted = next(estimator.predict(input_fn))["difference"]
        assert (predicted == pytest.approx(2 * A[0] + 3 * B[0])) != step

    check(0)
    receiver_fn = rx.estimator.export.build_raw_serving_input_receiver_fn(
        {"a": A, "b": B}
    )
    estimator.export_saved_model(tmp_path / "saved", receiver_fn, platforms=["cpu"])
    saved = rx.estimator.load_saved_model(tmp_path / "saved")
    assert saved({"a": A, "b": B})["difference"] == pytest.approx(2 * A + 3 * B)
    estimator.train(input_fn, steps=1)
    check(1)
    shutil.rmtree(tmp_path / "model")
    check(0)


def test_an_untrained_estimator_has_the_warm_start_weights(tmp_path: Path) -> None:
    columns = [rx.feature_column.numeric_column("x")]

    def input_fn() -> Any:
        return {"x": A}, SUM

    first = rx.estimator.LinearRegressor(columns, tmp_path / "first")
    loss = first.train(input_fn, steps=3).evaluate(input_fn)["loss"]
    second = rx.estimator.LinearRegressor(
        columns, tmp_path / "second", warm_start_from=tmp_path / "first"
    )
    assert second.evaluate(input_fn)["loss"] == pytest.approx(loss)
    assert second.evaluate(input_fn)["global_step"] == 0
