"""Keras' ways to have a step traced again: `make_*_function(force=True)` and None."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :1] * 2


class Scaled(keras.Model):
    """Multiplies its outputs, and with them the loss, by a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.factor = 1.0
        self.traces = 0

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.factor


def scaled(kind: type[Scaled] = Scaled, scope: Any = None, **options: Any) -> Scaled:
    with scope or mirrored(2).scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.0), "mse", **options)
    return model


CALLS: dict[str, tuple[str, Callable[[Scaled], Any]]] = {
    "fit": ("train", lambda m: m.fit(X, Y, verbose=0).history["loss"][0]),
    "evaluate": ("test", lambda m: m.evaluate(X, Y, verbose=0)),
    "predict": ("predict", lambda m: m.predict(X, verbose=0)),
    "train_on_batch": ("train", lambda m: m.train_on_batch(X, Y)),
    "test_on_batch": ("test", lambda m: m.test_on_batch(X, Y)),
    "predict_on_batch": ("predict", lambda m: m.predict_on_batch(X)),
}


@pytest.mark.parametrize("ask", ["force", "none"])
@pytest.mark.parametrize("name", CALLS)
def test_step_is_traced_again_where_keras_does(name: str, ask: str) -> None:
    kind, call = CALLS[name]
    results = []
    for scope in (mirrored(2).scope(), keras.name_scope("plain")):
        model = scaled(scope=scope)
        before = call(model)
        model.factor = 10.0
        unasked = call(model)
        if ask == "force":
            getattr(model, f"make_{kind}_function")(force=True)
        else:
            setattr(model, f"{kind}_function", None)
        results.append([before, unasked, call(model)])
    ours, keras_own = results
    np.testing.assert_array_equal(ours[0], ours[1])
    assert not np.allclose(ours[1], ours[2])
    for got, expected in zip(ours, keras_own, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_steps_stay_compiled_without_being_asked() -> None:
    class Counted(Scaled):
        def train_step(self, *args: Any) -> Any:
            self.traces += 1
            return super().train_step(*args)

    model = scaled(Counted)
    model.fit(X, Y, verbose=0)
    traces = model.traces
    model.make_train_function()
    model.fit(X, Y, verbose=0)
    assert model.traces == traces > 0


def test_a_callback_may_force_a_retrace() -> None:
    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.factor = 0.0
                self.model.make_train_function(force=True)

    losses = []
    for scope in (mirrored(2).scope(), keras.name_scope("plain")):
        history = scaled(scope=scope).fit(
            X, Y, 4, epochs=2, verbose=0, shuffle=False, callbacks=[Change()]
        )
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_override_that_leaves_the_function_is_called() -> None:
    class Noted(Scaled):
        def make_train_function(self, force: bool = False) -> Any:
            self.__dict__.setdefault("asked", []).append(force)
            return super().make_train_function(force)

    model = scaled(Noted)
    model.fit(X, Y, verbose=0)
    assert model.asked == [False]


class Wrapped(Scaled):
    def make_train_function(self, force: bool = False) -> None:
        super().make_train_function(force)
        step = vars(self)["train_function"]

        @functools.wraps(step)
        def wrapped(state: Any, iterator: Any) -> Any:
            return step(state, iterator)

        self.train_function = wrapped


class Empty(Scaled):
    def make_train_function(self, force: bool = False) -> None:
        pass


@pytest.mark.parametrize("kind", [Wrapped, Empty])
def test_function_of_the_users_own_is_refused(kind: type[Scaled]) -> None:
    model = scaled(kind)
    with pytest.raises(NotImplementedError, match=r"train_function.*train_step"):
        model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=0)


def test_assigned_function_is_refused() -> None:
    model = scaled()
    model.predict_function = lambda state, iterator: (next(iterator), state)
    with pytest.raises(NotImplementedError, match=r"predict_function.*predict_step"):
        model.predict(X, verbose=0)


def test_keras_own_fit_follows_one_with_a_callback_of_ours(tmp_path: Any) -> None:
    model = scaled(scope=keras.name_scope("plain"))
    backup = rx.BackupAndRestore(tmp_path)
    first = model.fit(X, Y, verbose=0, callbacks=[backup]).history["loss"]
    assert model.fit(X, Y, verbose=0).history["loss"] == pytest.approx(first)
