"""Reads a GPU program as kernels and collectives in order, and times that order.

XLA's text of a GPU program is scheduled: instructions are dispatched in the order of
the lines. Kernels run one after another. A collective starts at its `-start`, after all
earlier collectives, runs beside the kernels, and is awaited at its `-done`. XLA counts
no FLOPs or bytes of these programs, so this module counts them for each kernel.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from replicax.planning.hlo import (
    Call,
    Computation,
    Instruction,
    arrays,
    calls_of,
    num_bytes,
    parse,
)
from replicax.planning.hlo_summary import (
    FREE,
    Collective,
    product_flops,
    read_collective,
)
from replicax.planning.rates import Rates

__all__ = ["Done", "Kernel", "Schedule", "Start", "WhileLoop", "read_schedule"]

# Opcodes that move or name arrays, and compute nothing.
_MOVES = FREE | {
    "broadcast",
    "concatenate",
    "convert",
    "copy",
    "custom-call",
    "dynamic-slice",
    "dynamic-update-slice",
    "fusion",
    "gather",
    "iota",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "transpose",
}
_PARTS_OF_ARRAYS = {"dynamic-slice", "gather", "slice"}
_WITHOUT_WORK = FREE | {"after-all", "opt-barrier", "partition-id", "replica-id"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel of a GPU program: one launch.

    Attributes:
        products: FLOPs of matrix products and convolutions, by XLA's name of the
            operands' element type.
        elementwise: All other FLOPs: one for each element of an operation's result.
        bytes: Bytes that the kernel reads and writes in the device's memory.
    """

    products: Mapping[str, float]
    elementwise: float
    bytes: float

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return sum(self.products.values()) + self.elementwise

    def compute_seconds(self, rates: Rates) -> float:
        """Compute the seconds of the FLOPs at the device's peaks."""
        of_products = sum(
            flops / rates.flops_by_type.get(dtype, rates.peak_flops)
            for dtype, flops in self.products.items()
        )
        rate = rates.elementwise_flops or rates.peak_flops
        return of_products + self.elementwise / rate

    def seconds(self, rates: Rates) -> float:
        """Compute the kernel's time: the longer of FLOPs and bytes, plus the overhead.

        The time uses the rates that kernels attain, not the peak rates.
        """
        computes = self.compute_seconds(rates) / rates.attained_flops
        moves = self.bytes / (rates.memory_bandwidth * rates.attained_bandwidth)
        return rates.kernel_seconds + max(computes, moves)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Starts a collective; the `Done` of the same name waits for it."""

    name: str
    collective: Collective


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """Waits for a collective."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class WhileLoop:
    """Parts that run `times` times: a loop, or once a call, branch or unknown loop."""

    times: int
    parts: "tuple[Part, ...]"


