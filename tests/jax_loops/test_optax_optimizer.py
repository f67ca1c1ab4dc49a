"""`rx.OptaxOptimizer`: Keras models train as with plain Optax on one device."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from tests.conftest import mirrored
from tests.jax_loops.transformations import (
    ALL,
    FEW,
    GRADS,
    PARAMS,
    STRATEGIES,
    assert_equal,
    by_hand,
)

import replicax as rx


def applied(strategy: rx.Strategy, names: Any) -> dict[str, Any]:
    """Optimizers and weights after `apply` with each replica's gradients."""
    with strategy.scope():
        trained = {
            name: (
                rx.OptaxOptimizer(ALL[name]()),
                [keras.Variable(x, name=key) for key, x in PARAMS.items()],
            )
            for name in names
        }
        for optimizer, weights in trained.values():
            optimizer.build(weights)

    def step(grads: Any) -> None:
        # The sum over the replicas is the mean of all four gradients.
        grads = [grads[key].sum(0) / 4 for key in PARAMS]
        for optimizer, weights in trained.values():
            optimizer.apply(grads, weights)

    for grads in GRADS:
        num = strategy.num_replicas_in_sync
        parts = {
            key: rx.PerReplica(g.reshape(num, -1, *g.shape[1:]))
            for key, g in grads.items()
        }
        strategy.run(step, (parts,))
    return trained


@pytest.mark.slow(but=["mirrored, 2", "mirrored, 4", "sharded update, 4"])
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param(name, ALL if name.endswith(", 4") else FEW, id=name)
        for name in STRATEGIES
    ],
)
def test_as_optax_on_one_device(strategy: str, names: Any) -> None:
    for name, (optimizer, weights) in applied(STRATEGIES[strategy](), names).items():
        params, state = by_hand(name)
        assert_equal([v.value for v in weights], [params[key] for key in PARAMS])
        slots = [v.value for v in optimizer.variables[1:]]  # After the iterations.
        leaves = jax.tree.leaves(state)
        assert len(slots) == len(leaves)
        assert_equal(slots, leaves)


def network(*, built: bool = True) -> keras.Sequential:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(32, "relu", name="hidden"),
        keras.layers.Dense(10, name="out"),
    ]
    return keras.Sequential([keras.Input((64,)), *layers] if built else layers)


def compiled(model: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def fitted(model: keras.Model, data: Any, **options: Any) -> list[float]:
    x, y = (a[:103] for a in data)  # The last of four batches has 7 examples.
    return model.fit(
        x, y, batch_size=32, shuffle=False, verbose=0, **{"epochs": 2, **options}
    ).history["loss"]


def transformation() -> Any:
    def mask(params: Any) -> Any:
        return {path: path.endswith("kernel") for path in params}

    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1, mask=mask)
    )


def fitted_by_hand(data: Any) -> list[np.ndarray]:
    model, tx = network(), transformation()
    params = {v.path: v.value for v in model.trainable_variables}
    state, order = tx.init(params), list(params)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        logits, _ = model.stateless_call([params[path] for path in order], [], x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean()

    for _ in range(2):
        for i in range(0, 103, 32):
            x, y = (a[:103][i : i + 32] for a in data)
            grads = jax.grad(loss_fn)(params, x, y)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return [np.asarray(params[path]) for path in order]


FITS: dict[str, Callable[[], Any]] = STRATEGIES | {"none": lambda: None}


@pytest.mark.slow(but=["none", "mirrored, 4", "sharded update, 4"])
@pytest.mark.parametrize("name", ["none", *STRATEGIES])
def test_fit(name: str, digits: Any) -> None:
    strategy = FITS[name]()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = network(built=False)
        compiled(model, rx.OptaxOptimizer(transformation()))
    fitted(model, digits)
    for weight, expected in zip(
        model.get_weights(), fitted_by_hand(digits), strict=True
    ):
        # Norms and means are summed in another order.
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 2},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "mixed_float16": {},
}


@pytest.mark.slow(but=[f"mirrored, 2-{name}" for name in OPTIONS])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("strategy", ["none", "mirrored, 2", "fully sharded, 4"])
def test_options_of_keras(name: str, strategy: str, digits: Any) -> None:
    def weights(make: Callable[..., Any], strategy: Any) -> list[np.ndarray]:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = compiled(network(), make(**OPTIONS[name]))
        fitted(model, digits)
        return model.get_weights()

    def ours(**options: Any) -> Any:
        return rx.OptaxOptimizer(optax.sgd(0.1, momentum=0.9), **options)

    if name == "mixed_float16":
        keras.config.set_dtype_policy("mixed_float16")
    try:
        expected = weights(
            lambda **options: keras.optimizers.SGD(0.1, momentum=0.9, **options), None
        )
        actual = weights(ours, FITS[strategy]())
    finally:
        keras.config.set_dtype_policy("float32")
    tolerance = 1e-2 if name == "mixed_float16" else 1e-4
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 10)


