"""Sharded weights: results equal those of whole weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras import layers, optimizers
from tests.strategies.parity import (
    BATCH_SIZE,
    NUM_FEATURES,
    NUM_UNITS,
    assert_same,
    batches,
    blocks_of,
    bytes_on,
    compiled,
    data,
    example_loss,
    fitted,
    functional_step,
    looped,
    network,
    tape_step,
    texts_of_programs,
)

import replicax as rx
from replicax.engine.replica_axis import ReplicaAxis


def fully_sharded(num: int = 2, **options: Any) -> rx.FullyShardedStrategy:
    return rx.FullyShardedStrategy([f"cpu:{i}" for i in range(num)], **options)


def mirrored(num: int = 2, **options: Any) -> rx.MirroredStrategy:
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num)], **options)


def test_each_device_holds_a_shard() -> None:
    model, _ = fitted(fully_sharded(), lambda: compiled(network()))
    kernel = model.layers[0].kernel
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert len(slots) == 2
    for variable in (kernel, *slots):
        assert blocks_of(variable) == [(NUM_FEATURES // 2, NUM_UNITS)] * 2
        for device in jax.devices()[:2]:
            assert bytes_on([variable], device) == kernel.shape[0] * NUM_UNITS * 2
    small = model.layers[-1].kernel
    assert blocks_of(small) == [(NUM_UNITS, 10)] * 2


def test_weights_are_whole_where_a_step_uses_them() -> None:
    strategy = fully_sharded(4)
    with strategy.scope():
        model = network()
    kernel = model.layers[0].kernel

    def step() -> Any:
        assert kernel.value.shape == (NUM_FEATURES, NUM_UNITS)
        before = jnp.sum(kernel.value)
        kernel.assign(kernel.value + 1)
        return before, jnp.sum(kernel.value)

    expected = np.asarray(kernel).sum()
    before, after = strategy.run(step)
    np.testing.assert_allclose(before, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after, before + kernel.value.size, rtol=1e-5)
    assert blocks_of(kernel) == [(NUM_FEATURES // 4, NUM_UNITS)] * 4


def test_weights_outside() -> None:
    """Keras' methods for weights work on shards."""
    strategy = fully_sharded()
    with strategy.scope():
        model = network()
    weights = [np.ones_like(w) for w in model.get_weights()]
    model.set_weights(weights)
    kernel = model.layers[0].kernel
    assert blocks_of(kernel) == [(NUM_FEATURES // 2, NUM_UNITS)] * 2
    assert model.count_params() == sum(w.size for w in weights)
    strategy.check_replicas()


@pytest.mark.parametrize("how", ["run", "fit"])
def test_the_step_gathers_weights_and_scatters_gradients(how: str) -> None:
    strategy = fully_sharded(4)
    with strategy.scope():
        hidden = (layers.Dense(n, activation="relu") for n in (32, 64))
        model = compiled(network(*hidden), optimizers.Adam())
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
    texts = texts_of_programs(strategy)
    if how == "fit":
        model.fit(*data(BATCH_SIZE), batch_size=BATCH_SIZE, verbose=0)
    else:
        (batch,) = batches(strategy, 1)
        strategy.run(functional_step(model, optimizer), batch)
    lowered, compiled_text = texts[0]
    lines = compiled_text.splitlines()

    def shapes(kind: str) -> list[str]:
        made = [x.split("= ")[1] for x in lines if f" {kind}(" in x]
        return [x.lstrip("(").split("{")[0] for x in made]

    assert "f32[12,32]" in shapes("reduce-scatter")
    assert "f32[48,32]" in shapes("all-gather")
    assert "f32[48,32]" not in shapes("all-reduce")
    # What is kept for the backward pass: no weight that was gathered.
    kept = [x for x in lowered.splitlines() if "optimization_barrier" in x]
    assert any("x64xf32>" in x for x in kept)
    assert not any("tensor<32x64xf32>" in x for x in kept)


def penalty_step(model: Any, optimizer: Any) -> Any:
    """A step whose loss has the gradients' squares in it."""
    weights = model.trainable_variables

    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            return example_loss(model, x, y)

        def penalized() -> Any:
            value, grads = rx.value_and_grad(loss, weights)()
            return value + 0.1 * sum(jnp.sum(g**2) for g in grads)

        value, grads = rx.value_and_grad(penalized, weights)()
        optimizer.apply([g / 2 for g in grads], weights)
        return value

    return step


@pytest.mark.parametrize(
    "make_step",
    [
        functional_step,
        tape_step,
        pytest.param(penalty_step, marks=pytest.mark.slow),
    ],
)
def test_loops_where_gathers_and_sums_overlap(monkeypatch, make_step) -> None:
    def make() -> Any:
        return optimizers.Adam(0.01)

    expected = looped(mirrored(), make, make_step)
    # As on GPUs.
    monkeypatch.setattr(ReplicaAxis, "overlaps", True)
    monkeypatch.setattr("replicax.engine.overlap.buckets._LEAST_BYTES", 1024)
    assert_same(looped(fully_sharded(), make, make_step), expected)


def test_fit_where_gathers_and_sums_overlap(monkeypatch) -> None:
    def make() -> Any:
        hidden = (layers.Dense(n, activation="relu") for n in (32, 64))
        return compiled(network(*hidden), optimizers.Adam(0.01))

    _, expected = fitted(mirrored(), make)
    monkeypatch.setattr(ReplicaAxis, "overlaps", True)
    monkeypatch.setattr("replicax.engine.overlap.buckets._LEAST_BYTES", 1024)
    strategy = fully_sharded()
    texts = texts_of_programs(strategy)
    _, actual = fitted(strategy, make)
    assert_same(actual, expected)
    # The backward pass gathers weights after the forward pass; its other inputs, such
    # as activations, do not wait.
    lowered, _ = texts[0]
    barriers = [x for x in lowered.splitlines() if "optimization_barrier" in x]
    assert any("tensor<32x32xf32>, tensor<f32>" in x for x in barriers)
    assert not any(f"tensor<{BATCH_SIZE // 2}x64xf32>" in x for x in barriers[:1])


@pytest.mark.slow
def test_compression_and_hooks() -> None:
    options = rx.CommunicationOptions(
        gradient_hook=lambda grads: [None if g is None else 2 * g for g in grads]
    )

    def make() -> Any:
        return optimizers.SGD(0.1)

    assert_same(
        looped(fully_sharded(communication_options=options), make),
        looped(mirrored(communication_options=options), make),
    )
