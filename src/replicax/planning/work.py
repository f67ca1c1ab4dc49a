"""Counts the FLOPs, bytes and collectives of a step, and computes their times.

FLOPs and bytes are XLA's own counts, or, for GPUs, counts of the scheduled kernels. The
times of collectives are for a topology's devices, or for another number of devices.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from replicax.planning.cards import Card
from replicax.planning.hlo_summary import Collective, ProgramSummary
from replicax.planning.rates import Chip, Rates
from replicax.planning.report import CollectiveUse, Scale
from replicax.planning.roofline import (
    StepTime,
    collective_seconds,
    grid_bandwidth,
    mean_hops,
    network_seconds,
    step_time,
)
from replicax.planning.schedule import Schedule, read_schedule
from replicax.planning.topology import DeviceTopology

__all__ = ["StepCollectives", "Work", "count_work"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The FLOPs and bytes of one step on a device, and their times.

    Attributes:
        compute: Seconds that the FLOPs take at the device's peak rate.
        memory: Seconds that the bytes take at the memory's bandwidth.
        schedule: A GPU program's kernels and collectives, in order; None: not a GPU.
        is_loop_of_steps: Whether the program is a loop over the steps of an execution.
    """

    flops: float
    bytes: float
    compute: float
    memory: float
    schedule: Schedule | None
    is_loop_of_steps: bool


def count_work(
    compiled: jax.stages.Compiled, summary: ProgramSummary, steps: int, rates: Rates
) -> Work:
    """Count the FLOPs and bytes of a step; the program runs `steps` steps at once."""
    is_loop_of_steps = steps > 1 and summary.trip_counts.count(steps) > 0
    costs = compiled.cost_analysis()
    if costs:
        # XLA counts one iteration of a loop: in a loop over the steps, one step.
        flops = (costs.get("flops", 0.0) + summary.loop_flops) / steps
        moved = costs.get("bytes accessed", 0.0) * (1 - summary.on_chip)
        moved /= 1 if is_loop_of_steps else steps
        compute, schedule = flops / rates.peak_flops, None
    else:
        schedule = read_schedule(compiled.as_text() or "")
        kernels = [(kernel, times / steps) for kernel, times in schedule.kernels()]
        flops = sum(times * kernel.flops for kernel, times in kernels)
        moved = sum(times * kernel.bytes for kernel, times in kernels)
        compute = sum(times * k.compute_seconds(rates) for k, times in kernels)
    return Work(
        flops=flops,
        bytes=moved,
        compute=compute,
        memory=moved / rates.memory_bandwidth,
        schedule=schedule,
        is_loop_of_steps=is_loop_of_steps,
    )


class StepCollectives:
    """The collectives of a step, and their times on any number of devices."""

    def __init__(
        self,
        topology: DeviceTopology,
        size: int,
        collectives: Sequence[Collective],
        num_steps: int,
    ) -> None:
        self._topology = topology
        self.size = size
        self._collectives = [c for c in collectives if _group_size(c, size) > 1]
        self.uses = tuple(
            CollectiveUse(
                kind=c.kind,
                dtype=c.dtype,
                count=c.count / num_steps,
                bytes=c.bytes,
                group_size=_group_size(c, size),
                num_groups=max(len(c.groups), 1),
                spans_hosts=any(map(topology.spans_hosts, _groups(c, size))),
                num_slices=max(map(topology.num_slices_of, _groups(c, size))),
                is_async=c.is_async,
                seconds=c.count / num_steps * sum(self._seconds(c, size)),
            )
            for c in self._collectives
        )
        self._num_steps = num_steps

    def step_time(self, work: Work, num_devices: int | None = None) -> StepTime:
        """Compute a step's time on a number of devices; None: the topology's."""
        size = num_devices or self.size
        waited = hidden = network = 0.0
        for c in self._collectives:
            count = c.count / self._num_steps
            links, over_network = self._seconds(c, size)
            network += count * over_network
            if c.is_async:
                hidden += count * links
            else:
                waited += count * links
        if work.schedule is None:
            return step_time(
                compute=work.compute,
                memory=work.memory,
                waited=waited,
                hidden=hidden,
                network=network,
            )
        busy, exposed = work.schedule.seconds(
            self._topology.rates, lambda c: sum(self._seconds(c, size))
        )
        return StepTime(
            compute=work.compute,
            memory=work.memory,
            busy=busy / self._num_steps,
            links=waited + hidden,
            network=network,
            exposed=exposed / self._num_steps,
            total=(busy + exposed) / self._num_steps,
        )

    def scaling(self, work: Work) -> tuple[Scale, ...]:
        """Compute the efficiencies on 1, 2, 4, ... devices."""
        chip = self._topology.chip
        if chip is None or self.size == 1:
            return ()
        largest = max(chip.largest_scale, self.size)
        if self._topology.num_slices > 1:
            largest = self.size
        sizes = {2**i for i in range(largest.bit_length()) if 2**i <= largest}
        times = {n: self.step_time(work, n) for n in sorted(sizes | {self.size})}
        return tuple(
            Scale(
                num_devices=n,
                hardware=self._hardware(n),
                efficiency=time.busy / time.total,
            )
            for n, time in times.items()
        )

    def _hardware(self, size: int) -> str:
        topology = self._topology
        text = "x".join(map(str, topology.shape_of(size)))
        num_slices = 1 if topology.num_slices == 1 else topology.num_domains(size)
        return text if num_slices == 1 else f"{num_slices} x {text}"

    def _seconds(self, collective: Collective, size: int) -> tuple[float, float]:
        """Compute the seconds of one collective on links, and on the network.

        A group of all devices of the estimate, or of one device of each domain, grows
        with `size`; other groups keep their size.
        """
        topology = self._topology
        group = _groups(collective, self.size)[0]
        num, num_domains = len(group), topology.num_domains_of(group)
        if size != self.size:
            if num == num_domains > 1:  # One device of each domain.
                num = num_domains = topology.num_domains(size)
            else:
                num = size if num == self.size else min(num, size)
                num_domains = topology.num_domains(num)
        if num <= 1:
            return 0.0, 0.0
        kind, num_bytes, network = collective.kind, collective.bytes, 0.0
        if num_domains > 1 and topology.rates.network_bandwidth is not None:
            network = network_seconds(
                kind, num_bytes, num, num_domains, topology.rates.network_bandwidth
            )
        if num == num_domains:
            return 0.0, network
        bandwidth, hops = self._links(group, num, num_domains)
        links = collective_seconds(kind, num_bytes, num // num_domains, bandwidth, hops)
        if isinstance(topology.chip, Card):  # NCCL uses links and network at once.
            links = max(links - network, 0.0)
        return links, network

    def _links(
        self, group: Sequence[int], num: int, num_domains: int
    ) -> tuple[float, float]:
        """Bytes per second that a device sends in a domain, and the mean hops."""
        topology, chip = self._topology, self._topology.chip
        ring = topology.rates.ring_bandwidth
        if not isinstance(chip, Chip) or ring is not None:
            return ring or math.inf, 1.0
        shape, extent = topology.shape, topology.extent(group)
        if num != len(group) and num_domains == 1:
            shape = extent = chip.shape_of(num)
        return grid_bandwidth(chip, extent, shape), mean_hops(chip, extent, shape)


def _groups(collective: Collective, size: int) -> tuple[tuple[int, ...], ...]:
    return collective.groups or (tuple(range(size)),)


def _group_size(collective: Collective, size: int) -> int:
    return max(map(len, _groups(collective, size)))
