"""Measures the parts of a step separately: gradient sums, program starts, memory."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import keras

from replicax.engine.communication import sum_gradients
from replicax.engine.devices import Device
from replicax.engine.group import ReplicaGroup
from replicax.report.runs import MemoryUse
from replicax.strategies.strategy import Strategy

__all__ = ["memory_of", "start_seconds", "sum_seconds"]

_NUM_SUMS = 5
_NUM_STARTS = 10
_MOST_ARRAYS = 512
_STATUS = Path("/proc/self/status")


def start_seconds(num_arrays: int, group: ReplicaGroup | None = None) -> float:
    """Measure the time to start a program without collectives and wait for its end.

    Every process of the group must call it.
    """
    num_arrays = max(1, min(num_arrays, _MOST_ARRAYS))
    places = None if group is None else [group.mirrored] * num_arrays

    def step(values: list[jax.Array]) -> list[jax.Array]:
        return [x + 1 for x in values]

    start = jax.jit(step, donate_argnums=0, out_shardings=places)
    zeros = jax.jit(lambda: [jnp.zeros(())] * num_arrays, out_shardings=places)
    values = jax.block_until_ready(start(zeros()))

    def run() -> None:
        nonlocal values
        values = jax.block_until_ready(start(values))

    return _median_seconds(run, _NUM_STARTS)


def sum_seconds(
    strategy: Strategy, variables: Sequence[keras.Variable]
) -> float | None:
    """Measure the time to all-reduce arrays of the gradients' shapes.

    The result is the difference between two programs, with and without the all-reduce;
    None for strategies that shard or place weights, where it is not measured. Every
    worker of the strategy must call it.
    """
    group = strategy.group
    if group.layouts.split_weights or group.layouts.of_path is not None:
        return None
    if group.axis.size == 1 or not variables:
        return 0.0
    shapes = tuple((tuple(v.shape), str(v.dtype)) for v in variables)
    options = dataclasses.replace(group.communication, gradient_hook=None)
    operations, axis = group.cross_device_ops, group.axis

    def ones() -> list[jax.Array]:
        return [jnp.ones(shape, dtype) for shape, dtype in shapes]

    def reduce(gradients: list[jax.Array]) -> list[jax.Array]:
        sums = sum_gradients(gradients, operations, axis, options)
        return first_elements([x for x in sums if x is not None])

    def first_elements(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jnp.ravel(x)[:1] for x in arrays]

    gradients = strategy.run(ones)

    def run(step: Callable[..., list[jax.Array]]) -> None:
        jax.block_until_ready(jax.tree.leaves(strategy.run(step, args=(gradients,))))

    run(reduce)  # The first call compiles.
    run(first_elements)
    with_sums = _median_seconds(lambda: run(reduce), _NUM_SUMS)
    # Both include the time to start a program and to wait for it.
    return max(0.0, with_sums - _median_seconds(lambda: run(first_elements), _NUM_SUMS))


def _median_seconds(call: Callable[[], None], number: int) -> float:
    durations = []
    for _ in range(number):
        began = time.perf_counter()
        call()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def memory_of(devices: Sequence[Device]) -> MemoryUse:
    """Read the memory use of the fullest device; on CPUs, that of the process."""
    all_stats = [stats for stats in (d.memory_stats() for d in devices) if stats]
    if all_stats:
        return MemoryUse(
            of="device",
            bytes=_largest(all_stats, "bytes_in_use"),
            peak_bytes=_largest(all_stats, "peak_bytes_in_use"),
        )
    if not _STATUS.exists():  # Not on Linux.
        return MemoryUse()
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    now, peak = (1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return MemoryUse(bytes=now, peak_bytes=peak)


def _largest(all_stats: Sequence[Mapping[str, int]], name: str) -> int | None:
    return max((stats[name] for stats in all_stats if name in stats), default=None)
