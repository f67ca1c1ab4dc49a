"""The texts of blocks: programs, repairs, and what the command changes in them."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from tests.seeds.blocks_program import Program

__all__ = ["BLOCKS", "Counts", "counts", "original", "part_text", "program_text"]

BLOCKS = Path(__file__).parent / "blocks"
_END_OF_HEADER = "# ---\n"
_REPAIRED = re.compile(r"^(?P<indent> *).*?  # repaired: (?:was (?P<was>.*)|added)$")


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a program's blocks: of the source, changed by the command, repaired."""

    source: int
    changed: int
    repaired: int


def part_text(part: str) -> str:
    """A part without the comment that it begins with."""
    text = (BLOCKS / f"{part}.py.txt").read_text(encoding="utf-8")
    _, end, body = text.partition(_END_OF_HEADER)
    assert end, f"{part}: no header"
    return body


def original(part: str) -> str:
    """A block with its repairs undone."""
    lines = []
    for line in part_text(part).splitlines():
        repaired = _REPAIRED.match(line)
        if not repaired:
            lines.append(line)
        elif repaired["was"]:
            lines.append(repaired["indent"] + repaired["was"])
    return "\n".join(lines)


def _sections(program: Program) -> list[tuple[str, str]]:
    """The program's parts and their texts, with the names that codas need."""
    sections = []
    names = "".join(f"{name} = {what}\n" for name, what in program.names.items())
    for part in program.parts:
        if names and part.endswith(".coda"):
            sections.append(("names", names))
            names = ""
        text = part_text(part)
        for old, new in program.replaced.items():
            text = text.replace(old, new)
        sections.append((part, text))
    return sections


def program_text(program: Program) -> str:
    """The whole program, as it is for TensorFlow."""
    return "".join(text for _, text in _sections(program))


def counts(program: Program, ported: str) -> Counts:
    """How many lines the blocks have, and how many of them `ported` has not."""
    before = program_text(program).splitlines()
    matcher = difflib.SequenceMatcher(None, before, ported.splitlines(), autojunk=False)
    kept = {
        line
        for start, _, length in matcher.get_matching_blocks()
        for line in range(start, start + length)
    }
    first = source = changed = repaired = 0
    for part, text in _sections(program):
        lines = text.splitlines()
        if part in program.blocks:
            own = [i for i, line in enumerate(lines, first) if line.strip()]
            source += len(own)
            changed += sum(i not in kept for i in own)
            repaired += sum(bool(_REPAIRED.match(line)) for line in lines)
        first += len(lines)
    return Counts(source, changed, repaired)