def test_state_is_sharded_and_named_as_the_weights() -> None:
    strategy = STRATEGIES["fully sharded, 4"]()
    with strategy.scope():
        model = compiled(network(), rx.OptaxOptimizer(optax.adam(0.01)))
        model.optimizer.build(model.trainable_variables)
    _, count, bias, *_ = [v.path for v in model.optimizer.variables]
    assert count == "optax/0_count"
    assert bias.endswith("hidden_bias_0_mu")
    slots = [v for v in model.optimizer.variables if v.shape == (64, 32)]
    assert len(slots) == 2
    for slot in slots:
        assert {s.data.shape for s in slot.value.addressable_shards} == {(16, 32)}


def injected(rate: Any = 0.1) -> rx.OptaxOptimizer:
    return rx.OptaxOptimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=rate))


@pytest.mark.parametrize("strategy", ["none", "mirrored, 2"])
def test_callbacks_change_an_injected_learning_rate(strategy: str, digits: Any) -> None:
    def weights(optimizer: Any, strategy: Any) -> list[np.ndarray]:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = compiled(network(), optimizer())
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        plateau = keras.callbacks.ReduceLROnPlateau(
            "loss", 0.1, patience=0, min_delta=9
        )
        history = model.fit(
            *(a[:64] for a in digits),
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[rates, plateau],
        )
        np.testing.assert_allclose(
            history.history["learning_rate"], [0.05, 0.025, 0.00125], rtol=1e-6
        )
        return model.get_weights()

    actual = weights(injected, FITS[strategy]())
    for x, y in zip(
        actual, weights(lambda: keras.optimizers.SGD(0.1), None), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


HIDDEN = {
    "inside": lambda: rx.OptaxOptimizer(optax.sgd(0.1)),
    "scheduled": lambda: injected(lambda step: 0.1 / (1 + step)),
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_learning_rate_is_neither_read_nor_set(make: Any, digits: Any) -> None:
    model = compiled(network(), make())
    for callback in (
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
    ):
        with pytest.raises(TypeError, match=r"optax\.inject_hyperparams"):
            fitted(model, digits, callbacks=[callback])
    with pytest.raises(TypeError, match=r"optax\.inject_hyperparams"):
        model.optimizer.learning_rate = 0.2
    with pytest.raises(TypeError, match="no schedule"):
        float(model.optimizer.learning_rate)
    with pytest.raises(TypeError, match="not known before the optimizer is built"):
        make().learning_rate = 0.2


def test_a_whole_model_is_not_saved(tmp_path: Any, digits: Any) -> None:
    rx.OneDeviceStrategy("cpu:0")  # The first strategy replaces functions of Keras.
    model = compiled(network(), rx.OptaxOptimizer(optax.adam(0.01)))
    fitted(model, digits, epochs=1)
    path = tmp_path / "model.keras"
    path.write_text("an earlier file")
    with pytest.raises(NotImplementedError, match="save_weights"):
        model.save(path)
    assert path.read_text() == "an earlier file"
    model.save_weights(tmp_path / "model.weights.h5")


@keras.saving.register_keras_serializable("tests")
class Adam(rx.OptaxOptimizer):
    def __init__(self, learning_rate: float = 0.01, **options: Any) -> None:
        super().__init__(optax.adam(learning_rate), **options)
        self.rate = learning_rate

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.rate, **super().get_config()}


def test_a_model_with_a_registered_subclass_is_saved(
    tmp_path: Any, digits: Any
) -> None:
    model = compiled(network(), Adam(0.02, global_clipnorm=0.5))
    fitted(model, digits, epochs=1)
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert restored.optimizer.rate == 0.02
    assert fitted(restored, digits) == fitted(model, digits)


def test_a_checkpoint_has_the_state(tmp_path: Any, digits: Any) -> None:
    def made(strategy: rx.Strategy) -> keras.Model:
        with strategy.scope():
            return compiled(network(), rx.OptaxOptimizer(transformation()))

    first = made(mirrored(2))
    fitted(first, digits, epochs=1)
    path = rx.Checkpoint(model=first).save(str(tmp_path / "saved"))
    second = made(STRATEGIES["fully sharded, 4"]())
    fitted(second, digits, epochs=1)  # Makes the state.
    rx.Checkpoint(model=second).restore(path).assert_consumed()
    np.testing.assert_allclose(fitted(second, digits), fitted(first, digits), rtol=1e-5)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"learning_rate.*arguments of Optax'"):
        rx.OptaxOptimizer(optax.adam(0.1), learning_rate=0.1)
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation"):
        rx.OptaxOptimizer("adam")
    with pytest.raises(TypeError, match="combine gradients already"):
        rx.OptaxOptimizer(rx.distributed(optax.adam(0.1)))
    weights = [keras.Variable(np.ones(3), name="a"), keras.Variable(1.0, name="b")]
    ones = [jnp.ones(3), jnp.ones(())]
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        rx.OptaxOptimizer(optax.contrib.reduce_on_plateau()).apply(ones, weights)
    optimizer = rx.OptaxOptimizer(optax.adam(0.1))
    optimizer.build(weights)
    with (
        pytest.warns(UserWarning, match="Gradients do not exist"),
        pytest.raises(ValueError, match=r"\['a'\] have no gradient"),
    ):
        optimizer.apply([None, jnp.ones(())], weights)
    odd = optax.stateless(lambda g, _: g)._replace(
        update=lambda g, state, params=None: (g, (state, jnp.zeros(2)))
    )
    with pytest.raises(TypeError, match="changes the structure"):
        rx.OptaxOptimizer(odd).apply(ones, weights)
