"""`fit` with the variables in one place gives what mirrored variables give."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

COMPUTE = ["cpu:0", "cpu:1"]
# Compute devices, and where the variables live.
PLACES = {
    "outside": (COMPUTE, "cpu:5"),
    "inside": (COMPUTE, "cpu:1"),
    "one": (["cpu:3"], None),
}
# 3 whole batches of 32 and one of 3: two replicas cannot share that equally.
NUM_EXAMPLES, BATCH_SIZE = 99, 32

Work = Callable[[], Any]


@pytest.fixture
def data(digits: Any) -> Any:
    return tuple(a[:NUM_EXAMPLES] for a in digits)


def outcome(work: Work, strategy: rx.Strategy) -> Any:
    keras.utils.set_random_seed(2)
    with strategy.scope():
        return jax.tree.map(np.asarray, work())


def same_as_mirrored(work: Work, place: str = "inside") -> Any:
    """Do `work` under both strategies, compare all it returns, and return that."""
    devices, home = PLACES[place]
    expected = outcome(work, rx.MirroredStrategy(devices))
    actual = outcome(work, rx.CentralStorageStrategy(devices, home))
    assert_same(actual, expected)
    return actual


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        # The same sums in the same order. XLA fuses the update with the gradient where
        # they are one program, which rounds differently: about 1e-7 in each step.
        np.testing.assert_allclose(
            a, e, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path)
        )


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(
    optimizer: Any, *hidden: Any, kind: Any = keras.Sequential, **options: Any
) -> Any:
    hidden = hidden or (layers.Dense(12, activation="relu"),)
    model = kind([keras.Input((64,)), *hidden, layers.Dense(10)])
    model.compile(optimizer, crossentropy(), metrics=["accuracy"], **options)
    return model


def state(model: Any) -> list[Any]:
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


def fitted(model: Any, data: Any, **options: Any) -> Any:
    history = model.fit(
        *data, BATCH_SIZE, verbose=0, **{"epochs": 2, "shuffle": False} | options
    )
    return state(model), history.history


def every_entry_point(x: Any, y: Any) -> Any:
    model = classifier(
        "adam",
        # A bias here would have rounding alone for its gradient.
        layers.Dense(12, use_bias=False),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Activation("relu"),
    )
    weights = np.linspace(0.5, 1.5, len(x), dtype="float32")
    decay = keras.callbacks.LearningRateScheduler(lambda i: 0.01 / (i + 1))
    # Two replicas cannot share a batch of 33.
    options: Any = {"batch_size": 33, "verbose": 0}
    return (
        fitted(
            model,
            (x, y),
            shuffle=True,
            sample_weight=weights,
            validation_data=(x[:66], y[:66]),
            validation_batch_size=33,
            callbacks=[decay],
        ),
        model.evaluate(x, y, **options),
        model.predict(x, **options),
        model.train_on_batch(x[:32], y[:32], weights[:32]),
        model.test_on_batch(x[:33], y[:33]),
        model.predict_on_batch(x[:33]),
        state(model),
    )


@pytest.mark.slow
def test_every_entry_point(data: Any) -> None:
    def work() -> Any:
        return every_entry_point(*data)

    expected = outcome(work, rx.MirroredStrategy(COMPUTE))
    (_, history), *_ = expected
    assert history["loss"][1] < history["loss"][0]
    for home in ("cpu:5", "cpu:1"):
        assert_same(outcome(work, rx.CentralStorageStrategy(COMPUTE, home)), expected)


def test_one_device(data: Any) -> None:
    same_as_mirrored(lambda: fitted(classifier("adam"), data, epochs=1), "one")


def overflowing(data: Any) -> Any:
    """Inputs that overflow float32 in the second batch, on one replica."""
    x = data[0].copy()
    x[BATCH_SIZE + 1] = 1e38
    return x, data[1]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum, schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), 0.9, nesterov=True
    ),
    "clipped, averaged": lambda: keras.optimizers.AdamW(
        1e-2,
        weight_decay=0.01,
        epsilon=1e-3,  # Else noise in gradients near zero becomes full steps.
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "accumulated": lambda: keras.optimizers.SGD(
        0.1, 0.9, gradient_accumulation_steps=3
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, 0.9), initial_scale=1024.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.slow(but=["clipped, averaged", "scaled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(data: Any, name: str) -> None:
    used = overflowing(data) if name == "scaled" else data

    def work() -> Any:
        return fitted(classifier(OPTIMIZERS[name]()), used)[0]

    result = same_as_mirrored(work, "outside" if name == "accumulated" else "inside")
    assert all(np.isfinite(x).all() for x in result)


class StatelessStep(keras.Sequential):
    """A `train_step` as the Keras guide for JAX has it."""

    def loss_of(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        outputs, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return self.compute_loss(x, y, outputs), non_trainable

    def change(self, values: Any) -> Any:
        return values

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        (loss, non_trainable), grads = jax.value_and_grad(self.loss_of, has_aux=True)(
            trainable, non_trainable, *data
        )
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        trainable = self.change(trainable)
        return {"loss": loss}, (trainable, non_trainable, slots, metrics)


class TapeStep(keras.Sequential):
    """A `train_step` as tf.keras has it."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [StatelessStep, TapeStep])
