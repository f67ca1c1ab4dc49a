"""Roofline model: the time of a step that only the hardware's rates limit.

The model for TPUs and for devices of this machine, and all that it takes for granted:

- A device's step takes the longer of computing (FLOPs by the peak of bfloat16, in which
  TPUs multiply by default) and of moving data (the bytes that XLA counts, less the
  share that the compiler keeps on the chip), plus the communication that nothing hides.
- Collectives run at the bandwidth of the links, without latency: for payloads under a
  megabyte or so this is too good.
- A sum over n devices sends 2(n-1)/n of its payload from each of them (a ring, as
  reduce-scatter and all-gather), a reduce-scatter or all-gather half of that; the parts
  go over all dimensions of the grid at once. A dimension that closes to a ring gives
  two links of bandwidth, an open one a single link.
- An all-to-all sends (n-1)/n of its payload over half of the way around, on average; a
  collective-permute sends its payload over one link.
- Between slices a sum sends each chip's part of it, 2(s-1)/s of 1/n for s slices, over
  the chip's share of its host's network.
- A collective that the compiler made asynchronous hides behind computation, as long as
  there is some; a synchronous one is waited for.
- The input arrives in time, and nothing is dispatched late.

For GPUs, whose programs are scheduled (`replicax.planning.schedule`):

- A step takes the sum of its kernels, each the longer of computing and of moving what
  it reads and writes, and 2.5 us, plus the communication at which no kernel works.
  Kernels attain 80 % of the peak FLOP/s and 85 % of the peak bandwidth, as they did on
  an H100; on the cards of this machine, what was measured on them. A collective
  begins at its place in the schedule, when those before it are over; only what is left
  of it where the program waits for it is exposed.
- Inside a host NCCL's collectives send as above, each card over all of its links to the
  others at once. Over h hosts of n cards NCCL makes them in a hierarchy: within the
  hosts, and between cards of the same place in all hosts, of 1/n of the payload, each
  over its card's share of the host's network: 2(h-1)/h of that for a sum, half of it
  for a reduce-scatter or all-gather. Chunks of the payload are on the links and on the
  network at the same time: the slower one counts.

Real steps of chips take longer: no program runs at the peaks. The times are good for
comparisons and for finding what limits, not for promises.
"""

import dataclasses
import math
from collections.abc import Sequence

from replicax.planning.rates import Chip

__all__ = [
    "ASSUMPTIONS",
    "ASSUMPTIONS_OF_GPUS",
    "ASSUMPTIONS_OF_MEASURED",
    "StepTime",
    "collective_seconds",
    "first_limit",
    "grid_bandwidth",
    "mean_hops",
    "network_seconds",
    "step_time",
]

ASSUMPTIONS = (
    "Peak bfloat16 FLOP/s, peak bandwidths, no latency: real steps take longer.",
    "Bytes are what XLA counts, less the share that the compiler keeps on the chip.",
    "Collectives are rings over all links of the group's part of the grid.",
    "Asynchronous collectives hide behind computation; synchronous ones do not.",
    "Scaling: same batch per chip, same payload of collectives over all replicas.",
    "Input arrives in time.",
)
"""What the time model takes for granted, in short; the module says it in full."""

ASSUMPTIONS_OF_GPUS = (
    "Kernels attain 80 % of peak FLOP/s, 85 % of peak bandwidth, and take 2.5 us more.",
    "Communication: peak bandwidths, no latency; real steps take longer.",
    "FLOPs and bytes are counted in the compiled program, kernel by kernel.",
    "Collectives are NCCL's rings: over the links in a host, then over the network.",
    "They hide behind the kernels between their start and their end in the schedule.",
    "Scaling: same batch per card, same payload of collectives over all replicas.",
    "Input arrives in time.",
)
"""The same for GPUs."""

ASSUMPTIONS_OF_MEASURED = (
    "The rates measured here, 2.5 us more for a kernel of a GPU; no other latency.",
    "Collectives are rings over all devices of the group.",
    "Asynchronous collectives hide behind computation; synchronous ones do not.",
    "Input arrives in time.",
)
"""The same for devices of this machine, whose rates are measured."""

