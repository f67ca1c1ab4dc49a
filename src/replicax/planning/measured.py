"""Rates of this machine's devices, measured in a second or two.

For devices without published figures that would be true of them: a CPU core shares its
caches, and logical devices share the cores. All devices work at once, as in a step.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.planning.rates import Rates

__all__ = ["measure_rates"]

_AXIS = "replica"
_ROUNDS = 5
_CPU_SIZES = (512, 2**22)
_GPU_SIZES = (4096, 2**27)


def measure_rates(devices: Sequence[Any]) -> Rates:
    """Measure products of matrices, copies, and sums over the devices.

    Args:
        devices: Devices of one kind of this machine.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))
    width, length = _CPU_SIZES if devices[0].platform == "cpu" else _GPU_SIZES
    num = len(devices)
    product = _seconds(mesh, lambda x: x @ x, (width, width))
    copy = _seconds(mesh, lambda x: x + 1, (length,))
    ring = None
    if num > 1:
        total = _seconds(mesh, lambda x: lax.psum(x, _AXIS), (length // 4,))
        # In a ring each device sends twice the array, less its own part.
        ring = 2 * (num - 1) / num * length / total
    stats = devices[0].memory_stats() or {}
    return Rates(
        peak_flops=2 * width**3 / product,
        memory_bytes=stats.get("bytes_limit"),
        memory_bandwidth=2 * 4 * length / copy,
        ring_bandwidth=ring,
        source=f"measured on {num} x {devices[0].device_kind} of this machine: a "
        f"float32 product of {width} x {width}, a copy of {4 * length / 2**20:.0f} MiB"
        + (f", a sum of {length / 2**20:.0f} MiB" if num > 1 else ""),
    )


def _seconds(mesh: Mesh, fn: Callable[[Any], Any], shape: tuple[int, ...]) -> float:
    """The shortest of a few runs of `fn` on every device at once."""
    spec = PartitionSpec(_AXIS)
    program = jax.jit(
        jax.shard_map(
            lambda x: fn(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
        ),
        donate_argnums=0,  # Fresh memory would cost more than the copy.
    )
    array = jax.jit(
        lambda: jnp.zeros((mesh.size, *shape), jnp.float32),
        out_shardings=NamedSharding(mesh, spec),
    )()
    array = jax.block_until_ready(program(array))
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        array = jax.block_until_ready(program(array))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
