"""Warnings of gradients that a step sums before it passes them to the optimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

Grads = list[Any]


def _own(grads: Grads) -> Grads:
    return grads


def _summed(grads: Grads) -> Grads:
    return rx.get_replica_context().all_reduce("sum", grads)


def _clipped(grads: Grads) -> Grads:
    return rx.clip_by_global_norm(_summed(grads), 1.0)[0]


def _scaled(grads: Grads) -> Grads:
    """Own gradients, divided by a number that replicas share."""
    norm = sum(keras.ops.sum(keras.ops.square(g)) for g in grads)
    scale = rx.get_replica_context().all_reduce("mean", norm)
    return [g / keras.ops.sqrt(scale) for g in grads]


def _one_summed(grads: Grads) -> Grads:
    return [_summed(grads[:1])[0], *grads[1:]]


def _train(
    combine: Callable[[Grads], Grads],
    strategy: rx.Strategy,
    *,
    tape: bool,
    optimizer: Callable[..., keras.Optimizer],
) -> tuple[list[str], keras.Model]:
    """Messages of one step's warnings, and the model after it."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = optimizer()

    def loss(x: Any) -> Any:
        return keras.ops.sum(keras.ops.square(model(x)))

    def step(x: Any) -> None:
        variables = model.trainable_variables
        if tape:
            with rx.GradientTape() as recorded:
                value = loss(x)
            grads = recorded.gradient(value, variables)
        else:
            _, grads = rx.value_and_grad(lambda: loss(x), variables)()
        optimizer.apply(combine(grads), variables)

    num = strategy.num_replicas_in_sync
    rows = np.random.default_rng(0).normal(size=(num, 2, 3)).astype("float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(step, (rx.PerReplica(jax.numpy.asarray(rows)),))
    return [str(w.message) for w in caught if "all_reduce" in str(w.message)], model


# The last bias is a scalar, like the factor that clips it, so it is not counted.
@pytest.mark.parametrize("tape", [True, False])
@pytest.mark.parametrize(
    ("combine", "num_named"),
    [(_own, 0), (_scaled, 0), (_summed, 4), (_clipped, 3), (_one_summed, 1)],
)
def test_a_warning_counts_gradients_that_are_combined(combine, num_named, tape) -> None:
    found, _ = _train(combine, mirrored(2), tape=tape, optimizer=keras.optimizers.SGD)
    if num_named:
        assert found
        assert all(f"{num_named} of 4 gradients" in text for text in found)
        assert "once more" in found[0]
    else:
        assert not found


def test_one_replica_warns_of_nothing() -> None:
    assert not _train(_summed, mirrored(1), tape=True, optimizer=keras.optimizers.SGD)[
        0
    ]


def test_updates_that_replicas_divide_warn_too() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_update=True)
    found, _ = _train(_summed, strategy, tape=True, optimizer=keras.optimizers.Adam)
    assert found


def test_the_second_sum_multiplies_by_the_number_of_replicas() -> None:
    def share(grads: Grads) -> Grads:
        return [g / 2 for g in _summed(grads)]

    found, ours = _train(share, mirrored(2), tape=True, optimizer=keras.optimizers.SGD)
    assert found
    _, own = _train(_own, mirrored(2), tape=True, optimizer=keras.optimizers.SGD)
    for a, b in zip(ours.weights, own.weights, strict=True):
        np.testing.assert_allclose(a.value, b.value, rtol=1e-6, atol=1e-7)
