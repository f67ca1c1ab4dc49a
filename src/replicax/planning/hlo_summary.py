"""Summarizes a compiled program: collectives, loops, bytes that stay on the chip.

The only source is XLA's text. A loop counts as one iteration if the text does not
contain its trip count.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from replicax.planning.hlo import (
    Call,
    Computation,
    Groups,
    Instruction,
    arrays,
    calls,
    elements,
    num_bytes,
    parse,
    replica_groups,
    slice_groups,
    source_target_groups,
)

__all__ = [
    "FREE",
    "Collective",
    "ProgramSummary",
    "product_flops",
    "read_collective",
    "read_program",
]

_KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_TARGET_OF_PRODUCTS = re.compile(r'custom_call_target="__cublas\$\S*"')
_TARGET_OF_CONVOLUTIONS = re.compile(
    r'custom_call_target="__cudnn\$conv(?:BiasActivation)?'
    r'(Forward|BackwardInput|BackwardFilter)\w*"'
)
_TARGET_OF_ATTENTION = re.compile(
    r'custom_call_target="__cudnn\$fmha[A-Za-z]*?(Backward)?"'
)
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

FREE = {
    "async-done",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "parameter",
    "tuple",
    "while",
}
"""Opcodes without work of their own: they name values or call computations."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Equal collectives in a program, with their number.

    Attributes:
        dtype: XLA's name of the element type, such as `"f32"`; several are joined by
            `"+"`.
        bytes: Payload of one collective on one device: the input of an all-reduce or
            reduce-scatter, the output of an all-gather, else the bytes sent.
        count: Number of these collectives in one run of the program.
        groups: Mesh positions of the devices of each group; empty: one group of all
            devices.
        is_async: Whether the program computes while the collective runs.
    """

    kind: str
    dtype: str
    bytes: int
    count: int
    groups: Groups
    is_async: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSummary:
    """The summary of a program's text.

    Attributes:
        loop_flops: FLOPs of matrix products and convolutions in all loop iterations but
            the first; XLA's count has only the first.
        trip_counts: Number of iterations of each loop; None: not in the text.
        on_chip: Share of the bytes read and written that the compiler has placed in
            memory on the chip; 0 if the text has no placement.
    """

    collectives: tuple[Collective, ...]
    loop_flops: float
    trip_counts: tuple[int | None, ...]
    on_chip: float


def read_program(text: str) -> ProgramSummary:
    """Read the text of a compiled program, `jax.stages.Compiled.as_text()`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(jnp.sin).lower(1.0).compile()
        >>> read_program(compiled.as_text()).collectives
        ()
    """
    computations, entry = parse(text)
    counts: dict[Collective, int] = {}
    loop_flops = moved = moved_on_chip = 0.0
    trip_counts = []
    for call in calls(computations, entry):
        computation = computations[call.computation]
        if call.is_loop:
            trip_counts.append(call.trips)
        for instruction in computation.values():
            collective = read_collective(instruction, call)
            if collective and not _repeats(instruction, computation):
                counts[collective] = counts.get(collective, 0) + call.times
            loop_flops += (call.times - 1) * product_flops(instruction, computation)
            if not call.is_fused and not call.is_async:
                total, on_chip = _traffic(instruction, computation)
                moved += total
                moved_on_chip += on_chip
    return ProgramSummary(
        collectives=tuple(
            dataclasses.replace(collective, count=count)
            for collective, count in counts.items()
        ),
        loop_flops=loop_flops,
        trip_counts=tuple(trip_counts),
        on_chip=moved_on_chip / moved if moved else 0.0,
    )


def _repeats(instruction: Instruction, computation: Computation) -> bool:
    """Whether a collective of a TPU program was counted where it starts.

    The fusion that starts an asynchronous collective, those that overlap it and the one
    that awaits it all contain the collective, with the same `chain_id`.
    """
    return "chain_id=" in instruction.attributes and not any(
        '"AsyncCollectiveStart"' in other.attributes for other in computation.values()
    )


def read_collective(instruction: Instruction, call: Call) -> Collective | None:
    """Read one collective from an instruction; None for other instructions."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and (match := _BETWEEN_SLICES.search(instruction.attributes)):
        return _between_slices(instruction, match[1].lower().replace("_", "-"))
    if kind not in _KINDS:
        return None
    if kind == "collective-permute":
        groups = source_target_groups(instruction.attributes)
    else:
        groups = replica_groups(instruction.attributes)
    shape = instruction.shape
    if instruction.opcode.endswith("-start"):
        first, *others = elements(shape)
        # The shape lists operands, results and flags. Before JAX 0.11 the shape of an
        # all-reduce lists only results.
        if kind != "all-reduce" or first.startswith("("):
            shape = others[0]
    size = num_bytes(shape)
    if kind == "reduce-scatter":
        size *= len(groups[0]) if groups else 1
    caller = call.caller.attributes if call.caller is not None else ""
    if kind == "all-reduce" and "calls=%all-reduce-scatter" in caller:
        kind = "reduce-scatter"  # TPU programs fuse an all-reduce with a slice.
    return Collective(
        kind=kind,
        dtype="+".join(sorted({dtype for dtype, _ in arrays(shape)})),
        bytes=size,
        count=1,
        groups=groups,
        is_async=call.is_async
        or instruction.opcode.endswith("-start")
        or "chain_id=" in instruction.attributes,
    )


