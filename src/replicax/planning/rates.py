"""Rates of devices: published figures of TPU chips, and rates measured here.

Figures of chips are per chip, and bandwidths in one direction: the vendor's pages give
the sum of both directions of all links of a chip. Those of GPUs are in `cards`.

Devices of this machine are measured in a second or two, as no published figures would
be true of them: a CPU core shares its caches, and logical devices share the cores. All
devices work at once, as in a step.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.engine.devices import Device

__all__ = ["CHIPS", "KERNEL_SECONDS", "Chip", "Rates", "measure_rates"]

KERNEL_SECONDS = 2.5e-6
"""What a kernel of a GPU takes beside its work: 1.7 us for one with nothing to do on an
H100, and the time in which a larger one comes to work on all processors.
"""

_GIB = 2**30
_LOOKED_UP = "2026-11-21"
_PAGES = "https://docs.cloud.google.com/tpu/docs"

_AXIS = "replica"
_ROUNDS = 5
_CPU_SIZES = (512, 2**22)
_GPU_SIZES = (4096, 2**27)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one device, while all the others are busy too.

    Attributes:
        peak_flops: Multiplications and additions per second.
        memory_bytes: Capacity of its memory; None: not its own, or not known.
        memory_bandwidth: Bytes per second.
        ring_bandwidth: Bytes per second that it sends in a ring of devices that links
            join; None: computed from the links of a slice.
        source: Where the figures are from.
        network_bandwidth: Bytes per second of its share of its host's network, over
            which slices of TPUs and hosts of GPUs reach each other; None: not known.
        flops_by_type: Of products of other types than bfloat16, by XLA's names, where
            they are not at `peak_flops`.
        elementwise_flops: Of all that is no product; None: at `peak_flops`.
        attained_flops: Share of those rates at which kernels compute.
        attained_bandwidth: Share of `memory_bandwidth` at which they read and write.
        kernel_seconds: What a kernel takes before and after its work.
    """

    peak_flops: float
    memory_bytes: int | None
    memory_bandwidth: float
    ring_bandwidth: float | None
    source: str
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
        name: As in topologies, such as `"v5e"`.
        rates: Of its computing, in bfloat16, and its memory (HBM).
        link_bandwidth: Bytes per second over one link to a neighbour, one direction.
        num_dims: Dimensions of the grid of chips.
        ring_multiple: A dimension of the grid whose size divides by this is closed to a
            ring.
        shapes: The usual sizes of slices.
        max_chips: Chips in the largest slice.
        options: What libtpu needs to know besides the name.
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
    largest_scale = 256  # Efficiencies are predicted up to here.

    def known(self) -> str:
        """List the names of its slices, for messages."""
        names = (f"{self.name}:{'x'.join(map(str, shape))}" for shape in self.shapes)
        cubes = " and boxes of such cubes" if self.num_dims == 3 else ""
        return ", ".join(names) + cubes

    def domain(self, device: Device) -> int:
        """The index of a device's slice, within which links join the chips."""
        return getattr(device, "slice_index", 0)

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether there are slices of that shape.

        Besides the usual ones: any box of cubes of 4x4x4, where there are cubes.
        """
        if shape in self.shapes:
            return True
        return (
            len(shape) == self.num_dims == 3
            and all(n > 0 and n % 4 == 0 for n in shape)
            and list(shape) == sorted(shape)
            and math.prod(shape) <= self.max_chips
        )

    def shape_of(self, num_chips: int) -> tuple[int, ...]:
        """The most square or cubic shape of a number of chips, a power of two.

        Example:
            >>> CHIPS["v5e"].shape_of(32), CHIPS["v5p"].shape_of(8)
            ((4, 8), (2, 2, 2))
        """
        shape = [1] * self.num_dims
        while math.prod(shape) < num_chips:
            shape[shape.index(min(shape))] *= 2
        return tuple(sorted(shape))


def _published(
    peak_flops: float,
    memory_gib: int,
    memory_bandwidth: float,
    page: str,
    network_bandwidth: float | None = None,
) -> Rates:
    return Rates(
        peak_flops=peak_flops,
        memory_bytes=memory_gib * _GIB,
        memory_bandwidth=memory_bandwidth,
        ring_bandwidth=None,
        source=f"published at {_PAGES}/{page} (read {_LOOKED_UP})",
        network_bandwidth=network_bandwidth,
    )


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            rates=_published(
                275e12, 32, 1200e9, "v4; links: Jouppi et al. 2023, arXiv:2304.01433"
            ),
            # 6 links of 50 GB/s; 1.1 PB/s of all-reduce for 4096 chips agree with it.
            link_bandwidth=50e9,
            num_dims=3,
            ring_multiple=4,
            shapes=_DEEP,
            max_chips=4096,
            # Both cores of a chip as one device, as JAX has them on the hardware.
            options={"chip_config_name": "megacore"},
        ),
        Chip(
            name="v5e",
            # Network: 6.4 Tb/s for a pod of 256 chips.
            rates=_published(197e12, 16, 819e9, "v5e", 6.4e12 / 8 / 256),
            link_bandwidth=400e9 / 2 / 4,  # 400 GB/s, both directions, 4 links
            num_dims=2,
            ring_multiple=16,
            shapes=_FLAT,
            max_chips=256,
        ),
        Chip(
            name="v5p",
            rates=_published(459e12, 95, 2765e9, "v5p", 50e9 / 8),  # Network: 50 Gb/s
            link_bandwidth=1200e9 / 2 / 6,  # 1200 GB/s, both directions, 6 links
            num_dims=3,
            ring_multiple=4,
            shapes=_DEEP,
            max_chips=8960,
        ),
        Chip(
            name="v6e",
            # Network: 25.6 Tb/s for a pod of 256 chips.
            rates=_published(918e12, 32, 1600e9, "v6e", 25.6e12 / 8 / 256),
            link_bandwidth=800e9 / 2 / 4,  # 3200 Gb/s one direction over 4 links
            num_dims=2,
            ring_multiple=16,
            shapes=_FLAT,
            max_chips=256,
        ),
    )
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
        # In a ring each device sends twice the array, less its own part.
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
    """The shortest of a few runs of `fn` on every device at once."""
    spec = PartitionSpec(_AXIS)
    program = jax.jit(
        jax.shard_map(
            lambda x: fn(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
        ),
        donate_argnums=0,  # Fresh memory would cost more than the copy.
    )
    # GPUs multiply zeros faster. These numbers' products have numbers as large.
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
