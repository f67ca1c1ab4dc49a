"""`fit`, `evaluate` and `predict` of one replica equal plain Keras bit by bit."""

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(44, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
WEIGHTS = _RNG.uniform(0.5, 2.0, size=44).astype("float32")


class Calls(keras.callbacks.Callback):
    """Notes every call, with the names and numbers in its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_batch_begin", "on_batch_end"):
            return super().__getattribute__(name)

        def note(*args: Any, logs: Any = None) -> None:
            numbers = [a for a in args if isinstance(a, int)]
            logs = next((a for a in args if isinstance(a, dict)), logs) or {}
            kept = {k: np.asarray(v).tolist() for k, v in logs.items()}
            self.made.append((name, numbers, kept))

        return note


class StopAt(keras.callbacks.Callback):
    """Stops training, or a validation, in one of its methods."""

    def __init__(
        self, method: str, number: int = 0, flag: str = "stop_training"
    ) -> None:
        super().__init__()
        self._at = method, number
        self._flag = flag

    def _stop(self, method: str, number: int = 0) -> None:
        if self._at == (method, number):
            setattr(self.model, self._flag, True)

    def on_train_begin(self, logs: Any = None) -> None:
        self._stop("train_begin")

    def on_test_begin(self, logs: Any = None) -> None:
        self._stop("test_begin")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._stop("test_batch_end", batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._stop("epoch_begin", epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._stop("batch_begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._stop("batch_end", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop("epoch_end", epoch)


class Rows(keras.utils.PyDataset):
    """Batches of 8 rows, in another order after each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.offset = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(
            8 * ((index + self.offset) % 5), 8 * ((index + self.offset) % 5) + 8
        )
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.offset += 1


def batches(size: int = 8) -> Any:
    for start in range(0, 44, size):
        yield X[start : start + size], Y[start : start + size]


def model_of(**options: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **options)
    return model


def fit(data: Callable[[], Any], *, compiled: Any = None, **options: Any) -> Any:
    """Two epochs of `fit` on what `data` makes."""

    def call(model: keras.Model, callbacks: list[Any]) -> Any:
        given = {"epochs": 2, "batch_size": 8, "verbose": 0, **options}
        made = given.pop("callbacks", list)()
        if callable(given.get("validation_data")):
            given["validation_data"] = given["validation_data"]()
        args = data()
        if not isinstance(args[0], np.ndarray):
            given.pop("batch_size")
        return model.fit(*args, callbacks=[*callbacks, *made], **given).history

    return call, compiled or {}


ARRAYS = lambda: (X, Y)  # noqa: E731
VALIDATION = {"validation_data": (X[:13], Y[:13])}

CASES = {
    "arrays": fit(ARRAYS),
    "in order": fit(ARRAYS, shuffle=False),
    "shuffled in batches": fit(ARRAYS, shuffle="batch"),
    "validation_split": fit(ARRAYS, validation_split=0.3),
    "validation_data": fit(ARRAYS, **VALIDATION),
    "validation_data with weights": fit(
        ARRAYS, validation_data=(X[:13], Y[:13], WEIGHTS[:13])
    ),
    "validation on a dataset": fit(ARRAYS, validation_data=Rows),
    "validation of sequences": fit(ARRAYS, validation_data=[X[:13], Y[:13]]),
    "validation on a generator": fit(
        ARRAYS, validation_data=batches, validation_steps=2, epochs=1
    ),
    "validation_steps": fit(ARRAYS, **VALIDATION, validation_steps=1),
    "validation_batch_size": fit(ARRAYS, **VALIDATION, validation_batch_size=5),
    "validation_freq": fit(ARRAYS, **VALIDATION, validation_freq=2, epochs=4),
    "validation_freq as a list": fit(
        ARRAYS, **VALIDATION, validation_freq=[1, 3], epochs=3
    ),
    "validation_split of weights": fit(
        ARRAYS, validation_split=0.25, sample_weight=WEIGHTS
    ),
    "validation_split beside validation_data": fit(
        ARRAYS, **VALIDATION, validation_split=0.25
    ),
    "validation_steps beyond": fit(ARRAYS, **VALIDATION, validation_steps=9),
    "validation in executions": fit(
        ARRAYS,
        **VALIDATION,
        validation_batch_size=3,
        compiled={"steps_per_execution": 2},
    ),
    "class_weight of a PyDataset": fit(
        lambda: (Rows(),), class_weight={0: 0.5, 1: 3.0}, shuffle=False
    ),
    "weighted_metrics": fit(
        ARRAYS, compiled={"weighted_metrics": ["accuracy"]}, sample_weight=WEIGHTS
    ),
    "loss_weights": fit(ARRAYS, compiled={"loss_weights": [0.5]}),
    "class_weight": fit(ARRAYS, class_weight={0: 0.5, 1: 3.0}),
    "sample_weight": fit(ARRAYS, sample_weight=WEIGHTS),
    "initial_epoch": fit(ARRAYS, initial_epoch=1, epochs=3),
    "initial_epoch at the end": fit(ARRAYS, initial_epoch=2),
    "no epochs": fit(ARRAYS, epochs=0),
    "steps_per_epoch below": fit(ARRAYS, steps_per_epoch=2, epochs=4),
    "steps_per_epoch of the data": fit(ARRAYS, steps_per_epoch=6),
    "steps_per_epoch beyond": fit(ARRAYS, steps_per_epoch=10, epochs=3),
    "steps_per_epoch beyond a PyDataset": fit(
        lambda: (Rows(),), steps_per_epoch=7, shuffle=False, epochs=3
    ),
    "steps_per_epoch beyond in executions": fit(
        ARRAYS, compiled={"steps_per_execution": 4}, steps_per_epoch=10
    ),
    "steps_per_execution": fit(ARRAYS, compiled={"steps_per_execution": 4}),
    "steps_per_execution and steps_per_epoch": fit(
        ARRAYS, compiled={"steps_per_execution": 2}, steps_per_epoch=4, epochs=3
    ),
    "a PyDataset": fit(lambda: (Rows(),)),
    "a shuffled PyDataset": fit(lambda: (Rows(),), shuffle=True, epochs=3),
    "a PyDataset of threads": fit(lambda: (Rows(workers=2),), shuffle=False),
    "a PyDataset with steps_per_epoch": fit(
        lambda: (Rows(),), steps_per_epoch=3, epochs=4, shuffle=False
    ),
    "a generator": fit(lambda: (batches(),), epochs=1),
    "a generator with steps_per_epoch": fit(
        lambda: (batches(4),), steps_per_epoch=5, epochs=2
    ),
    "a generator in executions": fit(
        lambda: (batches(),), epochs=1, compiled={"steps_per_execution": 4}
    ),
    **{
        f"stopped at {method} {number}": fit(
            ARRAYS,
            callbacks=lambda at=(method, number): [StopAt(*at)],
            **VALIDATION,
            epochs=3,
        )
        for method, number in [
            ("train_begin", 0),
            ("test_begin", 0),
            ("test_batch_end", 0),
            ("epoch_begin", 1),
            ("batch_begin", 2),
            ("batch_end", 2),
            ("epoch_end", 0),
        ]
    },
    "a validation that is stopped": fit(
        ARRAYS,
        callbacks=lambda: [StopAt("test_batch_end", 1, "stop_evaluating")],
        **VALIDATION,
        validation_batch_size=3,
    ),
}


def run(case: Any, strategy: Any) -> tuple[Any, Any, Any, list[np.ndarray]]:
    """History, calls of a callback, evaluation and weights."""
    call, compiled = case
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of(**compiled)
    calls = Calls()
    with warnings.catch_warnings():  # Of plain Keras, at the end of a generator.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        warnings.filterwarnings("ignore", "`shuffle=True` was passed")
        history = call(model, [calls])
    results = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
    return history, calls.made, results, model.get_weights()


@pytest.mark.slow(
    but=[
        "arrays",
        "class_weight",
        "validation_split",
        "no epochs",
        "steps_per_epoch below",
        "stopped at batch_end 2",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_one_replica_is_keras_bit_by_bit(name: str) -> None:
    history, calls, results, weights = run(CASES[name], None)
    found = run(CASES[name], rx.OneDeviceStrategy("cpu:0"))
    assert found[0] == history
    assert found[1] == calls
    assert found[2] == results
    for mine, theirs in zip(found[3], weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


class StopPredicting(keras.callbacks.Callback):
    """Stops `predict` after its third batch."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_predicting = batch >= 2


def inputs() -> Any:
    return ((x,) for x, _ in batches())


def with_calls(call: Callable[..., Any], *data: Any) -> Any:
    """The result of a call, and the calls of a callback."""
    calls = Calls()
    return call(*data, batch_size=8, verbose=0, callbacks=[calls]), calls.made


CALLS: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda m: with_calls(m.evaluate, X, Y),
    "evaluate with weights": lambda m: m.evaluate(
        X, Y, sample_weight=WEIGHTS, batch_size=8, verbose=0, return_dict=True
    ),
    "evaluate some steps": lambda m: m.evaluate(X, Y, 8, steps=3, verbose=0),
    "evaluate more steps": lambda m: m.evaluate(X, Y, 8, steps=30, verbose=0),
    "evaluate a generator": lambda m: m.evaluate(batches(), steps=3, verbose=0),
    "evaluate a PyDataset": lambda m: m.evaluate(Rows(), verbose=0),
    "predict": lambda m: with_calls(m.predict, X),
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


def result_and_text(call: Callable[[Any], Any], strategy: Any) -> Any:
    """What a call of a trained model returns, and what it prints, without times."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of()
    model.fit(X, Y, batch_size=8, verbose=0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = call(model)
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    text = re.sub(r"\d+(us|ms|s|:\d\d)(/step|/epoch)?", "TIME", text)
    # A bar is filled up with spaces where earlier times were longer texts.
    return result, re.sub(r" +$", "", text, flags=re.MULTILINE)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.slow(but=["evaluate with weights", "predict some steps"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_texts_are_those_of_keras(name: str) -> None:
    expected, expected_text = result_and_text(CALLS[name], None)
    result, text = result_and_text(CALLS[name], rx.OneDeviceStrategy("cpu:0"))
    assert_equal(result, expected)
    # A bar is redrawn at most every 50 ms: its last state counts.
    assert text.split("\x08")[-1] == expected_text.split("\x08")[-1]


@pytest.mark.slow(but=["validation_data"])
@pytest.mark.parametrize(
    "name", ["arrays", "validation_data", "class_weight", "steps_per_execution"]
)
def test_calls_do_not_depend_on_the_number_of_replicas(name: str) -> None:
    """Random numbers of dropout do, so numbers are compared elsewhere."""
    one = run(CASES[name], rx.OneDeviceStrategy("cpu:0"))
    two = run(CASES[name], rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert [c[:2] for c in two[1]] == [c[:2] for c in one[1]]
    assert two[0].keys() == one[0].keys()


def nested() -> Any:
    """A model of trees of inputs and outputs, and its data."""
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    hidden = keras.layers.Dense(5, activation="relu")(keras.ops.concatenate([a, b], 1))
    outputs = {
        "one": keras.layers.Dense(1, name="one")(hidden),
        "more": [keras.layers.Dense(2, name="first")(hidden), hidden],
    }
    model = keras.Model({"inner": [a], "b": b}, outputs)
    losses = {"one": "mse", "more": ["mae", None]}
    model.compile("adam", losses, metrics={"one": "mae", "more": ["mse", None]})
    y = {"one": X[:, :1], "more": [X[:, :2], X[:, :5]]}
    return model, {"inner": [X], "b": X[:, 2:4]}, y


def lora() -> Any:
    """A model of which low-rank parts are trained."""
    model = model_of()
    model.layers[0].enable_lora(2)
    model.compile("adam", model.loss)
    return model, X, Y


def quantised() -> Any:
    """The same with weights of eight bits."""
    model = model_of()
    model.layers[0].quantize("int8")
    model.layers[0].enable_lora(2)
    model.compile("adam", model.loss)
    return model, X, Y


def convolutional() -> Any:
    layers = [keras.layers.Conv1D(3, 3), keras.layers.MaxPooling1D()]
    hidden = [keras.layers.Reshape((6, 1)), *layers, keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, X, Y


@pytest.mark.slow(but=["nested"])
@pytest.mark.parametrize("make", [nested, lora, quantised, convolutional])
def test_other_models_are_keras_bit_by_bit(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Convolutions of replicax round otherwise than those of XLA.
    monkeypatch.setenv("REPLICAX_CPU", "off")

    def train(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model, x, y = make()
        return (
            model.fit(x, y, batch_size=8, validation_split=0.2, verbose=0).history,
            model.evaluate(x, y, batch_size=16, verbose=0),
            model.predict(x, batch_size=16, verbose=0),
            model.get_weights(),
        )

    assert_equal(train(rx.OneDeviceStrategy("cpu:0")), train(None))


def assert_equal(actual: Any, expected: Any) -> None:
    keras.tree.map_structure(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow(but=["True"])
@pytest.mark.parametrize("return_dict", [False, True])
def test_single_batches_are_keras_bit_by_bit(return_dict: bool) -> None:
    def train(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = model_of()
        given = {"return_dict": return_dict}
        return (
            model.train_on_batch(X, Y, class_weight={0: 0.5, 1: 3.0}, **given),
            model.train_on_batch(X, Y, sample_weight=WEIGHTS, **given),
            model.test_on_batch(X, Y, sample_weight=WEIGHTS, **given),
            model.predict_on_batch(X),
            model.get_weights(),
        )

    assert_equal(train(rx.OneDeviceStrategy("cpu:0")), train(None))


@pytest.mark.slow(but=["frozen and recompiled"])
@pytest.mark.parametrize("between", ["recompiled", "frozen and recompiled"])
def test_two_calls_of_fit_with_a_change_between(between: str) -> None:
    def train(strategy: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = model_of()
        model.fit(X, Y, batch_size=8, verbose=0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            if "frozen" in between:
                model.layers[0].trainable = False
            model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(X, Y, batch_size=8, verbose=0)
        return model.get_weights()

    plain = train(None)
    for mine, theirs in zip(train(rx.OneDeviceStrategy("cpu:0")), plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("make", [None, lambda: rx.OneDeviceStrategy("cpu:0")])
def test_frozen_layers_need_compile_as_in_keras(make: Any) -> None:
    strategy = make and make()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of()
    model.fit(X, Y, verbose=0)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="optimizer was built with 6 variables"):
        model.fit(X, Y, verbose=0)


def test_data_that_end_as_announced_warn_nobody(recwarn: Any) -> None:
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = model_of()
    model.fit(batches(), epochs=1, shuffle=False, verbose=0)
    model.evaluate(batches(), verbose=0)
    model.predict(((x,) for x, _ in batches()), verbose=0)
    assert not [w for w in recwarn if "ran out of data" in str(w.message)]


def test_data_that_end_early_are_reported() -> None:
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = model_of()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(batches(), steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)


def test_no_data_at_all_is_an_error() -> None:
    class Empty(Rows):
        def __len__(self) -> int:
            return 0

    with rx.OneDeviceStrategy("cpu:0").scope():
        model = model_of()
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="no batches"):
        model.fit(Empty(), verbose=0)
    with pytest.raises(ValueError, match=r"fit: the validation data .* no batches"):
        model.fit(X, Y, validation_data=Empty(), verbose=0)
    with pytest.raises(ValueError, match=r"evaluate: the data .* no batches"):
        model.evaluate(Empty(), verbose=0)
    with pytest.raises(ValueError, match=r"predict: .* no batches"):
        unbuilt.predict(Empty(), verbose=0)
