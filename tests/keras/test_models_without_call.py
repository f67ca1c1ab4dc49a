"""Models with steps of their own and no `call`, such as a GAN."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.strategies.parity import STRATEGIES

import replicax as rx

X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
NOISE = np.random.default_rng(1).normal(size=(20, 3)).astype("float32")
OPTIONS: dict[str, Any] = {"batch_size": 8, "verbose": 0}


def bce(labels: Any, logits: Any) -> Any:
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return loss(labels, logits)


class GAN(keras.Model):
    """Two networks, two optimizers, no `call`; the noise is a part of the data."""

    def __init__(self, built: bool) -> None:
        super().__init__()
        first = [keras.Input((3,))] if built else []
        self.generator = keras.Sequential(
            [*first, layers.Dense(8, activation="tanh"), layers.Dense(6)]
        )
        first = [keras.Input((6,))] if built else []
        self.discriminator = keras.Sequential(
            [*first, layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.d_loss = keras.metrics.Mean(name="d_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.g_loss, self.d_loss]

    def compile(self, g_optimizer: Any, d_optimizer: Any) -> None:
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def losses_of(self, x: Any, noise: Any) -> tuple[Any, Any]:
        real = self.discriminator(x)
        fake = self.discriminator(self.generator(noise))
        ones, zeros = ops.ones_like(real), ops.zeros_like(fake)
        return bce(ones, fake), bce(ones, real) + bce(zeros, fake)


class Taped(GAN):
    """As tf.keras has it."""

    def train_step(self, data: Any) -> Any:
        with rx.GradientTape() as d_tape, rx.GradientTape() as g_tape:
            g_loss, d_loss = self.losses_of(*data[:2])
        for tape, loss, network, optimizer in (
            (d_tape, d_loss, self.discriminator, self.d_optimizer),
            (g_tape, g_loss, self.generator, self.g_optimizer),
        ):
            weights = network.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights, strict=True)
            )
        return self._update(g_loss, d_loss, len(data[0]))

    def test_step(self, data: Any) -> Any:
        return self._update(*self.losses_of(*data[:2]), len(data[0]))

    def _update(self, g_loss: Any, d_loss: Any, num: int) -> Any:
        self.g_loss.update_state(g_loss, sample_weight=num)
        self.d_loss.update_state(d_loss, sample_weight=num)
        return {"g_loss": self.g_loss.result(), "d_loss": self.d_loss.result()}


class Plain(GAN):
    """The oracle: the same with JAX alone, on the global batches."""

    def fitted(self, epochs: int) -> None:
        g_weights = self.generator.trainable_variables
        d_weights = self.discriminator.trainable_variables
        for optimizer, weights in (
            (self.g_optimizer, g_weights),
            (self.d_optimizer, d_weights),
        ):
            optimizer.build(weights)

        def loss(which: int, values: Any, x: Any, noise: Any) -> Any:
            mapping = zip([*g_weights, *d_weights], values, strict=True)
            with keras.StatelessScope(state_mapping=list(mapping)):
                return self.losses_of(x, noise)[which]

        gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
        for _ in range(epochs):
            for start in range(0, len(X), 8):
                batch = X[start : start + 8], NOISE[start : start + 8]
                values = [v.value for v in [*g_weights, *d_weights]]
                num = len(g_weights)
                of_g = gradient(0, values, *batch)[:num]
                of_d = gradient(1, values, *batch)[num:]
                self.d_optimizer.apply(of_d, d_weights)
                self.g_optimizer.apply(of_g, g_weights)


class WithState(GAN):
    """As Keras has it on JAX; a slice of the weights belongs to each network."""

    def losses_at(self, values: Any, data: Any) -> tuple[Any, Any]:
        mapping = list(zip(self.trainable_variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.losses_of(*data[:2])

    def gradients(self, values: Any, data: Any) -> Any:
        """Both losses, and the gradients of each for all weights."""
        found = [
            jax.value_and_grad(lambda v, i=i: self.losses_at(v, data)[i])(values)
            for i in (0, 1)
        ]
        return zip(*found, strict=True)

    def logs_of(self, values: Any, losses: Any, num: int) -> Any:
        logs, new = {}, []
        for metric, loss in zip(self.metrics, losses, strict=True):
            own = values[len(new) : len(new) + len(metric.variables)]
            own = metric.stateless_update_state(own, loss, num)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, new

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        logs, metrics = self.logs_of(
            metrics, self.losses_at(trainable, data), len(data[0])
        )
        return logs, (trainable, non_trainable, metrics)


class TwoOptimizers(WithState):
    """The optimizers are not in the state: the step assigns what they change."""

    def compile(self, g_optimizer: Any, d_optimizer: Any) -> None:
        super().compile(g_optimizer, d_optimizer)
        g_optimizer.build(self.generator.trainable_variables)
        d_optimizer.build(self.discriminator.trainable_variables)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        losses, (g_grads, d_grads) = self.gradients(trainable, data)
        num, new = len(self.generator.trainable_variables), []
        for optimizer, grads, own in (
            (self.g_optimizer, g_grads[:num], trainable[:num]),
            (self.d_optimizer, d_grads[num:], trainable[num:]),
        ):
            values = [v.value for v in optimizer.variables]
            own, values = optimizer.stateless_apply(values, grads, own)
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value)
            new += own
        logs, metrics = self.logs_of(metrics, losses, len(data[0]))
        return logs, (new, non_trainable, slots, metrics)


def made(kind: Any, built: bool, scope: Any) -> Any:
    keras.utils.set_random_seed(1)
    with scope:
        model = kind(built)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    return model


def weights_of(model: Any) -> Any:
    return [*model.generator.get_weights(), *model.discriminator.get_weights()]


def trained(kind: Any, scope: Any, *, built: bool = True, epochs: int = 2) -> Any:
    model = made(kind, built, scope)
    history = model.fit(X, NOISE, epochs=epochs, shuffle=False, **OPTIONS).history
    assert sorted(history) == ["d_loss", "g_loss"]
    return model, history


@functools.cache
def plain() -> Any:
    model = made(Plain, True, contextlib.nullcontext())
    model.fitted(2)
    return weights_of(model)


@pytest.mark.slow(but=["Taped-2", "TwoOptimizers-2"])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", [Taped, TwoOptimizers])
def test_a_gan(
    kind: Any, num_replicas: int, strategy_of: Any, assert_same: Any
) -> None:
    model, _ = trained(kind, strategy_of(num_replicas).scope())
    assert_same(weights_of(model), plain())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["central storage", "fully sharded", "shard_update"])
def test_under_other_strategies(name: str, assert_same: Any) -> None:
    model, _ = trained(Taped, STRATEGIES[name]().scope())
    assert_same(weights_of(model), plain())


@pytest.mark.slow
def test_networks_that_are_not_built(strategy_of: Any, assert_same: Any) -> None:
    found = [trained(Taped, strategy_of(n).scope(), built=False) for n in (1, 2)]
    for model, _ in found:
        assert model.generator.built
        assert not model.optimizer.built  # Keras' default, which nobody uses.
    assert_same(*[(weights_of(model), history) for model, history in found])


class Watching(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen = weights_of(self.model)


@pytest.mark.slow
def test_the_rest_of_a_model(
    strategy_of: Any, assert_same: Any, tmp_path: Path
) -> None:
    """Callbacks, validation, evaluate, predict, single batches, saved weights."""
    watching = Watching()
    saving = keras.callbacks.ModelCheckpoint(
        tmp_path / "last.weights.h5", save_weights_only=True
    )
    with strategy_of(2).scope():
        model = made(Taped, False, contextlib.nullcontext())
    history = model.fit(
        X,
        NOISE,
        validation_data=(X, NOISE),
        callbacks=[watching, saving],
        epochs=2,
        **OPTIONS,
    ).history
    found = model.evaluate(X, NOISE, return_dict=True, **OPTIONS)
    assert_same(found, {name: history[f"val_{name}"][-1] for name in found})
    assert_same(watching.seen, weights_of(model))
    copy = made(Taped, True, strategy_of(2).scope())
    copy.train_on_batch(X[:8], NOISE[:8])  # Keras loads into slots that are there.
    copy.load_weights(tmp_path / "last.weights.h5")
    assert_same(weights_of(copy), weights_of(model))
    assert_same(copy.evaluate(X, NOISE, return_dict=True, **OPTIONS), found)
    assert_same(copy.test_on_batch(X, NOISE, return_dict=True), found)
    logs = copy.train_on_batch(X, NOISE, return_dict=True)
    assert sorted(logs) == ["d_loss", "g_loss"]
    model.save_weights(tmp_path / "again.weights.h5")


@pytest.mark.slow
def test_data_of_a_generator_begin_anew(strategy_of: Any) -> None:
    """The batch that the networks are built with is trained on, too."""

    def batches() -> Any:
        for start in range(0, 16, 4):
            yield X[start : start + 4], NOISE[start : start + 4]

    found = []
    for built in (True, False):
        model = made(Taped, built, strategy_of(2).scope())
        model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0)
        found.append(int(model.g_optimizer.iterations.value))
    assert found == [4, 4]


class Autoencoder(keras.Model):
    """Has what `compile` makes, a `predict_step`, and no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(3), layers.Dense(6)

    def train_step(self, data: Any) -> Any:
        with rx.GradientTape() as tape:
            y = self.decoder(self.encoder(data[0]))
            loss = self.compute_loss(*data[:2], y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self._logs(data, y, loss)

    def test_step(self, data: Any) -> Any:
        y = self.decoder(self.encoder(data[0]))
        return self._logs(data, y, self.compute_loss(*data[:2], y))

    def predict_step(self, data: Any) -> Any:
        return self.decoder(self.encoder(data))

    def _logs(self, data: Any, y: Any, loss: Any) -> Any:
        self.metrics[0].update_state(loss, sample_weight=len(data[0]))
        return self.compute_metrics(*data[:2], y)


class Called(Autoencoder):
    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


@pytest.mark.slow
def test_what_compile_makes(strategy_of: Any, assert_same: Any) -> None:
    def work(kind: Any, num_replicas: int) -> Any:
        keras.utils.set_random_seed(1)
        with strategy_of(num_replicas).scope():
            model = kind()
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(X, X, epochs=2, shuffle=False, **OPTIONS).history
        predicted = model.predict(X, **OPTIONS)
        return history, model.get_weights(), predicted, model.evaluate(X, X, **OPTIONS)

    expected = work(Called, 1)
    for num_replicas in (1, 2):
        assert_same(work(Autoencoder, num_replicas), expected)


def test_evaluate_first(strategy_of: Any) -> None:
    with strategy_of(2).scope():
        model = Autoencoder()
        model.compile("adam", "mse", metrics=["mae"])
    before = model.evaluate(X, X, return_dict=True, **OPTIONS)
    history = model.fit(X, X, validation_data=(X, X), **OPTIONS).history
    assert history["val_loss"][0] < before["loss"]


def test_no_call_and_no_step_is_keras_own_error(strategy_of: Any) -> None:
    class Nothing(keras.Model):
        pass

    with strategy_of(2).scope():
        model = Nothing()
        model.compile("adam", "mse")
    with pytest.raises(Exception, match=r"does not have a `call\(\)`"):
        model.fit(X, X, **OPTIONS)
