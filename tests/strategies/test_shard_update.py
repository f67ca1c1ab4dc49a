"""Sharded updates equal whole ones; a device holds a shard of optimizer state."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import optimizers
from tests.strategies.parity import (
    NUM_FEATURES,
    NUM_STEPS,
    NUM_UNITS,
    assert_same,
    batches,
    blocks_of,
    bytes_on,
    compiled,
    example_loss,
    fitted,
    functional_step,
    looped,
    network,
    texts_of_programs,
)

import replicax as rx


def mirrored(num: int = 4, *, shard_update: bool = False, **options: Any) -> Any:
    return rx.MirroredStrategy(
        [f"cpu:{i}" for i in range(num)], shard_update=shard_update, **options
    )


sharded = functools.partial(mirrored, shard_update=True)


class OneForMatrices:
    """Which optimizer trains a variable, of two that are made once."""

    def __init__(self) -> None:
        self._own = {2: optimizers.Adam(0.01), 1: optimizers.SGD(0.1)}

    def __call__(self, variable: Any) -> Any:
        return self._own[len(variable.shape)]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adadelta": lambda: optimizers.Adadelta(0.5),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam, amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Lion": lambda: optimizers.Lion(0.005),
    "Loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=2
    ),
    "Muon": lambda: optimizers.Muon(0.01, exclude_layers=["dense_1"]),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Schedule-free": lambda: optimizers.ScheduleFreeAdamW(0.01, warmup_steps=2),
    "Several": lambda: optimizers.MultiOptimizer(OneForMatrices()),
    "SGD, momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "SGD, Nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "weight_decay": {"weight_decay": 0.1},
    "schedule": {"learning_rate": optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)},
    "loss_scale_factor": {"loss_scale_factor": 4.0},
}


# Newer than the oldest Keras that is supported.
for name, kind in {
    "Schedule-free": "ScheduleFreeAdamW",
    "Several": "MultiOptimizer",
}.items():
    if not hasattr(optimizers, kind):
        del OPTIMIZERS[name]


def test_all_of_keras_optimizers_are_here() -> None:
    known = {
        name
        for name, kind in vars(optimizers).items()
        if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)
    }
    tested = {type(make()).__name__ for make in OPTIMIZERS.values()}
    assert known - {"Optimizer"} == tested


def of_kind(kind: str, options: dict[str, Any]) -> Callable[[], Any]:
    if kind == "Adam":
        return lambda: optimizers.Adam(**{"learning_rate": 0.01} | options)
    return lambda: optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9} | options)


ALL = OPTIMIZERS | {name: of_kind("Adam", options) for name, options in OPTIONS.items()}


@functools.cache
def updated(*, shard_update: bool) -> dict[str, Any]:
    """The weights of each optimizer after the same gradients, in one program."""
    strategy, rng = mirrored(shard_update=shard_update), np.random.default_rng(0)
    shapes = [(NUM_FEATURES, NUM_UNITS), (NUM_UNITS,)]
    starts = [rng.normal(size=shape).astype("float32") for shape in shapes]
    with strategy.scope():
        trained = {
            name: (make(), [keras.Variable(x, name="weight") for x in starts])
            for name, make in ALL.items()
        }
        for optimizer, weights in trained.values():
            optimizer.build(weights)

    def step(grads: Any) -> None:
        for optimizer, weights in trained.values():
            optimizer.apply(grads, weights)

    for _ in range(NUM_STEPS):
        grads = [rng.normal(size=(4, *shape)).astype("float32") for shape in shapes]
        strategy.run(step, ([rx.PerReplica(g) for g in grads],))
    return {
        name: [np.asarray(v) for v in [*weights, *optimizer.variables]]
        for name, (optimizer, weights) in trained.items()
    }


@pytest.mark.slow(but=["Adam", "Adafactor", "Muon"])
@pytest.mark.parametrize("name", ALL)
def test_updates(name: str) -> None:
    actual = updated(shard_update=True)[name]
    assert_same(actual, updated(shard_update=False)[name])


def test_accumulated_updates_with_virtual_replicas() -> None:
    make = of_kind("Adam", OPTIONS["accumulation"])
    several = sharded(2, replicas_per_device=2)
    assert_same(looped(several, make), looped(mirrored(4), make))


def test_applied_twice_in_a_step(caplog: Any) -> None:
    def twice(model: Any, optimizer: Any) -> Callable[..., Any]:
        once = functional_step(model, optimizer)

        def step(x: Any, y: Any) -> Any:
            return once(x, y), once(x, y), jnp.sum(model.layers[0].kernel.value)

        return step

    make = OPTIMIZERS["Adam"]
    assert_same(looped(sharded(2), make, twice), looped(mirrored(2), make, twice))
    (record,) = caplog.records
    assert "each device makes the whole update" in record.getMessage()
    assert "dense/kernel' is used after optimizer.apply" in re.sub(
        r"_\d+", "", record.getMessage()
    )


def test_some_variables_have_no_gradient() -> None:
    def partial(model: Any, optimizer: Any) -> Callable[..., Any]:
        def step(x: Any, y: Any) -> None:
            variables = model.trainable_variables
            _, grads = rx.value_and_grad(lambda: example_loss(model, x, y), variables)()
            optimizer.apply([None, *grads[1:]], variables)

        return step

    make = OPTIMIZERS["Adam"]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        actual = looped(sharded(2), make, partial)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        expected = looped(mirrored(2), make, partial)
    assert_same(actual, expected)


def test_a_subset_of_the_variables_is_trained() -> None:
    def subset(model: Any, optimizer: Any) -> Callable[..., Any]:
        def step(x: Any, y: Any) -> None:
            variables = model.trainable_variables[:2]
            _, grads = rx.value_and_grad(lambda: example_loss(model, x, y), variables)()
            optimizer.apply(grads, variables)

        return step

    def make() -> Any:
        return optimizers.SGD(0.1, momentum=0.9)

    assert_same(looped(sharded(2), make, subset), looped(mirrored(2), make, subset))


@pytest.mark.parametrize(
    "ops",
    [
        rx.HierarchicalCopyAllReduce(group_size=2),
        pytest.param(rx.NcclAllReduce(num_packs=2), marks=pytest.mark.slow),
    ],
    ids=lambda ops: type(ops).__name__,
)
def test_cross_device_operations(ops: Any) -> None:
    make = OPTIMIZERS["Adam"]
    actual = looped(sharded(cross_device_ops=ops), make)
    assert_same(actual, by_adam())


@functools.cache
def by_adam() -> Any:
    return looped(mirrored(), OPTIMIZERS["Adam"])


@pytest.mark.parametrize("compression", ["bfloat16", "float16"])
def test_compression_hook_and_packs(compression) -> None:
    options = rx.CommunicationOptions(
        compression=compression,
        bytes_per_pack=512,
        gradient_hook=lambda grads: [None if g is None else 2 * g for g in grads],
    )
    make = OPTIMIZERS["SGD, momentum"]
    actual = looped(sharded(2, communication_options=options), make)
    expected = looped(mirrored(2, communication_options=options), make)
    # A sum of numbers of 8 bits depends on the order in which they are added.
    assert_same(actual, expected, rtol=0.02, atol=0.02)
    plain = looped(mirrored(2), make)
    kernel = next(name for name in plain if name.endswith(" kernel"))
    assert np.abs(actual[kernel] - plain[kernel]).max() > 0.03  # The hook was called.


def test_each_device_holds_a_shard_of_the_optimizer_state() -> None:
    model, _ = fitted(sharded(), lambda: compiled(network(), OPTIMIZERS["Adam"]()))
    kernel = model.layers[0].kernel
    assert blocks_of(kernel) == [(NUM_FEATURES, NUM_UNITS)] * 4
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    assert len(slots) == 2
    for slot in slots:
        assert blocks_of(slot) == [(NUM_FEATURES // 4, NUM_UNITS)] * 4
    total = sum(np.asarray(v).nbytes for v in slots)
    for device in jax.devices()[:4]:
        assert bytes_on(slots, device) == total // 4


def test_the_step_scatters_and_gathers() -> None:
    def collectives(strategy: Any) -> list[tuple[str, str]]:
        with strategy.scope():
            model = compiled(network(), OPTIMIZERS["Adam"]())
        texts = texts_of_programs(strategy)
        (batch,) = batches(strategy, 1)
        strategy.run(functional_step(model, model.optimizer), batch)
        found = re.findall(
            r"= \(?([a-z0-9]+\[[0-9,]*\]).* (all-reduce|reduce-scatter|all-gather)\(",
            texts[0][1],
        )
        return [(kind, shape) for shape, kind in found]

    whole, part = "f32[48,32]", "f32[12,32]"
    in_parts = collectives(sharded())
    assert ("reduce-scatter", part) in in_parts
    # Of the weight; the optimizer state is not gathered.
    assert in_parts.count(("all-gather", whole)) == 1
    # What is summed whole are the small arrays, joined to one.
    assert largest_sum(in_parts) < 48 * 32 <= largest_sum(collectives(mirrored()))


def largest_sum(collectives: list[tuple[str, str]]) -> int:
    """Elements of the largest array that is all-reduced."""
    return max(
        math.prod(int(n) for n in re.findall(r"\d+", shape.split("[")[1]))
        for kind, shape in collectives
        if kind == "all-reduce"
    )


def test_different_updates_are_refused() -> None:
    strategy = sharded(2)
    with strategy.scope():
        model, optimizer = network(), optimizers.Adam()

    def step() -> None:
        number = rx.get_replica_context().replica_id_in_sync_group
        slot = optimizer.variables[2]
        slot.assign(slot + number)

    optimizer.build(model.trainable_variables)
    with pytest.raises(rx.DivergenceError, match="momentum"):
        strategy.run(step)


def test_assigned_optimizer_state_stays_sharded() -> None:
    strategy = sharded(2)
    with strategy.scope():
        model, optimizer = network(), optimizers.Adam()
        optimizer.build(model.trainable_variables)
    slot = optimizer.variables[2]
    slot.assign(np.ones(slot.shape))
    assert blocks_of(slot) == [(NUM_FEATURES // 2, NUM_UNITS)] * 2

    def step(x: Any) -> Any:
        slot.assign(2 * slot + x)
        return jnp.sum(slot.value)

    total = strategy.run(step, (1.0,))
    assert blocks_of(slot) == [(NUM_FEATURES // 2, NUM_UNITS)] * 2
    np.testing.assert_array_equal(slot, np.full(slot.shape, 3.0))
    np.testing.assert_array_equal(total, 3 * NUM_FEATURES * NUM_UNITS)
