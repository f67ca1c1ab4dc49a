"""Comments of code that goes away: they stay in the script."""

from collections.abc import Sequence
from typing import Any

import libcst as cst

from replicax.migrate.script import walk

__all__ = ["comment_lines", "lost_comments"]


def comment_lines(statement: Any) -> list[cst.EmptyLine]:
    """The comments of a statement that is taken out, as lines of their own."""
    return [cst.EmptyLine(comment=comment) for comment in _comments(statement)]


def lost_comments(original: Any, nodes: Sequence[Any]) -> list[cst.EmptyLine]:
    """Comments inside a simple statement that are not in what was made of it.

    Those in compound statements are in the statements of which these consist.
    """
    if not isinstance(original, cst.SimpleStatementLine):
        return []
    there = [c.value for node in nodes for c in _comments(node)]
    lost = []
    for comment in _comments(original):
        if comment.value in there:
            there.remove(comment.value)
        else:
            lost.append(cst.EmptyLine(comment=comment))
    return lost


def _comments(node: cst.CSTNode) -> list[cst.Comment]:
    return [n for n in walk(node) if isinstance(n, cst.Comment)]
