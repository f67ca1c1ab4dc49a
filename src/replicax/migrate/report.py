"""What a port has to say: what is left, and what now behaves differently."""

import re
from dataclasses import dataclass

import libcst as cst

__all__ = ["MARK", "Finding", "Report", "is_mark", "mark_text", "with_marks"]

MARK = "# replicax: "
"""How a comment begins that says what could not be ported."""


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """Something to know about a line of the original script.

    Attributes:
        line: Its number in the original, from 1.
        source: The text there, on one line.
        reason: What could not be ported, and what to do; or what differs now.
        is_left: Whether it was left as it was, and marked. Otherwise it is a note.
    """

    line: int
    source: str
    reason: str
    is_left: bool = True

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}  [{self.source}]"


class Report:
    """The findings of one script, and the marks of its statements."""

    def __init__(self) -> None:
        self.findings: set[Finding] = set()
        self._marks: dict[cst.CSTNode, list[str]] = {}

    def leave(self, statement: cst.CSTNode, line: int, source: str, why: str) -> None:
        """Say that something in `statement` could not be ported."""
        self.findings.add(Finding(line, _short(source), why))
        marks = self._marks.setdefault(statement, [])
        if why not in marks:
            marks.append(why)

    def note(self, line: int, source: str, what: str) -> None:
        """Say that something was ported, and differs."""
        self.findings.add(Finding(line, _short(source), what, is_left=False))

    def marks_of(self, statement: cst.CSTNode) -> list[str]:
        """The reasons to write above an original statement."""
        return self._marks.get(statement, [])


def is_mark(line: cst.EmptyLine) -> bool:
    """Whether a line holds a mark of an earlier run."""
    return line.comment is not None and line.comment.value.startswith(MARK)


def mark_text(line: cst.EmptyLine) -> str:
    """The reason that a mark gives."""
    return line.comment.value.removeprefix(MARK) if line.comment else ""


def with_marks(statement: cst.CSTNode, reasons: list[str]) -> cst.CSTNode:
    """`statement` below a comment for each of `reasons` that it does not have yet."""
    lines = list(statement.leading_lines)  # type: ignore[attr-defined]
    there = {mark_text(line) for line in lines if is_mark(line)}
    for reason in reasons:
        if reason not in there:
            lines.append(cst.EmptyLine(comment=cst.Comment(MARK + reason)))
    return statement.with_changes(leading_lines=lines)


def _short(source: str) -> str:
    text = re.sub(r"\s+", " ", source).strip()
    return text if len(text) <= 70 else f"{text[:67]}..."
