"""Parses XLA's text of a compiled program: instructions, calls, shapes and groups.

Shapes look like `(f32[8,4]{1,0:T(8,128)S(1)}, s32[])`. A group is the devices that take
part in one collective.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from replicax.errors import InternalError

__all__ = [
    "Call",
    "Computation",
    "Groups",
    "Instruction",
    "arrays",
    "calls",
    "calls_of",
    "elements",
    "num_bytes",
    "parse",
    "replica_groups",
    "slice_groups",
    "source_target_groups",
    "split_shape",
]

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"^([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDEX = re.compile(r"\bindex=(\d+)")

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<reshape>[\d,]+)\]T\((?P<order>[\d,]+)\)"
    r"|(?P<ids>[\d,]+))\))? \{(?P<over>(?:'[^',]+'(?::\(\d+\)\d+)?,?)*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")

_ARRAY = re.compile(
    r"\b(pred|token|opaque|(?:bf|[sufc])\d+\w*)\[([\d,]*)\](\{[^}]*\})?"
)
_BITS = re.compile(r"^[a-z]+?(\d+)")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        shape: The result's shape, as XLA writes it.
        literal: The text in the parentheses, such as a constant's value.
        attributes: The text after the parentheses.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call path from the program's entry to a computation.

    Attributes:
        caller: The instruction that calls the computation; None for the entry.
        times: Number of executions; a loop of unknown length counts once.
        trips: For the body of a loop: the number of iterations; None: unknown.
        is_async: Whether the program continues during the computation.
        is_fused: Whether the computation is in a fusion, which stores only its result.
    """

    computation: str
    caller: Instruction | None = None
    times: int = 1
    trips: int | None = None
    is_loop: bool = False
    is_async: bool = False
    is_fused: bool = False


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Parse a program: its computations by name, and the name of its entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        instruction = _instruction(line)
        if instruction is not None:
            current[instruction.name] = instruction
        elif not line.startswith("HloModule") and (match := _HEADER.match(line)):
            current = computations[match[1]] = {}
            if line.startswith("ENTRY"):
                entry = match[1]
    if not entry:
        raise InternalError(
            "plan: the compiled program's text has no entry computation; it begins "
            f"with {text[:80]!r}."
        )
    return dict(computations), entry


def calls(computations: Mapping[str, Computation], entry: str) -> Iterator[Call]:
    """Yield each call path from the entry to a computation, except to conditions."""
    waiting = [Call(computation=entry)]
    while waiting:
        call = waiting.pop(0)
        yield call
        for instruction in computations[call.computation].values():
            waiting += calls_of(instruction, call, computations)


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    shape, rest = split_shape(line[match.end() :])
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    arguments, attributes = split_shape(rest[opcode.end() - 1 :])
    return Instruction(
        name=match[2],
        shape=shape,
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(arguments)),
        literal=arguments[1:-1],
        attributes=attributes,
        is_root=bool(match[1]),
    )


def calls_of(
    instruction: Instruction, call: Call, computations: Mapping[str, Computation]
) -> Iterator[Call]:
    """Yield the paths of the computations that an instruction of `call` calls."""
    if instruction.opcode in ("async-update", "async-done"):
        return  # The path was already yielded for their `async-start`.
    pairs = _CALLED.findall(instruction.attributes)  # (role, name).
    for branches in _BRANCHES.findall(instruction.attributes):
        pairs += [("branch", name) for name in _OPERAND.findall(branches)]
    name_by_role = dict(pairs)
    for role, name in pairs:
        if role == "condition" or name not in computations:
            continue
        trips = None
        if role == "body":
            trips = _trip_count(
                instruction,
                computations[call.computation],
                computations.get(name_by_role.get("condition", ""), {}),
                computations[name],
            )
        yield Call(
            computation=name,
            caller=instruction,
            times=call.times * (1 if trips is None else trips),
            trips=trips,
            is_loop=role == "body",
            is_async=call.is_async or instruction.opcode.endswith("-start"),
            is_fused=call.is_fused or instruction.opcode == "fusion",
        )


def _trip_count(
    loop: Instruction,
    enclosing: Computation,
    condition: Computation,
    body: Computation,
) -> int | None:
    if trip_count := _TRIP_COUNT.search(loop.attributes):
        return int(trip_count[1])
    # The loops of JAX and of the TPU compiler count up while `counter < bound`.
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or "=LT" not in root.attributes:
        return None
    counter, bound = (condition.get(name) for name in root.operands)
    state = enclosing.get(loop.operands[0]) if loop.operands else None
    index = _INDEX.search(counter.attributes) if counter is not None else None
    if bound is None or index is None or state is None or state.opcode != "tuple":
        return None
    first = _constant(state.operands[int(index[1])], enclosing)
    stop = _constant(bound.name, condition)
    if first is None or stop is None:
        return None
    return max(math.ceil((stop - first) / _step(body, int(index[1]))), 0)


def _step(body: Computation, index: int) -> int:
    """The number that a loop's body adds to the counter at `index`; 1 if unknown."""
    root = next(i for i in body.values() if i.is_root)
    counter = body.get(root.operands[index]) if root.opcode == "tuple" else None
    if counter is None or counter.opcode != "add":
        return 1
    steps = (_constant(name, body) for name in counter.operands)
    return next((step for step in steps if step), 1)


