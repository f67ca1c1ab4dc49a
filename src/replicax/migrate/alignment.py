"""Keeps lines aligned with the bracket that they stand in, where it moves.

The lines are marked in the original by form feeds, which are blanks to Python, and get
their blanks back in the port.
"""

import io
import tokenize
from collections.abc import Iterator

__all__ = ["marked_lines", "realigned"]

_MARK = "\f"
_OPEN, _CLOSE = "([{", ")]}"
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def marked_lines(text: str) -> str:
    """`text` with a mark in place of the blanks of lines that follow a bracket.

    One mark stands for the column behind the bracket; two stand for the column of the
    line that opens it, if that line is itself marked, and have the blanks from there
    behind them.
    """
    if _MARK in text:
        return text
    lines = list(io.StringIO(text, newline=""))
    marks: dict[int, str] = {}
    try:
        for row, column, (opened, behind) in _continued(lines):
            opening = lines[opened]
            start = len(opening) - len(opening.lstrip(" "))
            if lines[row][:column].strip(" "):
                continue  # Tabs.
            if column == behind:
                marks[row] = _MARK
            elif opened in marks and column >= start:
                marks[row] = 2 * _MARK + " " * (column - start)
    except (tokenize.TokenError, SyntaxError):
        return text  # The parser says it better.
    for row, mark in marks.items():
        lines[row] = mark + lines[row].lstrip(" ")
    return "".join(lines)


def realigned(text: str) -> str:
    """`text` with blanks in place of the marks."""
    if _MARK not in text:
        return text
    lines = list(io.StringIO(text, newline=""))
    moved: dict[int, int] = {}
    for row, _, (opened, behind) in _continued(lines):
        line = lines[row].lstrip(_MARK)
        marks = len(lines[row]) - len(line)
        if marks == 0:
            continue
        opening = lines[opened]
        start = len(opening) - len(opening.lstrip(" "))
        blanks = start if marks > 1 else behind + moved.get(opened, 0)
        lines[row] = " " * blanks + line
        moved[row] = blanks - marks
    return "".join(line.replace(_MARK, "") for line in lines)


def _continued(lines: list[str]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """The lines that begin in brackets.

    Yields:
        The row of a line, the column of its first token, and of the innermost bracket
        around that the row and the column behind it.
    """
    stack: list[tuple[int, int]] = []
    last = -1
    original = iter(list(lines))
    for token in tokenize.generate_tokens(lambda: next(original, "")):
        row, column = token.start[0] - 1, token.start[1]
        if token.type not in _LAYOUT and row != last and stack:
            yield row, column, stack[-1]
        last = max(last, token.end[0] - 1)
        if token.type == tokenize.OP and token.string in _OPEN:
            stack.append((row, column + 1))
        elif token.type == tokenize.OP and token.string in _CLOSE and stack:
            stack.pop()