def _between_slices(instruction: Instruction, kind: str) -> Collective:
    """Read a host's send for its chips as one collective between slices."""
    shape = elements(instruction.shape)[0]
    return Collective(
        kind=kind,
        dtype="+".join(sorted({dtype for dtype, _ in arrays(shape)})),
        bytes=num_bytes(shape),
        count=1,
        groups=slice_groups(instruction.attributes),
        is_async=False,
    )


def _traffic(instruction: Instruction, computation: Computation) -> tuple[int, int]:
    """Bytes that an instruction reads and writes, in all and on the chip."""
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0, 0
    read = [computation[n].shape for n in instruction.operands if n in computation]
    shapes = [instruction.shape, *read]
    on_chip = sum(num_bytes(shape, "S(1)") for shape in shapes)
    return sum(map(num_bytes, shapes)), on_chip


def product_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a matrix product or convolution; 0 for anything else."""
    if instruction.opcode == "custom-call":
        return _library_flops(instruction, computation)
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    left, right = (_dims(name, computation) for name in instruction.operands)
    (_, results), *_ = arrays(instruction.shape)
    if instruction.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        summed = [int(i) for i in match[1].split(",") if i] if match else []
        return 2.0 * math.prod(results) * math.prod(left[i] for i in summed)
    met = _met_share(instruction, left)
    return met * _convolution_flops(instruction, results, right)


def _met_share(instruction: Instruction, inputs: Sequence[int]) -> float:
    """Share of a convolution's products that are not with padding or dilation's zeros.

    The TPU compiler writes products of matrices as convolutions with large padding.
    """
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    labels = re.search(r"dim_labels=(\w+)_", instruction.attributes)
    if window is None or labels is None:
        return 1.0
    fields = {
        name: values.split("x")
        for name, _, values in (word.partition("=") for word in window[1].split())
    }
    share, ones = 1.0, ["1"] * len(fields["size"])
    for i, taps in enumerate(map(int, fields["size"])):
        low, high = map(int, fields.get("pad", ["0_0"] * len(ones))[i].split("_"))
        stride, spread, apart = (
            int(fields.get(name, ones)[i])
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        end = (inputs[labels[1].index(str(i))] - 1) * spread + 1
        num_outputs = (end + low + high - (taps - 1) * apart - 1) // stride + 1
        starts = np.arange(num_outputs) * stride - low
        at = np.add.outer(starts, np.arange(taps) * apart)
        share *= float(np.mean((at >= 0) & (at < end) & (at % spread == 0)))
    return share


def _library_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a call of cuBLAS or cuDNN."""
    (_, results), *_ = arrays(instruction.shape) or [("", ())]
    if _TARGET_OF_PRODUCTS.search(instruction.attributes):
        summed = _CONTRACTED.search(instruction.attributes)
        left = _dims(instruction.operands[0], computation)
        dims = [int(i) for i in re.findall(r"\d+", summed[1])] if summed else []
        return 2.0 * math.prod(results) * math.prod(left[i] for i in dims)
    if match := _TARGET_OF_ATTENTION.search(instruction.attributes):
        query, key = (_dims(name, computation) for name in instruction.operands[:2])
        # Arrays are [b, t, heads, d]. Forward has two products, backward has five.
        # Causal attention counts as full attention.
        return (10.0 if match[1] else 4.0) * math.prod(query) * key[1]
    match = _TARGET_OF_CONVOLUTIONS.search(instruction.attributes)
    if match is None:
        return 0.0
    first, second = (_dims(name, computation) for name in instruction.operands[:2])
    # All three kinds have the FLOPs of the forward convolution: its number of outputs
    # times the kernel's elements per output.
    outputs, kernel = {
        "Forward": (results, second),
        "BackwardInput": (first, second),
        "BackwardFilter": (second, results),
    }[match[1]]
    return _convolution_flops(instruction, outputs, kernel)


def _convolution_flops(
    instruction: Instruction, outputs: Sequence[int], kernel: Sequence[int]
) -> float:
    match = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    channels = kernel[match[1].index("o")] if match else 1
    return 2.0 * math.prod(outputs) * math.prod(kernel) / max(channels, 1)


def _dims(name: str, computation: Computation) -> Sequence[int]:
    (_, dims), *_ = arrays(computation[name].shape)
    return dims