Part = Kernel | Start | Done | WhileLoop


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A program in the order in which it is dispatched."""

    parts: tuple[Part, ...]

    def kernels(self) -> Iterator[tuple[Kernel, int]]:
        """Yield each kernel and its number of runs."""
        yield from _kernels(self.parts, 1)

    def seconds(
        self, rates: Rates, seconds_of: Callable[[Collective], float]
    ) -> tuple[float, float]:
        """Compute the seconds with a running kernel, and the remaining seconds."""
        return _simulate(self.parts, rates, seconds_of)


def read_schedule(text: str) -> Schedule:
    """Read the text of a compiled program for GPUs."""
    computations, entry = parse(text)
    return Schedule(tuple(_parts(Call(computation=entry), computations)))


def _kernels(parts: Sequence[Part], times: int) -> Iterator[tuple[Kernel, int]]:
    for part in parts:
        if isinstance(part, Kernel):
            yield part, times
        elif isinstance(part, WhileLoop):
            yield from _kernels(part.parts, times * part.times)


def _simulate(
    parts: Sequence[Part], rates: Rates, seconds_of: Callable[[Collective], float]
) -> tuple[float, float]:
    now = busy = 0.0
    links_free = 0.0  # Collectives run one after another, too.
    ends: dict[str, float] = {}
    for part in parts:
        match part:
            case Kernel():
                seconds = part.seconds(rates)
                busy += seconds
                now += seconds
            case Start(name, collective):
                links_free = max(now, links_free) + seconds_of(collective)
                ends[name] = links_free
            case Done(name):
                now = max(now, ends.pop(name, 0.0))
            case WhileLoop(times, inner):
                inner_busy, waiting = _simulate(inner, rates, seconds_of)
                busy += times * inner_busy
                now += times * (inner_busy + waiting)
    return busy, max(now, *ends.values(), 0.0) - busy


def _parts(call: Call, computations: Mapping[str, Computation]) -> Iterator[Part]:
    computation = computations[call.computation]
    start_of: dict[str, str] = {}  # The `-start` of each asynchronous instruction.
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode.endswith(("-update", "-done")) and instruction.operands:
            start = start_of.get(instruction.operands[0])
            if start is not None and opcode.endswith("-done"):
                yield Done(start)
            elif start is not None:
                start_of[instruction.name] = start
            continue
        collective = _collective_of(instruction, call, computations)
        if collective is not None:
            yield Start(instruction.name, collective)
            if opcode.endswith("-start"):
                start_of[instruction.name] = instruction.name
            else:
                yield Done(instruction.name)
        elif opcode in ("while", "call", "conditional", "async-start"):
            for inner in calls_of(instruction, call, computations):
                yield WhileLoop(inner.trips or 1, tuple(_parts(inner, computations)))
        elif opcode not in _WITHOUT_WORK:
            yield _kernel(instruction, call, computations)


def _collective_of(
    instruction: Instruction, call: Call, computations: Mapping[str, Computation]
) -> Collective | None:
    """The collective that an instruction starts, also inside an `async-start`."""
    if instruction.opcode != "async-start":
        return read_collective(instruction, call)
    wrapped = [
        read_collective(inner, path)
        for path in calls_of(instruction, call, computations)
        for inner in computations[path.computation].values()
    ]
    return next((collective for collective in wrapped if collective), None)


def _kernel(
    instruction: Instruction, call: Call, computations: Mapping[str, Computation]
) -> Kernel:
    computation = computations[call.computation]
    products: dict[str, float] = {}
    elementwise = _count(instruction, computation, call, computations, products)
    operands = (computation[n] for n in instruction.operands if n in computation)
    sizes: list[float] = [num_bytes(operand.shape) for operand in operands]
    written = num_bytes(instruction.shape)
    if instruction.opcode == "fusion":
        for path in calls_of(instruction, call, computations):
            body = computations[path.computation]
            sizes = [min(size, _bytes_read(body, i)) for i, size in enumerate(sizes)]
            written = _bytes_written(body, written)
    elif instruction.opcode in _PARTS_OF_ARRAYS:
        sizes = [written]
    return Kernel(
        products=products, elementwise=elementwise, bytes=float(written + sum(sizes))
    )


def _count(
    instruction: Instruction,
    computation: Computation,
    call: Call,
    computations: Mapping[str, Computation],
    products: dict[str, float],
) -> float:
    """Return an instruction's elementwise FLOPs; add product FLOPs to `products`."""
    flops = product_flops(instruction, computation)
    if flops:
        (dtype, _), *_ = arrays(computation[instruction.operands[0]].shape)
        products[dtype] = products.get(dtype, 0.0) + flops
        return 0.0
    if instruction.opcode == "fusion":
        return sum(
            _count(inner, computations[path.computation], path, computations, products)
            for path in calls_of(instruction, call, computations)
            for inner in computations[path.computation].values()
        )
    if instruction.opcode in _MOVES:
        return 0.0
    shape = instruction.shape
    if instruction.opcode.startswith("reduce") and instruction.operands:
        shape = computation[instruction.operands[0]].shape
    return float(_num_elements(shape))


def _bytes_read(body: Computation, index: int) -> float:
    """Bytes that a fusion reads from a parameter; infinite: the whole array."""
    name = next(
        (
            i.name
            for i in body.values()
            if i.opcode == "parameter" and i.literal == str(index)
        ),
        None,
    )
    total, waiting = 0.0, [name]
    while waiting:
        source = waiting.pop()
        for user in body.values():
            if source not in user.operands:
                continue
            if user.opcode in ("bitcast", "reshape"):
                waiting.append(user.name)
            elif user.opcode in _PARTS_OF_ARRAYS and user.operands[0] == source:
                total += num_bytes(user.shape)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == source:
                continue  # An update in place does not read the array.
            else:
                return float("inf")
    return total


def _bytes_written(body: Computation, written: int) -> int:
    """Bytes that a fusion writes: only the parts that it changes in place."""
    for instruction in body.values():
        if instruction.opcode == "dynamic-update-slice":
            array, update, *_ = (num_bytes(body[n].shape) for n in instruction.operands)
            written -= array - update
    return max(written, 0)


def _num_elements(shape: str) -> int:
    return sum(math.prod(dims) for _, dims in arrays(shape))
