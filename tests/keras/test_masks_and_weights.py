"""Masks and weights count the same under every strategy as on one device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers
from tests.keras.masked_cases import (
    CASES,
    NUM_CLASSES,
    NUM_STEPS,
    embedding,
    in_loops,
    on_batches,
    weights_of,
)
from tests.strategies.parity import STRATEGIES

import replicax as rx


def outcome(work: Callable[[str], Any], case: str, scope: Any) -> Any:
    keras.utils.set_random_seed(1)
    with scope:
        return work(case)


@functools.cache
def expected(work: Callable[[str], Any], case: str) -> Any:
    return outcome(work, case, contextlib.nullcontext())


HARDEST = "masked steps of weighted rows"
"""Masks and weights of two shapes: the case that covers all others."""
QUICK = ("mirrored 2", HARDEST)
PAIRS = [(n, c) for n in STRATEGIES for c in CASES if n == "mirrored 2" or c == HARDEST]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(*pair, marks=[] if pair == QUICK else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_in_loops(name: str, case: str, assert_same: Any) -> None:
    actual = outcome(in_loops, case, STRATEGIES[name]().scope())
    assert_same(actual, expected(in_loops, case))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_on_batches(name: str, case: str, assert_same: Any) -> None:
    actual = outcome(on_batches, case, STRATEGIES[name]().scope())
    assert_same(actual, expected(on_batches, case))


def own_metrics(model: Any, data: Any, y_pred: Any) -> Any:
    logs = model.compute_metrics(*data[:2], y_pred, data[2])
    del logs["loss"]  # The step does not update it.
    return logs


class Taped(keras.Sequential):
    """As tf.keras has it: a mask stays attached from the tape to the metrics."""

    def train_step(self, data: Any) -> Any:
        x, y, weights = data
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, weights)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return own_metrics(self, data, y_pred)


class Functional(keras.Sequential):
    """The same with the functional way, where it comes with the loss."""

    def train_step(self, data: Any) -> Any:
        x, y, weights = data

        def loss_of() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(x, y, y_pred, weights), y_pred

        (_, y_pred), grads = rx.value_and_grad(
            loss_of, self.trainable_variables, has_aux=True
        )()
        self.optimizer.apply(grads)
        return own_metrics(self, data, y_pred)


@pytest.mark.slow(but=["Taped-mirrored 2", "Functional-fully sharded"])
@pytest.mark.parametrize("name", ["mirrored 2", "fully sharded"])
@pytest.mark.parametrize("kind", [Taped, Functional])
def test_own_train_steps(name: str, kind: Any, assert_same: Any) -> None:
    """The metrics of a step are those of `evaluate` on the weights it began with."""

    def work() -> tuple[Any, Any]:
        _, x, y = embedding()
        model = kind(
            [
                keras.Input((NUM_STEPS,), dtype="int32"),
                layers.Embedding(40, 32, mask_zero=True),
                layers.TimeDistributed(layers.Dense(NUM_CLASSES)),
            ]
        )
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
        seen = weights_of("step weights", y)
        before = model.evaluate(x, y, **seen, verbose=0, return_dict=True)
        during = model.fit(x, y, **seen, verbose=0, shuffle=False).history
        return {name: [before[name]] for name in during}, during

    with STRATEGIES[name]().scope():
        before, during = work()
    assert_same(during, before)
