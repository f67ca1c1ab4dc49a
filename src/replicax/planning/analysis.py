"""Estimates a training step: compiles its program and reads the compiler's results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras

from replicax._util.types import PyTree
from replicax.jax_loops.watched import WatchedStep
from replicax.planning.capture import (
    Capture,
    capture_call,
    capture_fit,
    compile_lowered,
)
from replicax.planning.cards import Card
from replicax.planning.hlo_summary import ProgramSummary, read_program
from replicax.planning.report import Memory, Plan, Scale
from replicax.planning.roofline import (
    ASSUMPTIONS,
    ASSUMPTIONS_OF_GPUS,
    ASSUMPTIONS_OF_MEASURED,
    first_limit,
)
from replicax.planning.topology import DeviceTopology, find_topology
from replicax.planning.work import StepCollectives, Work, count_work
from replicax.strategies.strategy import Strategy

__all__ = ["analyse", "plan"]

_PREALLOCATED_SHARE = 0.75


def plan(
    strategy: Strategy,
    step: keras.Model | Callable[..., object],
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    topology: str = "v5e:16x16",
    num_slices: int = 1,
    link_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> Plan:
    """Compile a training step for other hardware, without running it.

    The strategy's program is compiled for the devices of `topology`, with one replica
    on each. No program runs, and no variable changes.

    Args:
        strategy: The strategy of the model. Its variables must be on the replicas.
        step: A replica function for `strategy.run` that calls `optimizer.apply`, or a
            compiled Keras model.
        args: For a replica function: its arguments. A `jax.ShapeDtypeStruct` may
            replace an array. A `PerReplica` is `[R, ...]` with one entry per device of
            the topology; for another R, only an entry's shape and dtype are used. For a
            model: one global batch `(x, y)` or `(x, y, sample_weight)`, with leaves
            `[B, ...]` for all chips together.
        kwargs: Keyword arguments of a replica function.
        topology: A slice of TPU chips, such as `"v5e:2x4"`; NVIDIA GPUs, `"h100:8"` of
            one host or `"h100:4x8"` of four; or devices of this machine, `"cpu:8"` or
            `"gpu:4"`. Only devices of this machine must be present.
        num_slices: Number of TPU slices, which the hosts' network connects.
        link_bandwidth: Bytes per second, in one direction, that a device sends to the
            other devices of its slice or host; None: the published figure.
        network_bandwidth: Bytes per second of a device's share of its host's network;
            None: the published figure.

    Returns:
        FLOPs, bytes, memory, collectives, predicted times, and the first limit.

    Raises:
        DeviceError: For an unknown topology; the message lists the known ones.
        ImportError: Without the compiler for TPUs or GPUs.
        TypeError: For a step of `Strategy.watch`, which `replicax plan` estimates.
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
    hardware = find_topology(
        topology,
        num_slices,
        link_bandwidth=link_bandwidth,
        network_bandwidth=network_bandwidth,
    )
    if isinstance(step, WatchedStep):
        raise TypeError(
            f"plan: {step!r} has its arrays and shardings on the devices here. To "
            "estimate it on others, run its script with: replicax plan --topology "
            f"{topology} script.py"
        )
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
    """Compile a captured program and estimate its time and memory."""
    assert capture.lowered is not None  # A capture without a step raises earlier.
    try:
        compiled = compile_lowered(capture.lowered, topology.devices)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _plan_without_room(capture, topology, str(error))
    summary = read_program(compiled.as_text() or "")
    work = count_work(compiled, summary, capture.num_steps, topology.rates)
    step_collectives = StepCollectives(
        topology, capture.num_devices, summary.collectives, capture.num_steps
    )
    time = step_collectives.step_time(work)
    memory = _memory(compiled.memory_analysis(), topology)
    fits = memory is None or memory.capacity is None or memory.peak <= memory.capacity
    scaling = step_collectives.scaling(work)
    limit, advice = first_limit(time, fits=fits, num_devices=step_collectives.size)
    return Plan(
        **_facts(capture, topology),
        fits=fits,
        memory=memory,
        flops=work.flops,
        bytes_accessed=work.bytes,
        collectives=step_collectives.uses,
        time=time,
        scaling=scaling,
        limit=limit,
        advice=advice,
        notes=_notes(summary, topology, memory, work, step_collectives.size, scaling),
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
        "assumptions": _assumptions(topology),
    }


def _assumptions(topology: DeviceTopology) -> tuple[str, ...]:
    if topology.chip is None:
        return ASSUMPTIONS_OF_MEASURED
    return ASSUMPTIONS_OF_GPUS if isinstance(topology.chip, Card) else ASSUMPTIONS


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


def _notes(
    summary: ProgramSummary,
    topology: DeviceTopology,
    memory: Memory | None,
    work: Work,
    size: int,
    scaling: Sequence[Scale],
) -> tuple[str, ...]:
    notes = _notes_of_loops(summary, work)
    chip = topology.chip
    if topology.num_slices > 1 and chip and topology.rates.network_bandwidth is None:
        notes.append(
            f"No network bandwidth between slices is published for {chip.name}: the "
            "network's time is not counted."
        )
    if chip is None:
        notes.append(
            "Rates were measured on this machine, with all devices at work. Scaling to "
            "other numbers of devices is not predicted from them."
        )
    elif size == 1:
        notes.append(
            "One device sends nothing, so scaling is unknown: estimate for two or more."
        )
    notes += _notes_of_memory(memory, is_card=isinstance(chip, Card))
    waiting = [str(s.num_devices) for s in scaling if s.efficiency < 0.5]
    if waiting:
        notes.append(
            f"On {', '.join(waiting)} devices, more than half of a step is waiting."
        )
    return tuple(notes)


def _notes_of_loops(summary: ProgramSummary, work: Work) -> list[str]:
    loops = len(summary.trip_counts) - work.is_loop_of_steps
    unknown = sum(trips is None for trips in summary.trip_counts)
    if work.schedule is not None:
        loops = unknown  # The schedule counts all known iterations.
    if not loops:
        return []
    subject = f"{loops} loop{'s' if loops > 1 else ''} in the step"
    if work.schedule is not None:
        return [f"{subject} of unknown length: one iteration of each counts."]
    once = f"; FLOPs too for {unknown} of unknown length" if unknown else ""
    return [f"{subject}: bytes are counted for one iteration of each{once}."]


def _notes_of_memory(memory: Memory | None, *, is_card: bool) -> list[str]:
    if memory is None or not memory.capacity:
        return []
    used = memory.peak / memory.capacity
    if 0.9 < used <= 1:
        return ["The memory is nearly full; the runtime needs some of it, too."]
    if is_card and _PREALLOCATED_SHARE < used <= 1:
        return [
            f"JAX takes {_PREALLOCATED_SHARE:.0%} of a card's memory by default, and "
            "the step needs more: set XLA_PYTHON_CLIENT_MEM_FRACTION=.95."
        ]
    return []
