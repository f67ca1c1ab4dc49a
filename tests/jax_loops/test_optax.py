"""`rx.distributed`: each transformation trains as Optax by itself on one device."""

import math
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.jax_loops.transformations import (
    ALL,
    FEW,
    GRADS,
    KERNEL,
    MIXING,
    PARAMS,
    STRATEGIES,
    assert_equal,
    by_hand,
)

import replicax as rx
from replicax.engine.signature import flatten_call
from replicax.jax_loops.divided_updates import DividedState


def trained(strategy: rx.Strategy, names: Any) -> dict[str, tuple[Any, Any]]:
    """What the transformations make of each replica's gradients, in one program."""
    txs = {name: rx.distributed(ALL[name]()) for name in names}
    with strategy.scope():
        values = {name: (PARAMS, tx.init(PARAMS)) for name, tx in txs.items()}

    def step(values: Any, grads: Any) -> Any:
        new = {}
        for name, (params, state) in values.items():
            mean = jax.tree.map(lambda g: g.mean(0), grads)
            updates, state = txs[name].update(mean, state, params)
            new[name] = optax.apply_updates(params, updates), state
        return new

    for grads in GRADS:
        # Each replica gets as many of the four gradients.
        parts = jax.tree.map(
            lambda g: rx.PerReplica(
                g.reshape(strategy.num_replicas_in_sync, -1, *g.shape[1:])
            ),
            grads,
        )
        values = strategy.run(step, (values, parts))
    return values


def whole(state: Any) -> Any:
    """The state of a transformation, with its blocks joined."""
    if not isinstance(state, DividedState):
        return state
    leaves, structure = jax.tree.flatten(state.inner, is_leaf=rx_values)
    return structure.unflatten(
        x if dim is None else np.concatenate(x.values, axis=dim)
        for x, dim in zip(leaves, state.dims, strict=True)
    )


def rx_values(x: Any) -> bool:
    return isinstance(x, rx.PerReplica)


def is_sharded(strategy: str) -> bool:
    return strategy.startswith(("fully", "sharded"))


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param(name, ALL if name.endswith(", 4") else FEW, id=name)
        for name in STRATEGIES
    ],
)
def test_as_optax_on_one_device(strategy: str, names: Any, caplog: Any) -> None:
    values = trained(STRATEGIES[strategy](), names)
    for name, (params, state) in values.items():
        expected_params, expected_state = by_hand(name)
        assert all(isinstance(x, jax.Array) for x in params.values()), name
        assert_equal(params, expected_params)
        assert isinstance(state, DividedState) == is_sharded(strategy)
        assert_equal(whole(state), expected_state)
    # Transformations that mix elements get whole arrays, and say so.
    num_mixing = len(MIXING.keys() & set(names)) if is_sharded(strategy) else 0
    texts = [record.getMessage() for record in caplog.records]
    assert len([t for t in texts if "needs whole arrays" in t]) == num_mixing


def test_each_replica_holds_a_block_of_the_state() -> None:
    strategy = STRATEGIES["sharded update, 4"]()
    ((_, state),) = trained(strategy, ["adam"]).values()
    moments = [x for x in jax.tree.leaves(state) if x.size == math.prod(KERNEL)]
    assert len(moments) == 2
    for moment in moments:
        assert {s.data.shape for s in moment.addressable_shards} == {(1, 12, 32)}


def test_the_update_scatters_and_gathers() -> None:
    tx = rx.distributed(optax.adam(0.01))
    strategy = STRATEGIES["sharded update, 4"]()
    with strategy.scope():
        state = tx.init(PARAMS)
    grads = jax.tree.map(rx.PerReplica, GRADS[0])
    strategy.run(tx.update, (grads, state, PARAMS))
    program = list(strategy.runner.programs)[-1]  # The first one made the state.
    call = flatten_call((grads, state, PARAMS), {}, strategy.runner._place)
    text = program.lower([], call.arrays).compile().as_text()
    found = re.findall(
        r"= \(?([a-z0-9]+\[[0-9,]*\]).* (all-reduce|reduce-scatter|all-gather)\(", text
    )
    assert sorted(kind for _, kind in found) == [
        "all-gather",
        "all-reduce",
        "reduce-scatter",
    ]
    assert ("f32[12,32]", "reduce-scatter") in found