def _constant(name: str, computation: Computation) -> int | None:
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = computation.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    is_number = re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_number else None


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and dimensions of each array in a shape.

    Example:
        >>> arrays("(f32[8,4]{1,0}, s32[])")
        [('f32', (8, 4)), ('s32', ())]
    """
    return [(dtype, _dims(dims)) for dtype, dims, _ in _ARRAY.findall(shape)]


def num_bytes(shape: str, layout: str = "") -> int:
    """Bytes of the arrays in a shape whose layout contains `layout`, without padding.

    Example:
        >>> num_bytes("(bf16[8,4]{1,0}, s4[3], pred[])")
        67
        >>> num_bytes("(f32[8]{0:T(128)S(1)}, f32[4]{0})", "S(1)")
        32
    """
    return sum(
        _array_bytes(dtype, _dims(dims))
        for dtype, dims, text in _ARRAY.findall(shape)
        if layout in text
    )


def elements(shape: str) -> list[str]:
    """Split a tuple shape into its elements; an array's shape is its own element.

    Example:
        >>> elements("((f32[2]{0}, f32[]), u32[])")
        ['(f32[2]{0}, f32[])', 'u32[]']
    """
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or not depth:
            parts.append(shape[start:i].strip())
            start = i + 1
    return parts


def split_shape(text: str) -> tuple[str, str]:
    """Split `text` after the shape or the parentheses at its beginning."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest.lstrip()
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _array_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    if dtype in ("token", "opaque"):
        return 0
    match = _BITS.match(dtype)
    bits = int(match[1]) if match else 8  # `pred` takes a byte.
    return math.ceil(bits * math.prod(dims) / 8)


def replica_groups(attributes: str) -> Groups:
    """Parse the groups in an instruction's attributes; empty: one group of all devices.

    Example:
        >>> replica_groups("replica_groups={{0,1},{2,3}}")
        ((0, 1), (2, 3))
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
        ((0, 2), (1, 3))
        >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}")
        ((0, 2), (1, 3))
        >>> replica_groups(
        ...     "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"
        ... )
        ((0, 1), (2, 3))
    """
    if "replica_groups=" not in attributes:
        return ()
    if match := _IOTA.search(attributes):
        return _from_iota(_numbers(match[1]), _numbers(match[2]), match[3])
    if match := _MESH.search(attributes):
        return _from_mesh(match)
    match = _EXPLICIT.search(attributes)
    if match is None:
        raise InternalError(
            "plan: unknown notation for replica groups: "
            f"{attributes[attributes.index('replica_groups=') :][:80]!r}."
        )
    groups = re.findall(r"\{([\d,]*)\}", match[1])
    return tuple(tuple(_numbers(group)) for group in groups)


def source_target_groups(attributes: str) -> Groups:
    """Parse groups of devices that exchange data, directly or through others.

    Example:
        >>> source_target_groups("source_target_pairs={{0,1},{1,0},{2,3}}")
        ((0, 1), (2, 3))
    """
    match = _PAIRS.search(attributes)
    if match is None:
        raise InternalError(f"plan: no source_target_pairs in {attributes[:80]!r}.")
    group_of: dict[int, set[int]] = {}
    for pair in re.findall(r"\{(\d+),(\d+)\}", match[1]):
        source, target = map(int, pair)
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def slice_groups(attributes: str) -> Groups:
    """Parse groups of chips: each has the chip at one position of every slice.

    Example:
        >>> slice_groups('_xla_megascale_target="{1,2}x{0:1}"')
        ((0, 2), (1, 3))
    """
    match = _SLICES.search(attributes)
    if match is None:
        raise InternalError(
            "plan: unknown notation for an exchange between slices: "
            f"{attributes[:200]!r}."
        )
    num_slices = len(_numbers(match[1]))
    first, last = int(match[2]), int(match[3])
    size = last - first + 1
    return tuple(tuple(i + k * size for k in range(num_slices)) for i in range(size))


def _from_iota(shape: list[int], reshape: list[int], order: str | None) -> Groups:
    """Parse `[groups,size]<=[dims]T(order)`: reshape 0, 1, 2, ..., transpose, split."""
    ids = np.arange(np.prod(reshape)).reshape(reshape)
    if order is not None:
        ids = ids.transpose(_numbers(order))
    rows = ids.reshape(shape[0], -1) if len(shape) > 1 else ids.reshape(1, -1)
    return tuple(tuple(row) for row in rows.tolist())


def _from_mesh(match: re.Match[str]) -> Groups:
    """Parse `mesh['a'=2,'b'=4] {'b'}`: devices of a group differ only in axis `b`.

    `device_ids=` lists the devices of a mesh in another order than 0, 1, 2, ... In
    `'b':(2)2`, axis `b` is split into 2 x 2 x the rest, and devices differ in the
    second part.
    """
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", match["axes"])}
    ids = np.arange(math.prod(sizes.values()))
    if match["ids"]:
        ids = np.array(_numbers(match["ids"]))
    elif match["reshape"]:
        ids = ids.reshape(_numbers(match["reshape"])).transpose(
            _numbers(match["order"])
        )
    over = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS.findall(match["over"])
    }
    shape: list[int] = []
    group_dims: list[int] = []
    for name, total in sizes.items():
        before, size = over.get(name, (1, 1))
        group_dims += [len(shape) + 1] * (name in over)
        shape += [before, size, total // (before * size)]
    other_dims = [i for i in range(len(shape)) if i not in group_dims]
    rows = ids.reshape(shape).transpose([*other_dims, *group_dims])
    rows = rows.reshape(-1, math.prod(shape[i] for i in group_dims))
    return tuple(tuple(row) for row in rows.tolist())


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
