"""`Edits`: the planned changes of a script, which the rewriter applies."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import libcst as cst

__all__ = ["Edits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """The edits that an analysis pass plans, by nodes of the original tree.

    `a | b` joins the edits of two passes. For a node that both replace, `b` wins.

    Attributes:
        replacements: Maps a node to the function that returns its replacement. The
            function gets the node with ported children.
        unchanged: Nodes that the rewriter does not visit.
        wrappers: Maps an expression to a template such as `"keras.ops.softmax({x})"`,
            where `x` is the ported expression.
        arg_keywords: Maps a positional argument to the keyword to add.
        dropped_args: Arguments to remove.
        appended_args: Maps a call to an argument to append.
        lines_above: Maps a statement to lines of code to insert above it.
        first_lines: Maps a block to a line of code to insert at its start.
        new_names: Names that inserted lines bind.
        generators: Maps a call to the name of the random generator to pass.
        host_functions: Functions and lambdas that run in an input pipeline, on NumPy.
        traced_functions: Functions and lambdas that a strategy compiles.
        kept_imports: Maps the local name of an import that stays to its path.
    """

    replacements: dict[cst.CSTNode, Callable[[Any], Any]] = field(default_factory=dict)
    unchanged: set[cst.CSTNode] = field(default_factory=set)
    wrappers: dict[cst.CSTNode, str] = field(default_factory=dict)
    arg_keywords: dict[cst.Arg, str] = field(default_factory=dict)
    dropped_args: set[cst.Arg] = field(default_factory=set)
    appended_args: dict[cst.Call, cst.Arg] = field(default_factory=dict)
    lines_above: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    first_lines: dict[cst.CSTNode, str] = field(default_factory=dict)
    new_names: set[str] = field(default_factory=set)
    generators: dict[cst.CSTNode, str] = field(default_factory=dict)
    host_functions: set[cst.CSTNode] = field(default_factory=set)
    traced_functions: set[cst.CSTNode] = field(default_factory=set)
    kept_imports: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: "Edits") -> "Edits":
        names = [item.name for item in fields(self)]
        joined = {name: getattr(self, name) | getattr(other, name) for name in names}
        joined["lines_above"] = {
            node: self.lines_above.get(node, []) + other.lines_above.get(node, [])
            for node in joined["lines_above"]
        }
        return Edits(**joined)

    def remove(self, statement: cst.CSTNode) -> None:
        """Remove a statement."""
        self.unchanged.add(statement)
        self.replacements[statement] = lambda updated: cst.RemoveFromParent()

    def insert_above(self, statement: cst.CSTNode, *lines: str) -> None:
        """Insert lines of code above a statement."""
        self.lines_above.setdefault(statement, []).extend(lines)
