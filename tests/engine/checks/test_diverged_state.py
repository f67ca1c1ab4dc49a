"""State that is equal on all replicas in one call, and differs in the next."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.conftest import mirrored

import replicax as rx

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def params_of() -> dict[str, jax.Array]:
    return {"w": jnp.ones((3,)), "b": jnp.zeros(())}


def train(strategy: rx.Strategy, step: Any, state: Any, *, steps: int = 2) -> Any:
    (batch,) = strategy.experimental_distribute_dataset(X, batch_size=8)
    for _ in range(steps):
        state = strategy.run(step, args=(state, batch))
    return state


def test_a_forgotten_all_reduce_is_named() -> None:
    optimizer = optax.adam(1e-2)

    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state
        grads = jax.grad(loss_of)(params, x)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), moments

    state = params_of(), optimizer.init(params_of())
    with pytest.raises(rx.DivergenceError) as error:
        train(mirrored(2), step, state)
    message = str(error.value)
    assert "step (line" in message
    assert "args[0][0]['b']" in message
    assert "and 1 others" in message
    assert "count" not in message
    assert "all_reduce" in message


def test_lambdas_of_a_loop_are_the_same_step() -> None:
    strategy = mirrored(2)
    (batch,) = strategy.experimental_distribute_dataset(X, batch_size=8)

    def add(total: Any) -> Any:
        return strategy.run(lambda total, x: total + x.sum(), args=(total, batch))

    total = add(0.0)
    with pytest.raises(rx.DivergenceError, match=r"args\[0\] was equal"):
        add(total)


def test_another_function_may_use_differing_results() -> None:
    strategy = mirrored(2)
    (batch,) = strategy.experimental_distribute_dataset(X, batch_size=8)
    predictions = strategy.run(lambda x: 2 * x, args=(batch,))
    total = strategy.run(lambda x, y: (x - y).sum(), args=(batch, predictions))
    np.testing.assert_allclose(strategy.reduce("sum", total), -X.sum(), rtol=1e-5)
