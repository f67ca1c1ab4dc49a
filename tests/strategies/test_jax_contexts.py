"""`run` and `fit` inside JAX's own contexts do what they do outside."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from tests.strategies.parity import (
    NUM_FEATURES,
    STRATEGIES,
    compiled,
    data,
    network,
)

import replicax as rx


def users_mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])


NAMES = ["one", "mirrored 4", "virtual", "model parallel", "fully sharded"]
MESHES = ["mesh", "explicit mesh"]
CONTEXTS: dict[str, Callable[[], Any]] = {
    "mesh": lambda: jax.set_mesh(users_mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(users_mesh(AxisType.Explicit)),
    "device": lambda: jax.default_device(jax.devices()[1]),
    "leaks": jax.checking_leaks,
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
}


def looped(strategy: rx.Strategy, context: Any) -> list[Any]:
    """Weights, losses and gathered rows of three steps of gradient descent."""

    def step(batch: Any, w: Any, key: Any, rate: Any) -> Any:
        context = rx.get_replica_context()
        x, y = batch
        noise = jax.random.normal(key, (), "float32")
        number = context.replica_id_in_sync_group.astype("float32")

        def loss(w: Any) -> Any:
            errors = (x @ w)[:, 0] - y.astype("float32") + noise
            return (errors * errors).sum()

        grads = context.all_reduce("sum", jax.grad(loss)(w))
        return w - rate * grads, loss(w) + number, x

    w = np.ones((NUM_FEATURES, 1), "float32")
    key = jax.random.key(1)
    out = []
    with context:
        dataset = strategy.experimental_distribute_dataset(data(72), batch_size=24)
        for batch in dataset:
            w, losses, x = strategy.run(step, (batch, w, key, np.float32(1e-3)))
            out += [
                strategy.reduce("sum", losses, axis=None),
                strategy.gather(x, axis=0),
                *map(np.asarray, strategy.experimental_local_results(losses)),
                w,
            ]
    return [np.asarray(x) for x in out]


@functools.cache
def expected_of(name: str) -> list[Any]:
    return looped(STRATEGIES[name](), contextlib.nullcontext())


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *itertools.product(NAMES, MESHES),
        *itertools.product(["virtual"], [x for x in CONTEXTS if x not in MESHES]),
    ],
)
def test_loops(name, context) -> None:
    for actual, wanted in zip(
        looped(STRATEGIES[name](), CONTEXTS[context]()), expected_of(name), strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_loop_without_jit() -> None:
    actual = looped(STRATEGIES["virtual"](), jax.disable_jit())
    for x, wanted in zip(actual, expected_of("virtual"), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-4, atol=1e-5)


def fitted(strategy: rx.Strategy, context: Any, folder: Any) -> list[Any]:
    keras.utils.set_random_seed(1)
    x, y = data(60)
    with context:
        with strategy.scope():
            model = compiled(
                network(keras.layers.Dense(8), keras.layers.Dropout(0.2)),
                metrics=["accuracy"],
            )
        out = [*model.fit(x, y, batch_size=24, verbose=0).history["loss"]]
        checkpoint = rx.Checkpoint(model=model)
        checkpoint.restore(checkpoint.save(folder / "saved")).assert_consumed()
        strategy.check_replicas()
        out += model.evaluate(x, y, batch_size=24, verbose=0)
        out += [*model.predict(x, batch_size=24, verbose=0), *model.get_weights()]
    return out


@pytest.mark.parametrize(
    "name", ["virtual", pytest.param("model parallel", marks=pytest.mark.slow)]
)
def test_models(name, tmp_path) -> None:
    """A model that is made, trained, saved and restored under the user's mesh."""
    strategy = STRATEGIES[name]()
    expected = fitted(strategy, contextlib.nullcontext(), tmp_path / "plain")
    for context in MESHES:
        actual = fitted(strategy, CONTEXTS[context](), tmp_path / context)
        for x, wanted in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)


def test_the_users_mesh_is_back_afterwards() -> None:
    strategy = STRATEGIES["mirrored 4"]()
    with jax.set_mesh(users_mesh(AxisType.Auto)):
        strategy.run(lambda: 1.0)
        with pytest.raises(ZeroDivisionError):
            strategy.run(lambda: 1 / 0)
        assert jax.sharding.get_abstract_mesh().axis_names == ("data",)
        spec = jax.sharding.PartitionSpec("data")
        x = jax.jit(lambda x: x, out_shardings=spec)(jnp.ones(8))
        assert x.sharding.spec == spec


def test_transfers_are_guarded_as_in_jit() -> None:
    """Arguments of an earlier step are on the devices; numbers are transferred."""
    strategy = STRATEGIES["mirrored 4"]()
    w = strategy.run(lambda w: w, (np.ones(3, "float32"),))
    (batch,) = strategy.experimental_distribute_dataset(data(8), batch_size=8)

    def step(batch: Any, w: Any) -> Any:
        return w + rx.get_replica_context().all_reduce("sum", batch[0].sum())

    strategy.run(step, (batch, w))
    with jax.transfer_guard("disallow"):
        strategy.run(step, (batch, w))
        for call in (jax.jit(lambda x: x), lambda x: strategy.run(lambda x: x, (x,))):
            with pytest.raises(jax.errors.JaxRuntimeError, match="host-to-device"):
                call(1.0)
