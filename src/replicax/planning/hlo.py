"""XLA's text of a compiled program as instructions, and who calls whom how often."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from replicax.errors import InternalError
from replicax.planning.shapes import split_shape

__all__ = ["Call", "Computation", "Instruction", "calls", "parse", "starts_async"]

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


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name.
        shape: Of the result, as XLA writes it.
        opcode: What it does, such as `"all-reduce"`.
        operands: Names of the instructions whose results it takes.
        literal: What stands where others have operands, such as a constant's value.
        attributes: All that follows.
        is_root: Whether the computation returns it.
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
    """One way from the program's entry to a computation.

    Attributes:
        computation: Its name.
        caller: The instruction that calls it; None: it is the entry.
        times: How often the program goes this way; a loop of unknown length: once.
        trips: Of the loop whose body it is: the rounds, None if they are not known.
        is_loop: Whether it is the body of a loop.
        is_async: Whether the program starts it and goes on meanwhile.
        is_fused: Whether it is part of a fusion, whose inner results are never stored.
    """

    computation: str
    caller: Instruction | None = None
    times: int = 1
    trips: int | None = None
    is_loop: bool = False
    is_async: bool = False
    is_fused: bool = False


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a program by name, and the name of its entry.

    Raises:
        InternalError: If the text has no entry.
    """
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
    """All ways from the entry to computations; conditions of loops are left out."""
    waiting = [Call(computation=entry)]
    while waiting:
        call = waiting.pop(0)
        yield call
        for instruction in computations[call.computation].values():
            waiting += _called(instruction, call, computations)


def starts_async(instruction: Instruction) -> bool:
    """Whether the program goes on while this instruction works."""
    if instruction.opcode.endswith("-start"):
        return True
    # TPUs run a collective along with a computation that it is fused with.
    return instruction.opcode == "fusion" and bool(
        re.search(r"calls=%async[_\-]collective", instruction.attributes)
    )


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    shape, rest = split_shape(line[match.end() :])
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    inside, attributes = split_shape(rest[opcode.end() - 1 :])
    return Instruction(
        name=match[2],
        shape=shape,
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(inside)),
        literal=inside[1:-1],
        attributes=attributes,
        is_root=bool(match[1]),
    )


def _called(
    instruction: Instruction, call: Call, computations: Mapping[str, Computation]
) -> Iterator[Call]:
    if instruction.opcode in ("async-update", "async-done"):
        return  # They name the computation that `async-start` has called.
    names = _CALLED.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
        names += [("branch", name) for name in _OPERAND.findall(branches)]
    roles = dict(names)
    for role, name in names:
        if role == "condition" or name not in computations:
            continue
        trips = None
        if role == "body":
            trips = _trip_count(
                instruction,
                computations[call.computation],
                computations.get(roles.get("condition", ""), {}),
            )
        yield Call(
            computation=name,
            caller=instruction,
            times=call.times * (1 if trips is None else trips),
            trips=trips,
            is_loop=role == "body",
            is_async=call.is_async or starts_async(instruction),
            is_fused=call.is_fused or instruction.opcode == "fusion",
        )


def _trip_count(
    loop: Instruction, around: Computation, condition: Computation
) -> int | None:
    known = _TRIP_COUNT.search(loop.attributes)
    if known:
        return int(known[1])
    # JAX's loops count up by one while `counter < bound`.
    root = next((i for i in condition.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or "=LT" not in root.attributes:
        return None
    counter, bound = (condition.get(name) for name in root.operands)
    state = around.get(loop.operands[0]) if loop.operands else None
    index = _INDEX.search(counter.attributes) if counter is not None else None
    if bound is None or index is None or state is None or state.opcode != "tuple":
        return None
    first = _constant(state.operands[int(index[1])], around)
    last = _constant(bound.name, condition)
    return None if first is None or last is None else max(last - first, 0)


def _constant(name: str, computation: Computation) -> int | None:
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = computation.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    is_number = re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_number else None
