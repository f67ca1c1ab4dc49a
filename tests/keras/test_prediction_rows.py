"""Predictions whose rows are not one for each example."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.conftest import mirrored

import replicax as rx

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")


class Outputs(keras.Model):
    """A dense layer; `make(model, outputs)` computes the model's outputs."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.dense = layers.Dense(4)
        self.centers = self.add_weight((3, 4), "ones", name="centers")
        self.make = make
        self.compile(**options)

    def call(self, x: Any) -> Any:
        return self.make(self, self.dense(x))


def two_rows_each(_: Any, y: Any) -> Any:
    return {"halves": ops.reshape(y, (-1, 2)), "whole": y}


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_an_example_may_make_several_rows(
    same_as_one_device: Any, num_replicas: int
) -> None:
    def work() -> Any:
        model = Outputs(two_rows_each)
        # Batches that do not divide by the replicas, and one of a single row.
        sizes = [1, 2, 3, 5, 8]
        return [
            *(model.predict(X, batch_size=size, verbose=0) for size in sizes),
            *(model.predict_on_batch(X[:size]) for size in sizes),
        ]

    same_as_one_device(work, num_replicas)


def test_several_rows_and_several_steps(same_as_one_device: Any) -> None:
    def work() -> Any:
        model = Outputs(two_rows_each, steps_per_execution=2)
        return [model.predict(X, batch_size=size, verbose=0) for size in (5, 6)]

    same_as_one_device(work, 2, 3)


def test_a_square_of_rows(same_as_one_device: Any) -> None:
    def work() -> Any:
        model = Outputs(lambda _, y: ops.tile(y[:, :1], (1, 4)))
        return model.predict(X, batch_size=8, verbose=0)  # Of 4 rows a replica.

    same_as_one_device(work, 2)


NO_ROWS = {
    "a weight": lambda model, y: {"y": y, "centers": model.centers + 0.0},
    "time first": lambda _, y: {
        "y": ops.transpose(ops.reshape(y, (-1, 2, 2)), (1, 0, 2))
    },
    "time first, as many": lambda _, y: ops.transpose(ops.tile(y, (1, 1))),
    "a scalar": lambda _, y: {"mean": ops.mean(y), "y": y},
}


@pytest.mark.parametrize("case", NO_ROWS)
def test_outputs_without_rows_are_refused(case: str) -> None:
    with mirrored(2).scope():
        model = Outputs(NO_ROWS[case])
    for size in (8, 2):  # Of one row a replica, too.
        with pytest.raises(ValueError, match=r"output.* has shape .* for \d rows"):
            model.predict(X[:8], batch_size=size, verbose=0)
    with pytest.raises(ValueError, match="OneDeviceStrategy"):
        model.predict_on_batch(X[:8])


@pytest.mark.parametrize("case", NO_ROWS)
def test_one_replica_returns_what_keras_returns(
    same_as_one_device: Any, case: str
) -> None:
    def work() -> Any:
        model = Outputs(NO_ROWS[case])
        return model.predict_on_batch(X[:8]), model.predict_on_batch(X[:3])

    same_as_one_device(work, 1)


def test_one_replica_concatenates_as_keras() -> None:
    with rx.OneDeviceStrategy("cpu:0").scope():
        model = Outputs(NO_ROWS["a weight"])
    assert model.predict(X, batch_size=11, verbose=0)["centers"].shape == (6, 4)


def test_a_step_of_batches_of_one_size() -> None:
    def fixed(_: Any, y: Any) -> Any:
        # Keras builds the model with the whole batch.
        return ops.reshape(y, (4 * 4, 1)) if len(y) != 8 else ops.reshape(y, (-1, 1))

    with mirrored(2).scope():
        model = Outputs(fixed)
    assert model.predict(X[:16], batch_size=8, verbose=0).shape == (64, 1)
