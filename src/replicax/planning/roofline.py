"""Roofline model: the time of a step that only the hardware's rates limit.

`docs/plan.md` describes the model: the step takes the longer of computing and of moving
data, plus the communication that nothing hides, at the peak rates without latency. A
GPU's kernels are timed one by one, in `replicax.planning.schedule`.
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
"""The assumptions of the time model for TPUs; `docs/plan.md` has details."""

ASSUMPTIONS_OF_GPUS = (
    "Kernels attain 80 % of peak FLOP/s, 85 % of peak bandwidth, and take 2.5 us more.",
    "Communication: peak bandwidths, no latency; real steps take longer.",
    "FLOPs and bytes are counted in the compiled program, kernel by kernel.",
    "Collectives are NCCL's rings: over the links in a host, then over the network.",
    "Collectives hide behind the kernels between their start and end in the schedule.",
    "Scaling: same batch per card, same payload of collectives over all replicas.",
    "Input arrives in time.",
)
"""The assumptions for described GPUs."""

ASSUMPTIONS_OF_MEASURED = (
    "The rates measured here, 2.5 us more for a kernel of a GPU; no other latency.",
    "Collectives are rings over all devices of the group.",
    "Asynchronous collectives hide behind computation; synchronous ones do not.",
    "Input arrives in time.",
)
"""The assumptions for devices of this machine, whose rates are measured."""

_ADVICE = {
    "compute": (
        "The devices multiply at their peak rate, as a step should. For a shorter "
        "step, use more devices or a smaller model."
    ),
    "memory bandwidth": (
        "The devices wait for their memory more than they multiply. Compute in "
        "bfloat16, which halves the bytes of a float32 model (Keras: the policy "
        "'mixed_bfloat16'), use wider layers, or, if most bytes are weights and "
        "optimizer state, a larger batch per device."
    ),
    "interconnect": (
        "The devices wait for each other. Use a larger batch per device, accumulate "
        "gradients over several batches (Keras: gradient_accumulation_steps), "
        "or use fewer devices."
    ),
    "network": (
        "Hosts wait for their network. Use a larger batch per device, a faster "
        "network, or fewer hosts; for TPUs, use one larger slice."
    ),
    "memory capacity": (
        "The step does not fit into a device's memory. Use a smaller batch per device, "
        "bfloat16 for a float32 model (Keras: the policy 'mixed_bfloat16'), "
        "recomputation (jax.checkpoint; keras.RematScope), or devices with more memory."
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step on one device.

    Attributes:
        compute: Time of multiplications and additions.
        memory: Time of moving data between memory and chip.
        busy: The longer of `compute` and `memory`; for GPUs, summed kernel by kernel.
        links: Time of collectives between chips.
        network: Time of collectives between slices of TPUs or hosts of GPUs.
        exposed: Time of collectives that computation does not hide.
        total: Time of the step.
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

    `waited` and `hidden` are the times of synchronous and asynchronous collectives on
    links; `network` is the time of collectives between slices, which nothing hides.

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

    An all-to-all sends over `mean_hops` links on average.

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
    # Reductions and gathers run within slices first, so a chip sends only its part.
    part = num_bytes if kind.startswith("collective-") else num_bytes / per_slice
    return collective_seconds(kind, part, num_slices, bandwidth)


def grid_bandwidth(chip: Chip, extent: Sequence[int], shape: Sequence[int]) -> float:
    """Compute the bytes per second that a chip sends in rings over a box of chips."""
    links = sum(
        (2 if n == whole and _closes(chip, whole, shape) else 1)
        for n, whole in zip(extent, shape, strict=True)
        if n > 1
    )
    return links * chip.link_bandwidth


def mean_hops(chip: Chip, extent: Sequence[int], shape: Sequence[int]) -> float:
    """Compute the average number of links between two chips in a box of chips."""
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
