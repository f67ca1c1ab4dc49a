"""Logs that a model computes from metrics cover all replicas."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.conftest import mirrored
from tests.strategies.parity import STRATEGIES

import replicax as rx

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(24, 6)).astype("float32")
Y = (_RNG.random((24, 1)) > 0.7).astype("float32")
WEIGHTS = _RNG.uniform(0.1, 3.0, 24).astype("float32")


class Logs(keras.Model):
    """Logs functions of metrics, and a metric by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1, activation="sigmoid")
        self.precision = keras.metrics.Precision(name="precision")
        self.recall = keras.metrics.Recall(name="recall")
        self.area = keras.metrics.AUC(name="area")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def more(self, y: Any, y_pred: Any) -> Any:
        self.area.update_state(y, y_pred)
        self.precision.update_state(y, y_pred)
        self.recall.update_state(y, y_pred)
        precision, recall = self.precision.result(), self.recall.result()
        return {
            "f1": 2 * precision * recall / (precision + recall + 1e-6),
            "auc": self.area.result(),
        }


class InMetrics(Logs):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        logs["perplexity"] = ops.exp(5 * logs["loss"])
        return logs | self.more(y, y_pred)


class InSteps(Logs):
    """Steps with a tape; one result is read before the metric is updated."""

    def train_step(self, data: Any) -> Any:
        x, y, weights = data
        with rx.GradientTape() as tape:
            y_pred = self(x)
            loss = self.compute_loss(x, y, y_pred, weights)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"before": self.area.result(), **self.more(y, y_pred)}

    def test_step(self, data: Any) -> Any:
        x, y, _ = data
        return {"before": self.area.result(), **self.more(y, self(x))}


class OfTheBatch(Logs):
    """Logs a number of the batch by the name of a metric, beside another one."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        super().compute_metrics(x, y, y_pred, sample_weight)
        return {"loss": ops.mean(y_pred), "twice": 2 * ops.mean(y_pred)}


def logs_of(kind: type[Logs], strategy: rx.Strategy | None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind()
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy"], **options)
    # Several replicas share the last batches, of 12 and of 6, whose logs are kept.
    history = model.fit(
        X,
        Y,
        sample_weight=WEIGHTS,
        batch_size=12,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return history.history, model.evaluate(
        X, Y, sample_weight=WEIGHTS, batch_size=9, verbose=0, return_dict=True
    )


@pytest.mark.slow(
    but=["InMetrics-mirrored 2", "InSteps-mirrored 4", "InSteps-fully sharded"]
)
@pytest.mark.parametrize(
    "strategy",
    ["mirrored 2", "mirrored 4", "virtual", "fully sharded", "central storage"],
)
@pytest.mark.parametrize("kind", [InMetrics, InSteps])
def test_logs_are_those_of_one_device(
    kind: Any, strategy: str, assert_same: Any
) -> None:
    expected = logs_of(kind, rx.OneDeviceStrategy("cpu:0"))
    assert_same(logs_of(kind, STRATEGIES[strategy]()), expected)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_log_with_the_name_of_a_metric(num_replicas: int, assert_same: Any) -> None:
    expected = logs_of(OfTheBatch, None)
    assert_same(logs_of(OfTheBatch, mirrored(num_replicas)), expected)


def test_several_steps_per_execution(assert_same: Any) -> None:
    expected = logs_of(InMetrics, rx.OneDeviceStrategy("cpu:0"))
    assert_same(logs_of(InMetrics, mirrored(2), steps_per_execution=2), expected)


def test_metrics_are_left_as_they_were() -> None:
    with mirrored(2).scope():
        model = InMetrics()
        model.compile("sgd", "binary_crossentropy")
    model.fit(X, Y, verbose=0)
    assert all("result" not in vars(metric) for metric in model.metrics)
