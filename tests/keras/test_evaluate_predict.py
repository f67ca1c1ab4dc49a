"""What `evaluate` and `predict` document, and `verbose`, beside plain Keras."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
from tests.keras.test_loop import (
    WEIGHTS,
    Calls,
    Rows,
    X,
    Y,
    assert_equal,
    batches,
    model_of,
)

import replicax as rx


class StopPredicting(keras.callbacks.Callback):
    """Stops `predict` after its third batch."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_predicting = batch >= 2


def inputs() -> Any:
    return ((x,) for x, _ in batches())


def heard(call: Callable[..., Any], *data: Any) -> Any:
    """The result of a call, and what a callback was told."""
    calls = Calls()
    return call(*data, batch_size=8, verbose=0, callbacks=[calls]), calls.made


CASES: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda m: heard(m.evaluate, X, Y),
    "evaluate with weights": lambda m: m.evaluate(
        X, Y, sample_weight=WEIGHTS, batch_size=8, verbose=0, return_dict=True
    ),
    "evaluate some steps": lambda m: m.evaluate(X, Y, 8, steps=3, verbose=0),
    "evaluate more steps": lambda m: m.evaluate(X, Y, 8, steps=30, verbose=0),
    "evaluate a generator": lambda m: m.evaluate(batches(), steps=3, verbose=0),
    "evaluate a PyDataset": lambda m: m.evaluate(Rows(), verbose=0),
    "predict": lambda m: heard(m.predict, X),
    "predict some steps": lambda m: m.predict(X, 8, steps=3, verbose=0),
    "predict more steps": lambda m: m.predict(X, 8, steps=30, verbose=0),
    "predict a generator": lambda m: m.predict(inputs(), steps=3, verbose=0),
    "predict a PyDataset": lambda m: m.predict(Rows(), verbose=0),
    "predict that is stopped": lambda m: m.predict(
        X, 8, verbose=0, callbacks=[StopPredicting()]
    ),
    "lines": lambda m: m.fit(X, Y, batch_size=8, verbose=2, epochs=2).history,
    "a bar": lambda m: m.fit(X, Y, verbose=1, validation_data=(X, Y)).history,
    "a bar by default": lambda m: m.fit(X, Y, batch_size=8, epochs=2).history,
    "a line of evaluate": lambda m: m.evaluate(X, Y, verbose=2),
    "a bar of predict": lambda m: m.predict(X, 8),
}


def run(case: Callable[[Any], Any], strategy: Any) -> Any:
    """What a case returns, and what it prints, without times."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of()
    model.fit(X, Y, batch_size=8, verbose=0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = case(model)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    text = re.sub(r"\d+(us|ms|s|:\d\d)(/step|/epoch)?", "TIME", text)
    # A bar is filled up with spaces where the times before were longer texts.
    return result, re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.slow(but=["evaluate with weights", "predict some steps"])
@pytest.mark.parametrize("name", CASES)
def test_one_replica_is_keras_bit_by_bit(name: str) -> None:
    result, text = run(CASES[name], None)
    found, printed = run(CASES[name], rx.OneDeviceStrategy("cpu:0"))
    assert_equal(found, result)
    # A bar is redrawn at most every 50 ms: its last state counts.
    assert printed.split("\x08")[-1] == text.split("\x08")[-1]
