"""Wrong data of `fit`, `evaluate` and `predict`: the error says what to give."""

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X.sum(1, keepdims=True)

pytestmark = pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")


@pytest.fixture(name="model")
def _model(strategy_of: Any) -> keras.Model:
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def batches_of(*batches: Any) -> Iterator[Any]:
    yield from batches


NO_DATA = {
    "text": ("abc", "got str 'abc'. .*keras.utils.PyDataset"),
    "path": (Path("x.npz"), "got PosixPath"),
    "number": (3, "got int 3"),
    "lists": ([[1.0, 2.0, 3.0]], r"got list \[\[1.0, .*np.asarray makes an array"),
    "function": (batches_of, "got function .*Call the function"),
    "iterator": (iter([(X, Y)]), "got list_iterator .*Make a generator"),
    "nothing": ([], r"x holds no arrays; got list \[\]"),
    "nothing in it": ({"a": None}, "x holds no arrays; got dict"),
    "scalar": (np.float32(1), r"x is a single number, .*Write x\[None\]"),
    "texts": ({"a": np.array(["b"])}, r"x\['a'\] is an array of <U1; expected numbers"),
    "objects": (np.array([None]), "x is an array of object; expected numbers"),
    "dates": (np.array([datetime.date(2020, 1, 1)], "M8[D]"), "array of datetime64"),
}


@pytest.mark.parametrize("case", NO_DATA)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_what_is_no_data(model: keras.Model, method: str, case: str) -> None:
    data, pattern = NO_DATA[case]
    with pytest.raises(ValueError, match=f"^{method}: x .*{pattern}|{pattern}"):
        getattr(model, method)(data, verbose=0)


OTHERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "steps of an epoch": (
        lambda model: model.fit(X, Y, steps_per_epoch=-1),
        "^fit: got -1 steps. Give their number, or None for all of the data",
    ),
    "steps": (lambda model: model.predict(X, steps=-2), "^predict: got -2 steps"),
    "y": (lambda model: model.fit(X, ["a"] * 8), r"^fit: y must be arrays; got list"),
    "texts": (lambda model: model.fit(X, np.array(["a"] * 8)), "^fit: y is an array"),
    "weights": (
        lambda model: model.evaluate(X, Y, sample_weight="a"),
        "^evaluate: sample_weight must be arrays; got str 'a'",
    ),
    "validation": (
        lambda model: model.fit(X, Y, validation_data="abc", verbose=0),
        "^fit, validation_data: x must be arrays or a dataset; got str 'abc'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_arguments(model: keras.Model, case: str) -> None:
    call, pattern = OTHERS[case]
    with pytest.raises(ValueError, match=pattern):
        call(model)


NO_TARGETS: dict[str, Callable[[Any], object]] = {
    "fit": lambda model: model.fit(X, verbose=0),
    "fit of a tuple": lambda model: model.fit((X, Y), verbose=0),
    "evaluate": lambda model: model.evaluate(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X),
    "in the first batch": lambda model: model.fit(batches_of((X,)), verbose=0),
    "in a later batch": lambda model: model.fit(batches_of((X, Y), (X,)), verbose=0),
    "validation": lambda model: model.fit(X, Y, validation_data=X, verbose=0),
}


@pytest.mark.parametrize("case", NO_TARGETS)
@pytest.mark.filterwarnings("ignore:The structure of .inputs. doesn't match")
def test_no_targets(model: keras.Model, case: str) -> None:
    pattern = r"^\w+: model 'sequential.*' has the loss 'mse', .* y is None"
    with pytest.raises(ValueError, match=pattern):
        NO_TARGETS[case](model)


def test_a_loss_of_a_models_own_needs_no_targets(strategy_of: Any) -> None:
    class Own(keras.Sequential):
        def compute_loss(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
            return keras.ops.mean(keras.ops.square(self(x)))

    with strategy_of(2).scope():
        model = Own([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert len(model.fit(X, verbose=0, epochs=2).history["loss"]) == 2


def test_a_batch_without_rows(model: keras.Model) -> None:
    with pytest.raises(ValueError, match=r"^fit: a batch for model .* has no rows"):
        model.fit(batches_of((X, Y), (X[:0], Y[:0])), verbose=0)
    assert model.predict(batches_of((X,), (X[:0],)), verbose=0).shape == (8, 1)


def test_lists_in_a_batch(model: keras.Model) -> None:
    match = r"got no dimension in \[0\]\[0\]\[0\], .*, \.\.\.\. Lists .*np.asarray"
    with pytest.raises(ValueError, match=match):
        model.fit(batches_of((X, Y), (X.tolist(), Y.tolist())), verbose=0)
