"""Rates of devices: published for TPU chips, measured for this machine.

`devices.toml` has the published figures; `cards` reads the figures of GPUs.

For this machine's devices published figures would be wrong: CPU cores share caches, and
logical devices share the cores. `measure_rates` measures for a second or two, with all
devices busy at once, as in a step.
"""

import dataclasses
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.engine.devices import Device

__all__ = ["CHIPS", "KERNEL_SECONDS", "Chip", "Rates", "device_tables", "measure_rates"]

KERNEL_SECONDS = 2.5e-6
"""Overhead of a GPU kernel: on an H100, 1.7 us, and the time to use all processors."""

_AXIS = "replica"
_ROUNDS = 5
# Width of the measured matrices, and elements of the measured arrays.
_CPU_SIZES = (512, 2**22)
_GPU_SIZES = (4096, 2**27)


def device_tables(kind: str) -> dict[str, dict[str, Any]]:
    """Read the tables of devices of a kind, `"chips"` or `"cards"`, by name."""
    file = resources.files("replicax.planning") / "devices.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))[kind]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one device, while all other devices are busy too.

    Attributes:
        peak_flops: Multiplications and additions per second.
        memory_bandwidth: Bytes per second of the device's memory.
        source: The origin of the figures.
        memory_bytes: Capacity of the memory; None: shared with others, or unknown.
        ring_bandwidth: Bytes per second that the device sends in a ring over links;
            None: computed from the links of a slice.
        network_bandwidth: Bytes per second of the device's share of its host's network,
            which connects slices of TPUs and hosts of GPUs; None: unknown.
        flops_by_type: FLOP/s of products, by XLA's name of the element type; other
            types have `peak_flops`.
        elementwise_flops: FLOP/s of other operations than products; None:
            `peak_flops`.
        attained_flops: Share of the FLOP/s above that kernels attain.
        attained_bandwidth: Share of `memory_bandwidth` that kernels attain.
        kernel_seconds: Overhead of one kernel.
    """

    peak_flops: float
    memory_bandwidth: float
    source: str
    memory_bytes: int | None = None
    ring_bandwidth: float | None = None
    network_bandwidth: float | None = None
    flops_by_type: Mapping[str, float] = dataclasses.field(default_factory=dict)
    elementwise_flops: float | None = None
    attained_flops: float = 1.0
    attained_bandwidth: float = 1.0
    kernel_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A kind of TPU chip.

    Attributes:
        name: The name in topologies, such as `"v5e"`.
        rates: Rates of compute in bfloat16, and of the memory (HBM).
        link_bandwidth: Bytes per second over one link to a neighbour, one direction.
        num_dims: Dimensions of the grid of chips.
        ring_multiple: A dimension of the grid closes to a ring if its size is a
            multiple of this.
        shapes: The usual sizes of slices.
        max_chips: Chips in the largest slice.
        options: Further options of libtpu for this chip.
    """

    name: str
    rates: Rates
    link_bandwidth: float
    num_dims: int
    ring_multiple: int
    shapes: tuple[tuple[int, ...], ...]
    max_chips: int
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    noun = "slice"
    largest_scale = 256  # Number of chips up to which efficiencies are predicted.

    def describe_names(self) -> str:
        """List the names of slices of this chip, for messages."""
        names = (f"{self.name}:{'x'.join(map(str, shape))}" for shape in self.shapes)
        cubes = " and boxes of such cubes" if self.num_dims == 3 else ""
        return ", ".join(names) + cubes

    def domain(self, device: Device) -> int:
        """The index of a device's slice; links connect the chips of one slice."""
        return getattr(device, "slice_index", 0)

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a slice can have this shape: a usual one, or a box of 4x4x4 cubes."""
        return shape in self.shapes or (
            len(shape) == self.num_dims == 3
            and all(n > 0 and n % 4 == 0 for n in shape)
            and list(shape) == sorted(shape)
            and math.prod(shape) <= self.max_chips
        )

    def shape_of(self, num_chips: int) -> tuple[int, ...]:
        """The most square or cubic shape of `num_chips`, a power of two.

        Example:
            >>> CHIPS["v5e"].shape_of(32), CHIPS["v5p"].shape_of(8)
            ((4, 8), (2, 2, 2))
        """
        shape = [1] * self.num_dims
        while math.prod(shape) < num_chips:
            shape[shape.index(min(shape))] *= 2
        return tuple(sorted(shape))


CHIPS: Mapping[str, Chip] = {
    name: Chip(
        name=name,
        rates=Rates(**table.pop("rates")),
        shapes=tuple(map(tuple, table.pop("shapes"))),
        **table,
    )
    for name, table in device_tables("chips").items()
}
"""The chips that `rx.plan` knows, by name."""


def measure_rates(devices: Sequence[Device]) -> Rates:
    """Measure products of matrices, copies, and sums over the devices."""
    mesh = Mesh(np.array(devices), (_AXIS,))
    on_cpu = devices[0].platform == "cpu"
    width, length = _CPU_SIZES if on_cpu else _GPU_SIZES
    num = len(devices)
    types = ("float32",) if on_cpu else ("float32", "bfloat16")
    products = {
        dtype: 2 * width**3 / _seconds(mesh, lambda x: x @ x, (width, width), dtype)
        for dtype in types
    }
    copy = _seconds(mesh, lambda x: x + 1, (length,))
    ring = None
    if num > 1:
        total = _seconds(mesh, lambda x: lax.psum(x, _AXIS), (length // 4,))
        # In a ring of n devices, each sends 2(n-1)/n of the array.
        ring = 2 * (num - 1) / num * length / total
    stats = devices[0].memory_stats() or {}
    return Rates(
        peak_flops=products[types[-1]],
        flops_by_type={} if on_cpu else {"f32": products["float32"]},
        memory_bytes=stats.get("bytes_limit"),
        memory_bandwidth=2 * 4 * length / copy,
        ring_bandwidth=ring,
        kernel_seconds=0.0 if on_cpu else KERNEL_SECONDS,
        source=f"measured on {num} x {devices[0].device_kind} of this machine: "
        f"{' and '.join(types)} products of {width} x {width}, a copy of "
        f"{4 * length / 2**20:.0f} MiB"
        + (f", a sum of {length / 2**20:.0f} MiB" if num > 1 else ""),
    )


def _seconds(
    mesh: Mesh,
    fn: Callable[[jax.Array], jax.Array],
    shape: tuple[int, ...],
    dtype: str = "float32",
) -> float:
    """Time `fn` on all devices at once: the shortest of a few runs."""
    spec = PartitionSpec(_AXIS)
    program = jax.jit(
        jax.shard_map(
            lambda x: fn(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
        ),
        donate_argnums=0,  # Allocating new memory would take longer than the copy.
    )
    # GPUs multiply zeros faster. With this scale, products are as large as factors.
    key, scale = jax.random.key(0), shape[-1] ** -0.5
    array = jax.jit(
        lambda: jax.random.normal(key, (mesh.size, *shape), dtype) * scale,
        out_shardings=NamedSharding(mesh, spec),
    )()
    array = jax.block_until_ready(program(array))
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        array = jax.block_until_ready(program(array))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
