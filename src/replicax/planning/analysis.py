"""Plans a training step: compiles its program and reads what the compiler says."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras

from replicax._util.types import PyTree
from replicax.planning.capture import Capture, capture_call, capture_fit
from replicax.planning.hlo_summary import Collective, ProgramSummary, read_program
from replicax.planning.report import CollectiveUse, Memory, Plan, Scale
from replicax.planning.roofline import (
    StepTime,
    collective_seconds,
    first_limit,
    grid_bandwidth,
    mean_hops,
    network_seconds,
    step_time,
)
from replicax.planning.topology import DeviceTopology, find_topology
from replicax.strategies.strategy import Strategy

__all__ = ["analyse", "plan"]

_LARGEST_SCALE = 256


def plan(
    strategy: Strategy,
    step: keras.Model | Callable[..., object],
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    topology: str = "v5e:16x16",
    num_slices: int = 1,
) -> Plan:
    """Compile a training step for other hardware, without running it.

    The strategy's program is made for the devices of `topology`, one replica each, as
    if the strategy had been made there. Nothing is run, and no variable changes.

    Args:
        strategy: Whose variables the step trains; any that holds them on its replicas.
        step: A replica function, as `strategy.run` takes it, in which an optimizer
            makes an update; or a compiled Keras model.
        args: Of a replica function: its arguments, in which `jax.ShapeDtypeStruct`s may
            stand for arrays. A `PerReplica` is `[R, ...]` with an entry for each chip
            of the topology; one of `strategy` itself stands for entries like its own.
            Of a model: one global batch `(x, y)` or `(x, y, sample_weight)`, with
            leaves `[B, ...]` for all chips together.
        kwargs: Keyword arguments of a replica function.
        topology: A slice of TPU chips, such as `"v5e:2x4"`, which need not be here, or
            devices of this machine, `"cpu:8"` or `"gpu:4"`.
        num_slices: Number of such slices, joined by their hosts' network.

    Returns:
        FLOPs, bytes, memory, collectives, predicted times, and what limits the step.

    Raises:
        DeviceError: For an unknown topology; the known ones are listed.
        ImportError: Without libtpu, for TPUs.
        ValueError: If the step does not train.

    Example:
        >>> import jax, keras, replicax as rx
        >>> strategy = rx.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x = jax.ShapeDtypeStruct((512, 4), "float32")
        >>> y = jax.ShapeDtypeStruct((512, 2), "float32")
        >>> plan = rx.plan(strategy, model, (x, y), topology="cpu:1")
        >>> plan.num_devices, plan.fits
        (1, True)
    """
    hardware = find_topology(topology, num_slices)
    if isinstance(step, keras.Model):
        if kwargs:
            raise TypeError(
                f"plan: a model takes its batch as args=(x, y); got {kwargs=!r}."
            )
        capture = capture_fit(strategy, step, args, hardware)
    else:
        capture = capture_call(strategy, step, args, kwargs or {}, hardware)
    return analyse(capture, hardware)


def analyse(capture: Capture, topology: DeviceTopology) -> Plan:
    """Compile a captured program and make its plan."""
    assert capture.lowered is not None  # Otherwise there was no training step.
    try:
        compiled = capture.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _plan_without_room(capture, topology, str(error))
    steps = capture.num_steps
    text = read_program(compiled.as_text() or "")
    costs = compiled.cost_analysis() or {}
    # XLA counts one round of a loop. A step that is one round of the loop over the
    # steps of an execution is counted as it is.
    is_loop_of_steps = steps > 1 and text.trip_counts.count(steps) > 0
    flops = (costs.get("flops", 0.0) + text.loop_flops) / steps
    moved = costs.get("bytes accessed", 0.0) * (1 - text.on_chip)
    moved /= 1 if is_loop_of_steps else steps
    parts = _StepCollectives(topology, capture.num_devices, text.collectives, steps)
    compute = flops / topology.rates.peak_flops
    memory_time = moved / topology.rates.memory_bandwidth
    time = parts.step_time(compute, memory_time)
    memory = _memory(compiled.memory_analysis(), topology)
    fits = memory is None or memory.capacity is None or memory.peak <= memory.capacity
    scaling = parts.scaling(compute, memory_time)
    limit, advice = first_limit(time, fits=fits, num_devices=parts.size)
    return Plan(
        **_facts(capture, topology),
        fits=fits,
        memory=memory,
        flops=flops,
        bytes_accessed=moved,
        collectives=parts.uses,
        time=time,
        scaling=scaling,
        limit=limit,
        advice=advice,
        notes=_notes(text, topology, memory, is_loop_of_steps, parts.size, scaling),
    )


def _plan_without_room(
    capture: Capture, topology: DeviceTopology, message: str
) -> Plan:
    limit, advice = first_limit(None, fits=False, num_devices=1)
    return Plan(
        **_facts(capture, topology),
        fits=False,
        limit=limit,
        advice=advice,
        notes=(f"The compiler: {message.splitlines()[0]}",),
    )


def _facts(capture: Capture, topology: DeviceTopology) -> dict[str, Any]:
    used = topology.devices[: capture.num_devices]
    return {
        "program": capture.name,
        "topology": topology.name,
        "device_kind": used[0].device_kind,
        "num_devices": len(used),
        "num_replicas": capture.num_replicas,
        "num_hosts": len({d.process_index for d in used}),
        "num_slices": topology.num_slices_of(range(len(used))),
        "rates": topology.rates,
    }


def _memory(stats: Any, topology: DeviceTopology) -> Memory | None:
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        capacity=topology.rates.memory_bytes,
    )


class _StepCollectives:
    """The collectives of a step, and what they take on more or fewer devices."""

    def __init__(
        self,
        topology: DeviceTopology,
        size: int,
        collectives: Sequence[Collective],
        num_steps: int,
    ) -> None:
        self._topology = topology
        self.size = size
        self._collectives = [c for c in collectives if _size(c, size) > 1]
        self.uses = tuple(
            CollectiveUse(
                kind=c.kind,
                dtype=c.dtype,
                count=c.count / num_steps,
                bytes=c.bytes,
                group_size=_size(c, size),
                num_groups=max(len(c.groups), 1),
                spans_hosts=any(map(topology.spans_hosts, _groups(c, size))),
                num_slices=max(map(topology.num_slices_of, _groups(c, size))),
                is_async=c.is_async,
                seconds=c.count / num_steps * sum(self._seconds(c, size)),
            )
            for c in self._collectives
        )
        self._num_steps = num_steps

    def step_time(
        self, compute: float, memory: float, num_devices: int | None = None
    ) -> StepTime:
        """The time of a step on so many devices; None: those of the topology."""
        waited = hidden = network = 0.0
        for c in self._collectives:
            count = c.count / self._num_steps
            links, between = self._seconds(c, num_devices or self.size)
            network += count * between
            if c.is_async:
                hidden += count * links
            else:
                waited += count * links
        return step_time(
            compute=compute,
            memory=memory,
            waited=waited,
            hidden=hidden,
            network=network,
        )

    def scaling(self, compute: float, memory: float) -> tuple[Scale, ...]:
        """Efficiencies on 1, 2, 4, ... devices."""
        if self._topology.chip is None or self.size == 1:
            return ()
        sizes = {self.size}
        largest = max(_LARGEST_SCALE, self.size)
        if self._topology.num_slices > 1:
            largest = self.size
        sizes |= {2**i for i in range(largest.bit_length()) if 2**i <= largest}
        alone = max(compute, memory)
        return tuple(
            Scale(
                num_devices=n,
                hardware=self._hardware(n),
                efficiency=alone / self.step_time(compute, memory, n).total,
            )
            for n in sorted(sizes)
        )

    def _hardware(self, size: int) -> str:
        chip, own = self._topology.chip, self._topology.shape
        assert chip is not None  # Other devices have no scaling.
        num_slices = self._num_slices(size)
        shape = own if size == self.size or num_slices > 1 else chip.shape_of(size)
        text = "x".join(map(str, shape))
        return text if num_slices == 1 else f"{num_slices} x {text}"

    def _num_slices(self, size: int) -> int:
        """Number of slices that so many devices are in; several only if this has."""
        if self._topology.num_slices == 1:
            return 1
        return max(size // math.prod(self._topology.shape), 1)

    def _seconds(self, collective: Collective, size: int) -> tuple[float, float]:
        """What one collective takes between chips, and between slices.

        Those over all devices of the plan are over all `size` devices there; others
        keep their groups.
        """
        topology, chip = self._topology, self._topology.chip
        group = _groups(collective, self.size)[0]
        num, kind, num_bytes = len(group), collective.kind, collective.bytes
        if chip is None:
            ring = topology.rates.ring_bandwidth or math.inf
            return collective_seconds(kind, num_bytes, num, ring), 0.0
        shape, extent = topology.shape, topology.extent(group)
        num_slices = topology.num_slices_of(group)
        if size != self.size:
            if num == num_slices > 1:  # Chips at the same place of all slices.
                num = num_slices = self._num_slices(size)
            else:
                num = size if num == self.size else min(num, size)
                num_slices = self._num_slices(num)
            if num_slices == 1:
                shape = extent = chip.shape_of(num)
        between = 0.0
        if num_slices > 1 and chip.network_bandwidth is not None:
            between = network_seconds(
                kind, num_bytes, num, num_slices, chip.network_bandwidth
            )
        if num == num_slices:
            return 0.0, between
        bandwidth = grid_bandwidth(chip, extent, shape)
        hops = mean_hops(chip, extent, shape)
        return collective_seconds(
            kind, num_bytes, num // num_slices, bandwidth, hops
        ), between


def _groups(collective: Collective, size: int) -> tuple[tuple[int, ...], ...]:
    return collective.groups or (tuple(range(size)),)


def _size(collective: Collective, size: int) -> int:
    return max(map(len, _groups(collective, size)))


def _notes(
    text: ProgramSummary,
    topology: DeviceTopology,
    memory: Memory | None,
    is_loop_of_steps: bool,
    size: int,
    scaling: Sequence[Scale],
) -> tuple[str, ...]:
    notes = []
    loops = len(text.trip_counts) - is_loop_of_steps
    unknown = sum(trips is None for trips in text.trip_counts)
    if loops:
        notes.append(
            f"{loops} loop{'s' if loops > 1 else ''} in the step: bytes moved count "
            "one round of each"
            + (f"; {unknown} of unknown length count once in all" if unknown else "")
            + "."
        )
    chip = topology.chip
    if topology.num_slices > 1 and chip and chip.network_bandwidth is None:
        notes.append(
            f"No network bandwidth between slices is published for {chip.name}: its "
            "time is left out."
        )
    if chip is None:
        notes.append(
            "Rates were measured on this machine, with all devices at work. Scaling to "
            "other numbers of devices is not predicted from them."
        )
    elif size == 1:
        notes.append(
            "One device sends nothing, so scaling is unknown: plan for two or more."
        )
    if memory and memory.capacity and 0.9 < memory.peak / memory.capacity <= 1:
        notes.append("The memory is nearly full; the runtime needs some of it, too.")
    waiting = [str(s.num_devices) for s in scaling if s.efficiency < 0.5]
    if waiting:
        notes.append(
            f"On {', '.join(waiting)} devices, more than half of a step is waiting."
        )
    return tuple(notes)
