"""`rx.OptaxOptimizer`: Keras models train as Optax by itself on one device."""

from typing import Any

import jax
import keras
import pytest
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
        # Of all four gradients the sum over the replicas is the mean.
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
