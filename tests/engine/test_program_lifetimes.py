"""How long programs live: as long as the models that they train."""

import copy
import gc
import pickle
import weakref
from typing import Any

import jax.numpy as jnp
import keras
import pytest
from tests.conftest import mirrored, values_of

import replicax as rx


class Trainer:
    """Trains its own model, as a script does for each fold of its data."""

    def __init__(self, strategy: rx.Strategy) -> None:
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.SGD(0.1)

        self.num_traces = 0

    def step(self, x: Any) -> Any:
        self.num_traces += 1
        variables = self.model.trainable_variables
        with rx.GradientTape() as tape:
            loss = keras.ops.mean(self.model(x) ** 2)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss


trainer: Trainer


def step_of_a_global(x: Any) -> Any:
    return trainer.step(x)


def step_of(kind: str, strategy: rx.Strategy) -> tuple[Any, Trainer]:
    global trainer
    made = Trainer(strategy)
    if kind == "method":
        return made.step, made
    if kind == "closure":
        return lambda x: made.step(x), made
    trainer = made
    return step_of_a_global, made


@pytest.mark.parametrize("kind", ["method", "closure", "global"])
def test_models_one_after_another_are_freed(kind: str) -> None:
    """The function that reads a global keeps its last value alive."""
    strategy, refs = mirrored(2), []
    count = keras.metrics.Mean()  # Lives on.
    for _ in range(4):
        step, made = step_of(kind, strategy)
        for _ in range(2):
            count.update_state(values_of(strategy.run(step, (jnp.ones((2, 2)),)))[0])
        refs.append(weakref.ref(made.model.trainable_variables[0]))
    del step, made
    gc.collect()
    assert [ref() is None for ref in refs[:-1]] == 3 * [True]
    assert len(strategy.runner.programs) == (kind == "global")


def test_models_that_take_turns_keep_their_programs() -> None:
    strategy = mirrored(2)
    trainers = [Trainer(strategy) for _ in range(3)]
    for each in trainers:
        strategy.run(each.step, (jnp.ones((2, 2)),))
    num_traces = [each.num_traces for each in trainers]
    for each in trainers * 2:
        strategy.run(each.step, (jnp.ones((2, 2)),))
    assert [each.num_traces for each in trainers] == num_traces
    assert len(strategy.runner.programs) == 3


def test_a_copy_of_a_weight_has_no_programs() -> None:
    strategy = mirrored(2)
    each = Trainer(strategy)
    strategy.run(each.step, (jnp.ones((2, 2)),))
    owners = [v for v in each.model.variables if "_replicax_programs" in vars(v)]
    (programs,) = (vars(v)["_replicax_programs"] for v in owners)
    assert len(programs) == 1
    assert copy.deepcopy(programs) == pickle.loads(pickle.dumps(programs)) == {}