_ADVICE = {
    "compute": (
        "The devices multiply as fast as they can: this is where a step should be. For "
        "shorter steps, take more devices or a smaller model."
    ),
    "memory bandwidth": (
        "The devices wait for their memory more than they multiply. Where it is not on "
        "yet, keras.mixed_precision.set_global_policy('mixed_bfloat16') halves the "
        "bytes. Take wider layers, or a larger batch per device where weights and "
        "optimizer slots are most of the bytes."
    ),
    "interconnect": (
        "The devices wait for each other. Take a larger batch per device, accumulate "
        "gradients over several batches (the optimizer's gradient_accumulation_steps), "
        "or take fewer devices."
    ),
    "network": (
        "Hosts wait for each other over their network. Take a larger batch per device, "
        "a faster network, or fewer hosts: of TPUs, one larger slice."
    ),
    "memory capacity": (
        "The step does not fit into a device's memory. Take a smaller batch per "
        "device, keras.mixed_precision.set_global_policy('mixed_bfloat16') if it is "
        "not on, recomputation (keras.RematScope), or devices with more memory."
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step on one device.

    Attributes:
        compute: Of multiplications and additions.
        memory: Of moving data between memory and chip.
        busy: Of both together: the longer one; for GPUs kernel by kernel.
        links: Of collectives, between chips.
        network: Of collectives, between slices of TPUs or hosts of GPUs.
        exposed: Of collectives, what computation does not hide.
        total: Of the step.
    """

    compute: float
    memory: float
    busy: float
    links: float
    network: float
    exposed: float
    total: float


def step_time(
    *,
    compute: float,
    memory: float,
    waited: float,
    hidden: float,
    network: float,
) -> StepTime:
    """Compute the time of a step from the times of its parts, in seconds.

    The program waits for `waited` collectives and `network`, their part between slices;
    `hidden` ones are asynchronous.

    Example:
        >>> step_time(compute=3, memory=2, waited=1, hidden=4, network=0).total
        5
    """
    busy = max(compute, memory)
    exposed = waited + network + max(0.0, hidden - busy)
    return StepTime(
        compute=compute,
        memory=memory,
        busy=busy,
        links=waited + hidden,
        network=network,
        exposed=exposed,
        total=max(busy, hidden) + waited + network,
    )


def collective_seconds(
    kind: str, num_bytes: float, size: int, bandwidth: float, mean_hops: float = 1.0
) -> float:
    """Compute the seconds of one collective on a device, from payload and bandwidth.

    `mean_hops` are the links from a device to another, for all-to-all.

    Example:
        >>> collective_seconds("all-reduce", 100e6, 2, 50e9)
        0.002
    """
    if size <= 1:
        return 0.0
    share = (size - 1) / size
    match kind:
        case "all-reduce":
            factor = 2 * share
        case "all-to-all":
            factor = share * mean_hops
        case "collective-permute" | "collective-broadcast":
            factor = 1.0
        case _:
            factor = share
    return factor * num_bytes / bandwidth


def network_seconds(
    kind: str, num_bytes: float, size: int, num_slices: int, bandwidth: float
) -> float:
    """Compute the seconds of a collective between slices of TPUs or hosts of GPUs."""
    if num_slices <= 1:
        return 0.0
    per_slice = max(size // num_slices, 1)
    # Sums and gathers are made within them first: a chip sends its part.
    part = num_bytes if kind.startswith("collective-") else num_bytes / per_slice
    return collective_seconds(kind, part, num_slices, bandwidth)


def grid_bandwidth(chip: Chip, extent: Sequence[int], shape: Sequence[int]) -> float:
    """Compute the bytes per second that one chip of a box can send in rings."""
    links = sum(
        (2 if n == whole and _closes(chip, whole, shape) else 1)
        for n, whole in zip(extent, shape, strict=True)
        if n > 1
    )
    return links * chip.link_bandwidth


def mean_hops(chip: Chip, extent: Sequence[int], shape: Sequence[int]) -> float:
    """Compute the average number of links between two chips of a box."""
    return sum(
        n / 4 if n == whole and _closes(chip, whole, shape) else n / 3
        for n, whole in zip(extent, shape, strict=True)
        if n > 1
    )


def _closes(chip: Chip, size: int, shape: Sequence[int]) -> bool:
    """Whether a dimension of a slice is a ring."""
    if math.prod(shape) == 1:
        return False
    if chip.num_dims == 3:  # Optical links, between whole cubes.
        return all(n % chip.ring_multiple == 0 for n in shape)
    return size % chip.ring_multiple == 0


def first_limit(
    time: StepTime | None, *, fits: bool, num_devices: int
) -> tuple[str, str]:
    """Name the first limit of a step, with advice.

    Example:
        >>> time = step_time(compute=3, memory=2, waited=1, hidden=0, network=0)
        >>> first_limit(time, fits=True, num_devices=2)[0]
        'compute'
    """
    if not fits or time is None:
        return "memory capacity", _ADVICE["memory capacity"]
    over_network = min(time.network, time.exposed)
    parts = {
        "compute": time.compute,
        "memory bandwidth": time.memory,
        "interconnect": time.exposed - over_network,
        "network": over_network,
    }
    limit = max(parts, key=lambda name: parts[name])
    advice = _ADVICE[limit]
    if limit in ("compute", "memory bandwidth") and num_devices > 1:
        share = time.exposed / time.total if time.total else 0.0
        advice += f" Communication is {share:.1%} of a step here."
    return limit, advice
