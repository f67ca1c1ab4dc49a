"""What is measured after training, by itself: sums of gradients, starts of programs."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.engine.group import ReplicaGroup
from replicax.engine.packing import sum_gradients

__all__ = ["start_seconds", "sum_seconds"]

_NUM_SUMS = 5
_NUM_STARTS = 10
_MOST_ARRAYS = 512


def start_seconds(num_arrays: int, group: ReplicaGroup | None = None) -> float:
    """Time to start a program that computes nothing, and to see that it is done.

    Every process of the group has to call it. There is nothing in the program that
    waits for another process.

    Args:
        num_arrays: How many arrays it takes and returns, as a step does variables.
        group: The replicas on whose devices it runs; None: JAX's default device.
    """
    num_arrays = max(1, min(num_arrays, _MOST_ARRAYS))
    places: Any = None if group is None else [group.mirrored] * num_arrays

    def step(values: list[Any]) -> list[Any]:
        return [x + 1 for x in values]

    start = jax.jit(step, donate_argnums=0, out_shardings=places)
    zeros = jax.jit(lambda: [jnp.zeros(())] * num_arrays, out_shardings=places)
    values = jax.block_until_ready(start(zeros()))

    def again() -> None:
        nonlocal values
        values = jax.block_until_ready(start(values))

    return _median(again, _NUM_STARTS)


def sum_seconds(strategy: Any, variables: Sequence[Any]) -> float | None:
    """Time to sum arrays like the gradients over the replicas, and nothing else.

    It is the difference between two programs, with the sums and without. Every worker
    of the strategy has to call it.

    Args:
        strategy: Whose replicas, operations and options.
        variables: Keras variables, whose gradients are summed in a step.

    Returns:
        Seconds; None where that would not be how gradients travel: each replica has a
        part of the weights.
    """
    group: ReplicaGroup = strategy.group
    if group.layouts.split_weights or group.layouts.of_path is not None:
        return None
    if group.axis.size == 1 or not variables:
        return 0.0
    shapes = tuple((tuple(v.shape), str(v.dtype)) for v in variables)
    options = dataclasses.replace(group.communication, gradient_hook=None)
    operations, axis = group.cross_device_ops, group.axis

    def make() -> list[Any]:
        return [jnp.ones(shape, dtype) for shape, dtype in shapes]

    def total(gradients: list[Any]) -> list[Any]:
        return first_of(sum_gradients(gradients, operations, axis, options))

    def first_of(arrays: list[Any]) -> list[Any]:
        return [jnp.ravel(x)[:1] for x in arrays]

    gradients = strategy.run(make)

    def once(step: Callable[..., Any]) -> None:
        jax.block_until_ready(jax.tree.leaves(strategy.run(step, args=(gradients,))))

    once(total)  # They compile.
    once(first_of)
    with_sums = _median(lambda: once(total), _NUM_SUMS)
    # Starting a program and looking at it is no part of the sum.
    return max(0.0, with_sums - _median(lambda: once(first_of), _NUM_SUMS))


def _median(call: Callable[[], None], number: int) -> float:
    times = []
    for _ in range(number):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
