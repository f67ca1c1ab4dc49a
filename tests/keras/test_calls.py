"""Messages name the called method; ignored options are logged."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.arange(10) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", LOSS, **options)
    return model


class Batches(keras.utils.PyDataset):
    def __init__(self, *batch: Any) -> None:
        super().__init__()
        self._batch = batch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self._batch


# Names in messages.

CALLS: dict[str, Any] = {
    "fit": lambda model, x, y: model.fit(Batches(x, y), verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(Batches(x, y), verbose=0),
    "predict": lambda model, x, y: model.predict(Batches([x, y], None), verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch([x, y]),
}


def two_inputs() -> Any:
    first, second = keras.Input((4,)), keras.Input((4,))
    return keras.Model([first, second], layers.Dense(3)(first + second))


@pytest.mark.parametrize("name", CALLS)
def test_batches_of_other_sizes(name: str, strategy_of: Any) -> None:
    is_predict = name.startswith("predict")
    with strategy_of(2).scope():
        model = two_inputs() if is_predict else classifier()
    model.compile("sgd", LOSS)
    if not is_predict:
        model.train_on_batch(X, Y)  # Else Keras finds out first.
    with pytest.raises(ValueError, match=f"^{name}: arrays differ in dimension 0"):
        CALLS[name](model, X, X[:5] if is_predict else Y[:5])


class Diverging(layers.Layer):
    """Assigns a value that differs between replicas."""

    def build(self, shape: Any) -> None:
        self.last = self.add_weight(shape=(), trainable=False, name="last")

    def call(self, x: Any) -> Any:
        self.last.assign(ops.sum(x))
        return x


@pytest.mark.parametrize("name", CALLS)
def test_diverging_steps(name: str, strategy_of: Any) -> None:
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((4,)), Diverging(), layers.Dense(3)])
        model.compile("sgd", LOSS)
    calls = {"predict": model.predict, "predict_on_batch": model.predict_on_batch}
    with pytest.raises(rx.DivergenceError, match=rf"^{name}\(Sequential"):
        calls[name](X) if name in calls else CALLS[name](model, X, Y)


def test_validation_is_a_part_of_fit(strategy_of: Any) -> None:
    with strategy_of(2).scope():
        model = classifier()
    model.evaluate(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"^fit: arrays differ in dimension 0"):
        model.fit(X, Y, validation_data=Batches(X, Y[:5]), verbose=0)


def test_calls_in_a_callback_are_named(strategy_of: Any) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = classifier()
        variable = keras.Variable(0.0)
    seen = []

    def diverge() -> None:
        variable.assign(rx.get_replica_context().replica_id_in_sync_group * 1.0)

    def at_the_end(epoch: int, logs: Any) -> None:
        with pytest.raises(ValueError, match=r"^test_on_batch: arrays"):
            model.test_on_batch(X, Y[:5])
        with pytest.raises(rx.DivergenceError, match=r"^run\("):
            strategy.run(diverge)
        seen.append(epoch)

    model.evaluate(X, Y, verbose=0)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=at_the_end)
    model.fit(X, Y, callbacks=[callback], verbose=0)
    assert seen == [0]


# Targets in `predict`.

TARGETS = {
    "none": None,
    "other rows": np.arange(3),
    "strings": np.array(["a"] * 10),
    "list of strings": ["a"] * 10,
    "scalar": np.float32(1),
    "ragged": [[1], [1, 2]] * 5,
    "objects": np.array([[1], [1, 2]] * 5, dtype=object),
    "dict": {"a": np.arange(7)},
}


@pytest.fixture(scope="module")
def two_replicas() -> Any:
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        return classifier()


@pytest.mark.parametrize("name", TARGETS)
def test_predict_ignores_targets(name: str, two_replicas: Any) -> None:
    expected = np.concatenate([two_replicas.predict(X, verbose=0)] * 2)
    for batch in ((X, TARGETS[name]), (X, TARGETS[name], TARGETS[name])):
        actual = two_replicas.predict(Batches(*batch), verbose=0)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_predict_step_that_uses_targets_gets_them(strategy_of: Any) -> None:
    class Reading(keras.Sequential):
        def predict_step(self, data: Any) -> Any:
            x, y = data
            return self(x) + ops.cast(y[:, None], "float32")

    with strategy_of(2).scope():
        model = Reading([keras.Input((4,)), layers.Dense(3)])
    actual = model.predict(Batches(X, Y), verbose=0)
    expected = np.asarray(model(X)) + Y[:, None]
    np.testing.assert_allclose(actual, [*expected, *expected], rtol=1e-5)


# Options of `compile`.


def test_ignored_options_are_logged_once(
    strategy_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy_of(2).scope():
        model = classifier(jit_compile=False)
    model.fit(X, Y, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    (record,) = [r for r in caplog.records if r.name == "replicax"]
    said = f"jit_compile=False of model {model.name!r} is ignored"
    assert said in record.getMessage()
    assert "one program" in record.getMessage()


@pytest.mark.parametrize(
    "option",
    [{}, {"jit_compile": True}, {"jit_compile": "auto"}, {"run_eagerly": True}],
)
def test_no_warning_for_options_that_apply(
    option: dict[str, Any], strategy_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy_of(2).scope():
        model = classifier(**option)
    model.train_on_batch(X, Y)
    assert not caplog.records


# keras.distribution beside a strategy.


@pytest.fixture
def no_distribution() -> Iterator[None]:
    before = keras.distribution.distribution()
    yield
    keras.distribution.set_distribution(before)


def data_parallel() -> Any:
    return keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])


def model_parallel() -> Any:
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


@pytest.mark.usefixtures("no_distribution")
@pytest.mark.parametrize(
    ("make", "name"), [(data_parallel, "fit"), (model_parallel, "test_on_batch")]
)
def test_model_of_a_distribution(make: Any, name: str, strategy_of: Any) -> None:
    keras.distribution.set_distribution(make())
    with strategy_of(2).scope():
        model = classifier()
    with pytest.raises(rx.ContextError, match=r"keras\.distribution") as caught:
        CALLS[name](model, X, Y)
    assert "another strategy" not in str(caught.value)
    assert str(caught.value).startswith(f"{name}(")


@pytest.mark.usefixtures("no_distribution")
def test_variable_of_a_distribution(strategy_of: Any) -> None:
    with data_parallel().scope():
        variable = keras.Variable(0.0, name="early")
    with pytest.raises(rx.ContextError, match=r"run\(.*'early'.*keras\.distribution"):
        strategy_of(2).run(lambda: variable.assign(1.0))


def test_data_frames_and_series_are_arrays(strategy_of: Any) -> None:
    """Rows by position, whatever their labels are, in each call that takes data."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 2)), rng.normal(size=10)
    labels = rng.permutation(10)
    frame = pd.DataFrame(x, columns=["a", "b"], index=labels)
    series = pd.Series(y, index=labels)
    strategy = strategy_of(2)

    def results(x: Any, y: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        batches = strategy.experimental_distribute_dataset((x, y), batch_size=4)
        return [
            model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"],
            model.fit(batches, verbose=0).history["loss"],
            model.evaluate(x, y, batch_size=4, verbose=0),
            model.predict(x, batch_size=4, verbose=0),
            model.train_on_batch(x, y),
            model.test_on_batch(x, y),
            model.predict_on_batch(x),
        ]

    for ours, expected in zip(results(frame, series), results(x, y), strict=True):
        np.testing.assert_array_equal(ours, expected)
