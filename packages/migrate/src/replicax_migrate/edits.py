"""Plans: what planners want changed in a script, which the rewriter carries out."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import libcst as cst

__all__ = ["Edits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """What a planner wants changed, by nodes of the original.

    A planner fills a plan of its own and returns it. `|` joins plans; where both have
    one thing for a node, that of the right one counts.

    Attributes:
        replacements: Functions from a node with ported children to its replacement.
        unchanged: Nodes that stay as they are, with all that is in them.
        wrappers: Templates, such as `"keras.ops.softmax({x})"`, that are applied to the
            port of a call or an operation.
        arg_keywords: Keywords for arguments by position.
        dropped_args: Arguments that are removed.
        appended_args: Arguments that are appended to calls.
        lines_above: Lines above statements.
        first_lines: Lines that blocks begin with.
        new_names: Names that inserted lines bind.
        generators: Names of the random generators that calls use.
        host_functions: Functions and lambdas that run in an input pipeline, on NumPy.
        traced_functions: Functions and lambdas that a strategy compiles.
        kept_imports: Targets of the imported names that stay.
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
        """Remove a statement, without visiting it."""
        self.unchanged.add(statement)
        self.replacements[statement] = lambda updated: cst.RemoveFromParent()

    def insert_above(self, statement: cst.CSTNode, *lines: str) -> None:
        """Insert lines above a statement."""
        self.lines_above.setdefault(statement, []).extend(lines)
