"""A training step by hand in JAX: gradients, their mean, an optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from jax_models import MODELS, Weights, computing, first_weights, loss_of

__all__ = ["State", "first_state", "step_of"]

State = dict[str, Any]
"""`params`, `stats`, the moving statistics, and the optimizer's `m`, `v`, `step`."""

Step = Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]


def step_of(case: Case, replicas: int) -> Step:
    """A step of the case on each of so many replicas, along the axis "replica"."""
    model = MODELS[case.model](case)

    def loss_and_stats(
        params: Weights, stats: Weights, x: jax.Array, y: jax.Array
    ) -> tuple[jax.Array, Weights]:
        """The mean loss over this replica's examples, and new moving statistics."""
        logits, stats = model(computing(case, params), stats, x)
        return loss_of(case, logits, y), stats

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        """Gradients, their mean over the replicas, and the optimizer."""
        params, stats = state["params"], state["stats"]
        if replicas > 1:
            # Gradients of this replica's loss alone: of parameters that all replicas
            # have in common, JAX would sum each gradient where it arises.
            params = jax.lax.pcast(params, "replica", to="varying")
        grad_fn = jax.value_and_grad(loss_and_stats, has_aux=True)
        (loss, stats), grads = grad_fn(params, stats, x, y)
        if replicas > 1:
            loss, stats, grads = jax.lax.pmean((loss, stats, grads), "replica")
        update = _sgd if case.momentum else _adam
        return update(case, state, grads) | {"stats": stats}, loss

    return step


def _adam(case: Case, state: State, grads: Weights) -> State:
    """Parameters, their moments and the step's number after Keras' Adam."""
    t = state["step"] + 1
    power = t.astype("float32")
    rate = case.learning_rate * jnp.sqrt(1 - 0.999**power) / (1 - 0.9**power)
    m = jax.tree.map(lambda m, g: m + (g - m) * (1 - 0.9), state["m"], grads)
    v = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - 0.999), state["v"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-7), state["params"], m, v
    )
    return {"params": params, "m": m, "v": v, "step": t}


def _sgd(case: Case, state: State, grads: Weights) -> State:
    """Parameters and their moments after Keras' SGD with momentum."""
    rate, momentum = case.learning_rate, case.momentum
    m = jax.tree.map(lambda m, g: m * momentum - g * rate, state["m"], grads)
    return {"params": jax.tree.map(jnp.add, state["params"], m), "m": m}


def first_state(case: Case) -> State:
    """All that a step changes, before the first."""
    params, stats = first_weights(case)
    state = {"params": params, "stats": stats, "m": jax.tree.map(np.zeros_like, params)}
    if not case.momentum:
        state |= {"v": jax.tree.map(np.zeros_like, params), "step": np.int32(0)}
    return state
