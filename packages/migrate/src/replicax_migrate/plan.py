"""Plans: what planners want changed in a script, which the rewriter carries out."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import libcst as cst

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a planner wants changed, by nodes of the original.

    A planner fills a plan of its own and returns it. `|` joins plans; where both have
    one thing for a node, that of the right one counts.

    Attributes:
        replacements: Functions from a node with ported children to its replacement.
        kept: Nodes that stay as they are, with all that is in them.
        wrapped: Templates, such as `"keras.ops.softmax({x})"`, that are applied to the
            port of a call or an operation.
        keywords: Keywords for arguments by position.
        dropped: Arguments that are removed.
        appended: Arguments that are appended to calls.
        inserted: Lines above statements.
        first_lines: Lines that blocks begin with.
        names: Names that inserted lines bind.
        generators: Names of the random generators that calls use.
        host_functions: Functions and lambdas that run in an input pipeline, on NumPy.
        traced_functions: Functions and lambdas that a strategy compiles.
        retained: Targets of the imported names that stay.
    """

    replacements: dict[cst.CSTNode, Callable[[Any], Any]] = field(default_factory=dict)
    kept: set[cst.CSTNode] = field(default_factory=set)
    wrapped: dict[cst.CSTNode, str] = field(default_factory=dict)
    keywords: dict[cst.Arg, str] = field(default_factory=dict)
    dropped: set[cst.Arg] = field(default_factory=set)
    appended: dict[cst.Call, cst.Arg] = field(default_factory=dict)
    inserted: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    first_lines: dict[cst.CSTNode, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    generators: dict[cst.CSTNode, str] = field(default_factory=dict)
    host_functions: set[cst.CSTNode] = field(default_factory=set)
    traced_functions: set[cst.CSTNode] = field(default_factory=set)
    retained: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: "Plan") -> "Plan":
        names = [item.name for item in fields(self)]
        joined = {name: getattr(self, name) | getattr(other, name) for name in names}
        joined["inserted"] = {
            node: self.inserted.get(node, []) + other.inserted.get(node, [])
            for node in joined["inserted"]
        }
        return Plan(**joined)

    def take_out(self, statement: cst.CSTNode) -> None:
        """Remove a statement, without visiting it."""
        self.kept.add(statement)
        self.replacements[statement] = lambda updated: cst.RemoveFromParent()

    def insert(self, statement: cst.CSTNode, *lines: str) -> None:
        """Insert lines above a statement."""
        self.inserted.setdefault(statement, []).extend(lines)
