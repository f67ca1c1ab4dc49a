"""`rx.losses.whole_batch` and `per_example` in `compile`, steps and custom loops."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops
from tests.strategies import parity

import replicax as rx

X = np.random.default_rng(0).normal(size=(23, 6)).astype("float32")
Y = (X[:, :3] > 0).astype("float32")


def contrastive(a: Any, b: Any) -> Any:
    """CLIP's loss of two views, `[b, d]` each."""
    logits = ops.matmul(a, ops.transpose(b))
    places = ops.arange(ops.shape(a)[0])
    entropy = keras.losses.sparse_categorical_crossentropy
    there = entropy(places, logits, from_logits=True)
    back = entropy(places, ops.transpose(logits), from_logits=True)
    return ops.mean(there + back) / 2


class TwoTowers(keras.Model):
    """CLIP's shape: two networks, one loss of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = keras.layers.Dense(4), keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.left(x[:, :3]), self.right(x[:, 3:])

    def loss_of(self, x: Any) -> Any:
        return rx.losses.whole_batch(contrastive)(*self(x))


class Stateless(TwoTowers):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        return rx.losses.whole_batch(contrastive)(*y_pred)


class Taped(TwoTowers):
    def train_step(self, data: Any) -> Any:
        x, _ = data
        with rx.GradientTape() as tape:
            loss = self.loss_of(x)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Functional(TwoTowers):
    def train_step(self, data: Any) -> Any:
        variables = self.trainable_variables
        loss, grads = rx.value_and_grad(self.loss_of, variables)(data[0])
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


def two_towers(strategy: Any, kind: type[TwoTowers]) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind()
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.1))
    logs = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return logs["loss"], model.get_weights()


NAMES = ["mirrored 2", "mirrored 4", "fully sharded", "central storage", "virtual"]
STRATEGIES = {name: parity.STRATEGIES[name] for name in NAMES}


@pytest.mark.slow(
    but=["mirrored 4-Stateless", "fully sharded-Taped", "virtual-Functional"]
)
@pytest.mark.parametrize("kind", [Stateless, Taped, Functional])
@pytest.mark.parametrize("name", STRATEGIES)
def test_clip_in_steps_of_ones_own(name: str, kind: Any, assert_same: Any) -> None:
    one = rx.OneDeviceStrategy("cpu:0")
    assert_same(two_towers(STRATEGIES[name](), kind), two_towers(one, kind))


@pytest.mark.slow(but=["mirrored 4", "virtual"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_of_jax(name: str) -> None:
    """Gradients of shares are summed; values of shares, too."""

    def loss_of(w: Any, x: Any) -> Any:
        return contrastive(jnp.tanh(x @ w["a"]), x @ w["b"]) + 0.1 * jnp.sum(
            w["a"] ** 2
        )

    rng = np.random.default_rng(1)
    w = {k: rng.normal(size=(6, 4)).astype("float32") for k in "ab"}
    strategy = STRATEGIES[name]()

    def step(x: Any) -> Any:
        whole = rx.losses.whole_batch(
            lambda left, right: (
                contrastive(left, right) + 0.1 * jnp.sum(w_now["a"] ** 2)
            )
        )

        def share(w: Any) -> Any:
            nonlocal w_now
            w_now = w
            return whole(jnp.tanh(x @ w["a"]), x @ w["b"])

        w_now = w
        loss, grads = jax.value_and_grad(share)(w)
        return rx.get_replica_context().all_reduce("sum", (loss, grads))

    batches = strategy.experimental_distribute_dataset(
        [X[:8], X[8:16], X[16:23], X[16:22]]
    )
    for batch, rows in zip(batches, [X[:8], X[8:16], X[16:23], X[16:22]], strict=True):
        result = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
        loss, grads = jax.value_and_grad(loss_of)(w, rows)
        np.testing.assert_allclose(result[0][0], loss, rtol=1e-5)
        for name in "ab":
            # float32, summed over the rows in another order.
            np.testing.assert_allclose(
                result[0][1][name], grads[name], rtol=1e-4, atol=1e-6
            )


def test_a_mean_of_losses_in_a_loop() -> None:
    """A replica's loss is a share: its mean over steps is of the whole."""
    for num in (1, 2, 4):
        strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num)])
        with strategy.scope():
            means = [keras.metrics.Mean() for _ in range(4)]
            mse = keras.losses.MeanSquaredError()

        def step(x: Any, means: Any = means, mse: Any = mse) -> None:
            loss = mse(x[:, :1], x[:, 1:2])
            means[0].update_state(loss)
            means[1].update_state(2 * loss + 0.5 * loss, sample_weight=3.0)
            means[2].update_state(rx.get_replica_context().all_reduce("sum", loss))
            means[3].update_state(ops.mean(ops.square(x[:, 0] - x[:, 1])))

        strategy.run(step, args=(_split(strategy),))
        expected = np.mean((X[:8, 0] - X[:8, 1]) ** 2)
        results = [float(x.result()) for x in means]
        np.testing.assert_allclose(
            results, [expected, 2.5 * expected, expected, expected], rtol=1e-5
        )


def _split(strategy: Any) -> Any:
    return next(iter(strategy.experimental_distribute_dataset([X[:8]])))