def test_train_steps_of_ones_own(data: Any, kind: Any) -> None:
    same_as_mirrored(lambda: fitted(classifier("adam", kind=kind), data, epochs=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [0.9 * v for v in values],
        lambda values: [v - v[:1] for v in values],
        lambda values: [jax.numpy.clip(v, -1, 1) for v in values],
        lambda values: [keras.ops.clip(v, -1, 1) for v in values],
        lambda values: [v.at[0].set(0) for v in values],
        lambda values: [v for v in values if v > 0],
    ],
    ids=["times", "slice", "jax", "keras", "method", "if"],
)
def test_train_steps_cannot_compute_with_new_values(data: Any, change: Any) -> None:
    class Step(StatelessStep):
        def change(self, values: Any) -> Any:
            return change(values)

    with rx.CentralStorageStrategy(COMPUTE, "cpu:5").scope():
        model = classifier("sgd", kind=Step)
    with pytest.raises(
        rx.ContextError,
        match=r"^CentralStorageStrategy: variable 'step.*/kernel' is used after "
        r"optimizer\.apply in the same step\. .*[Uu]se it before",
    ):
        model.fit(*data, verbose=0)


def test_steps_per_execution(data: Any) -> None:
    same_as_mirrored(
        lambda: fitted(classifier("sgd", steps_per_execution=2), data, epochs=1)
    )


def test_model_files(data: Any, tmp_path: Any) -> None:
    """Saved under one strategy, loaded under another or none, trained on."""
    path = tmp_path / "model.keras"
    with rx.CentralStorageStrategy(COMPUTE, "cpu:5").scope():
        model = classifier("adam")
    fitted(model, data, epochs=1)
    model.save(path)
    results = []
    for strategy in (
        rx.CentralStorageStrategy(COMPUTE, "cpu:0"),
        rx.MirroredStrategy(COMPUTE),
    ):
        with strategy.scope():
            loaded: Any = keras.models.load_model(path)
        for a, b in zip(state(loaded), state(model), strict=True):
            np.testing.assert_array_equal(a, b)
        fitted(loaded, data, epochs=1)
        results.append(state(loaded))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        keras.models.load_model(path).get_weights()[0], model.get_weights()[0]
    )


def test_train_steps_cannot_give_values_of_their_own(data: Any) -> None:
    """The update is made on the stored values: others would be lost in silence."""

    class Step(StatelessStep):
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, _, slots, _ = state
            decayed = [0.9 * v for v in trainable]
            self.optimizer.stateless_apply(slots, trainable, decayed)
            return {}, state

    with rx.CentralStorageStrategy(COMPUTE, "cpu:5").scope():
        model = classifier("sgd", kind=Step)
    with pytest.raises(
        rx.ContextError,
        match=r"^optimizer\.stateless_apply: the value given for 'step.*' is not",
    ):
        model.fit(*data, verbose=0)


def test_gradients_are_one_for_each_variable() -> None:
    strategy = rx.CentralStorageStrategy(COMPUTE, "cpu:5")
    with strategy.scope():
        a, b = (keras.Variable(np.ones(2), name=name) for name in "ab")
        optimizer = keras.optimizers.SGD()
    one = np.ones(2, "float32")
    with pytest.raises(ValueError, match="the optimizer is not built"):
        strategy.run(lambda: optimizer.apply([one]))
    optimizer.build([a, b])
    with pytest.raises(ValueError, match="got 1 gradients for 2 variables"):
        strategy.run(lambda: optimizer.apply([one]))
    with pytest.warns(UserWarning, match=r"Gradients do not exist .*'b'"):
        strategy.run(lambda: optimizer.apply([one, None]))
    with pytest.raises(ValueError, match=r"none of \['a', 'b'\] has a gradient"):
        strategy.run(lambda: optimizer.apply([None, None]))
    np.testing.assert_array_equal(b, one)


@pytest.mark.parametrize("wrapped", [False, True])
def test_float8_is_refused(wrapped: bool) -> None:
    strategy = rx.CentralStorageStrategy(COMPUTE, "cpu:5")
    with strategy.scope():
        w: Any = keras.Variable(np.ones(2))
        w.overwrite_with_gradient = True
        optimizer: Any = keras.optimizers.SGD()
        if wrapped:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(NotImplementedError, match="overwritten with its gradient"):
        strategy.run(lambda: optimizer.apply([np.ones(2, "float32")], [w]))


def test_stateless_apply_takes_keywords() -> None:
    """As Keras names them, with and without a strategy."""
    w, optimizer = keras.Variable(np.ones(2)), keras.optimizers.SGD(0.5)
    optimizer.build([w])
    (new,), _ = optimizer.stateless_apply(
        optimizer_variables=[v.value for v in optimizer.variables],
        grads=[np.ones(2, "float32")],
        trainable_variables=[w.value],
    )
    np.testing.assert_array_equal(new, np.full(2, 0.5))