def test_a_loss_of_a_compiled_function_is_refused_as_a_mean() -> None:
    strategy = STRATEGIES["mirrored 2"]()
    with strategy.scope():
        mean = keras.metrics.Mean()

    @jax.jit
    def loss_of(x: Any) -> Any:
        return keras.losses.MeanSquaredError()(x[:, :1], x[:, 1:2])

    with pytest.raises(rx.errors.ContextError, match=r"all_reduce\('sum', loss\)"):
        strategy.run(lambda x: mean.update_state(loss_of(x)), args=(_split(strategy),))


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="largest")
        self.number = self.add_variable((), "zeros", name="it")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.number.assign(ops.maximum(self.number, ops.mean(p)))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.number)


def test_a_metric_in_a_loop() -> None:
    results = []
    for num in (1, 4):
        strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num)])
        with strategy.scope():
            metric = Largest()

        def step(x: Any, metric: Any = metric) -> None:
            rx.losses.whole_batch(metric.update_state)(x, x)

        for batch in strategy.experimental_distribute_dataset([X[:8], X[8:15], X[:6]]):
            strategy.run(step, args=(batch,))
        results.append(float(metric.result()))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0] == pytest.approx(max(X[:8].mean(), X[8:15].mean(), X[:6].mean()))


def fitted(loss: Any, num: int = 2, metrics: Any = list, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    with rx.MirroredStrategy([f"cpu:{i}" for i in range(num)]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", loss, metrics=metrics(), **options)
    return model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history


def absolute(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p), axis=-1)


def test_declared_per_example_gathers_nothing(monkeypatch: Any) -> None:
    gathers = []
    gather = rx.ReplicaContext.all_gather
    monkeypatch.setattr(
        rx.ReplicaContext,
        "all_gather",
        lambda *args, **options: gathers.append(args) or gather(*args, **options),
    )
    whole = fitted(absolute, metrics=lambda: [absolute])
    assert gathers
    gathers.clear()
    declared = rx.losses.per_example(absolute)
    own = fitted(declared, metrics=lambda: [declared])
    assert not gathers
    for name, values in whole.items():
        np.testing.assert_allclose(own[name], values, rtol=1e-5)


def test_too_many_bytes_are_refused_by_name(monkeypatch: Any) -> None:
    from replicax.keras import compiled

    monkeypatch.setattr(compiled, "MOST_BYTES", 100)
    with pytest.raises(
        ValueError, match=r"'absolute'.*per_example.*whole_batch"
    ) as error:
        fitted(absolute)
    assert "loss 'absolute'" in str(error.value)
    with pytest.raises(ValueError, match="metric 'absolute'"):
        fitted("mse", metrics=lambda: [absolute])
    whole = rx.losses.whole_batch(absolute)
    assert fitted(whole, metrics=lambda: [whole])["loss"]
    assert fitted("mse", metrics=lambda: [rx.losses.whole_batch(Largest())])


class Scalar(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred))


@pytest.mark.parametrize(
    "fn", [lambda y, p: ops.mean(y - p), Scalar(name="a_scalar")], ids=["fn", "class"]
)
def test_per_example_of_a_scalar_loss(fn: Any) -> None:
    with pytest.raises(ValueError, match=r"per_example.*scalar.*whole_batch"):
        fitted(rx.losses.per_example(fn))


@pytest.mark.parametrize("declare", [rx.losses.whole_batch, rx.losses.per_example])
def test_no_functions(declare: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a function.*got 3"):
        declare(3)


def test_arguments_without_rows_and_results_that_are_no_scalars() -> None:
    strategy = STRATEGIES["mirrored 2"]()

    def run(fn: Any, *extra: Any) -> None:
        strategy.run(
            lambda x: rx.losses.whole_batch(fn)(x, *extra), args=(_split(strategy),)
        )

    with pytest.raises(ValueError, match="one row per example"):
        run(lambda x, scale: ops.mean(x) * scale, jnp.float32(2))
    with pytest.raises(ValueError, match="one row per example"):
        run(lambda x, w: ops.mean(x), jnp.ones((6, 2)))
    with pytest.raises(ValueError, match=r"shape \(8,\); expected a scalar"):
        run(lambda x: ops.mean(x, axis=-1))


class Pairs(keras.layers.Layer):
    """Logits of all pairs of rows, as KerasHub's CLIP returns them."""

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(x))

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], shape[0])


@pytest.mark.slow(but=["mirrored 4-known", "fully sharded-own"])
@pytest.mark.parametrize(
    "loss",
    ["sparse_categorical_crossentropy", lambda y, p: ops.mean(p)],
    ids=["known", "own"],
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_that_compares_rows_is_refused(name: str, loss: Any) -> None:
    with STRATEGIES[name]().scope():
        model = keras.Sequential([keras.Input((6,)), Pairs()])
        model.compile("sgd", loss)
    with pytest.raises(
        ValueError, match=r"has shape \(\d, \d\).* all pairs, in a loss"
    ):
        model.fit(X[:8], np.arange(8) % 2, batch_size=8, verbose=0)
    with pytest.raises(
        ValueError, match=r"evaluate.*has shape .* all pairs, in a loss"
    ):
        model.evaluate(X[:8], np.arange(8) % 2, batch_size=8, verbose=0)


def test_outputs_as_wide_as_the_batch_are_none_of_these(assert_same: Any) -> None:
    """Four rows a replica, and four outputs; added losses stay those of the step."""

    def train(strategy: Any) -> Any:
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.Dense(4, activity_regularizer="l2")]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile("sgd", "mse")
        y = np.tile(Y, 2)[:, :4]
        history = model.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"], model.get_weights()

    assert_same(train(STRATEGIES["mirrored 2"]()), train(None))
