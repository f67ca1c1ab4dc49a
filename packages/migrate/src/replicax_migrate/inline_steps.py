"""Makes functions of training steps with a tape that stand in a loop.

TensorFlow runs such a step as it stands. JAX computes gradients in a function that a
strategy runs, so the lines from the tape to the update become one, above the loop. It
gets the arrays that the loop makes, and returns what other lines read. The port of the
script with the function counts where less is left of it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from replicax_migrate.flow import Definition
from replicax_migrate.kinds import kind_of
from replicax_migrate.origins import bound_values, ends_at_cycles, iterated, returned
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES
from replicax_migrate.tree import (
    find,
    free_name,
    is_name,
    method_of,
    names_in,
    object_of,
    parts_of,
    walk,
)

__all__ = ["InlineStep", "inline_steps", "with_functions"]

_LOOPS = (cst.For, cst.While)
_REFUSED = (
    *(cst.Assert, cst.FormattedString, cst.Lambda, cst.NamedExpr, cst.Global),
    *(cst.Return, cst.Break, cst.Continue, cst.Yield, cst.Await, cst.Del),
    *(cst.FunctionDef, cst.ClassDef, cst.Import, cst.ImportFrom, cst.Nonlocal),
)


@dataclass(frozen=True, eq=False)
class InlineStep:
    """Lines of a loop that become a function.

    Attributes:
        lines: The lines, from the tape to the update.
        loop: The outermost loop around them, in the same function.
        parameters: The names that the loop binds, and the lines read.
        results: The names that the lines bind, and others read.
    """

    lines: Sequence[cst.BaseStatement]
    loop: cst.CSTNode
    parameters: Sequence[str]
    results: Sequence[str]


def inline_steps(script: Script) -> list[InlineStep]:
    """The steps with a tape in loops of a script that may become functions."""
    found: list[InlineStep] = []
    taken: set[cst.CSTNode] = set()
    for node in script.nodes(cst.With):
        has_tape = any(script.called(i.item) == "GradientTape" for i in node.items)
        if not has_tape or not taken.isdisjoint([node, *script.parents(node)]):
            continue
        lines = _lines(script, node)
        taken.update(lines)
        step = _step(script, lines) if lines else None
        if step is not None:
            found.append(step)
    return found


def _lines(script: Script, tape: cst.With) -> Sequence[cst.BaseStatement]:
    """The lines from a tape to the last one that differentiates, or updates."""
    block = script.parent(tape)
    body = block.body if isinstance(block, cst.IndentedBlock) else ()
    behind = list(body[body.index(tape) :]) if tape in body else []
    methods = [set(map(method_of, find(line, cst.Call))) for line in behind]
    is_applied = any("apply_gradients" in each for each in methods)
    ends = {*NAMES["ends_of_steps"], *(() if is_applied else NAMES["assign_methods"])}
    last = [i for i, each in enumerate(methods) if each & ends]
    return behind[: last[-1] + 1] if last else []


def _step(script: Script, lines: Sequence[cst.BaseStatement]) -> InlineStep | None:
    """The step of some lines; None where they cannot be a function."""
    loop = _outermost_loop(script, lines[0])
    if loop is None or any(True for line in lines for _ in find(line, *_REFUSED)):
        return None
    inside = {node for line in lines for node in walk(line)}
    in_loop = set(walk(loop))
    given: dict[str, None] = {}
    for use in (node for line in lines for node in find(line, cst.Name)):
        made = [d for d in script.flow.reaching(use) if d.node not in inside]
        if any(each.node in in_loop for each in made):
            is_array = all(_is_array_of(script, each) for each in made)
            if not is_array or _is_number_there(script, use):
                return None
            given[use.value] = None
    results: dict[str, None] = {}
    for made in script.flow.definitions:
        if isinstance(made.node, cst.Name) and made.node in inside:
            name = made.node.value
            is_read = any(use not in inside for use in script.flow.uses(made))
            if name in given or is_read:
                results[name] = None
                if not _is_array_of(script, made):
                    return None
    return InlineStep(lines, loop, [*given], [*results])


def _outermost_loop(script: Script, line: cst.CSTNode) -> cst.CSTNode | None:
    """The outermost loop around a line, in the same function."""
    loop = None
    for parent in script.parents(line):
        if isinstance(parent, cst.FunctionDef | cst.ClassDef):
            break
        loop = parent if isinstance(parent, _LOOPS) else loop
    return loop


# What a compiled function may be given: arrays, no numbers of Python.

_NUMBERS = ("count", "items", "keys", "range")


def _is_array_of(script: Script, definition: Definition) -> bool:
    """Whether a definition is seen to bind an array, or a list of arrays."""
    node = definition.node
    loop = script.around(node, cst.For)
    if loop is not None and node in walk(loop.target):
        return _is_of_data(script, loop, node)
    parent = script.parent(node)
    if isinstance(parent, cst.AugAssign):
        return any(_is_array(script, each) for each in (parent.target, parent.value))
    values = bound_values(script, definition)
    return bool(values) and all(_is_array(script, value) for value in values)


def _is_of_data(script: Script, loop: cst.For, node: cst.CSTNode) -> bool:
    """Whether a loop's target is an element of data, not a counter."""
    iterable = script.flow.resolved(loop.iter)
    if isinstance(iterable, cst.Call) and is_name(iterable.func, "enumerate"):
        first = [*parts_of(loop.target), node][0]
        return node is not first and bool(iterable.args)
    if isinstance(iterable, cst.Call):
        name = method_of(iterable) or getattr(iterable.func, "value", "")
        return name not in _NUMBERS
    shown = parts_of(iterable)
    is_shown = bool(shown) and all(parts_of(each) for each in shown)
    return is_shown or isinstance(iterable, cst.Name | cst.Attribute)


@ends_at_cycles(False)
def _is_array(script: Script, node: Expression) -> bool:
    """Whether an expression is seen to be an array, or a list of arrays."""
    match node:
        case cst.Call():
            return _makes_array(script, node)
        case cst.BinaryOperation():
            return _is_array(script, node.left) or _is_array(script, node.right)
        case cst.UnaryOperation():
            return _is_array(script, node.expression)
        case cst.Subscript():
            return _is_array(script, node.value)
        case cst.List() | cst.Tuple():
            return all(_is_array(script, each) for each in parts_of(node))
        case cst.ListComp():
            return _is_array(script, node.elt)
        case cst.Name():
            found = script.flow.reaching(node)
            is_each = iterated(script, node) is not None and not found
            return is_each or (
                bool(found) and all(_is_array_of(script, each) for each in found)
            )
    return False


def _makes_array(script: Script, node: cst.Call) -> bool:
    """Whether a call is seen to give an array, or a list of arrays."""
    path, name = script.called(node), method_of(node)
    if path:
        return path not in NAMES["sizes"]
    if (script.names.imported(node.func) or "").startswith("numpy."):
        return name not in ("prod", "size", "shape")
    if is_name(node.func, "next") or name == "gradient":
        return True
    values = list(returned(script, node))
    if values:
        return all(_is_array(script, value) for value in values)
    is_called = kind_of(script, node.func) in {"layer", "loss", "model"}
    is_made = kind_of(script, node) in {"model", "optimizer"}
    return is_called or is_made or (bool(name) and _is_array(script, object_of(node)))


def _is_number_there(script: Script, use: cst.CSTNode) -> bool:
    """Whether Python reads a value: as an index, a condition, or a number of turns."""
    node = use
    for parent in script.parents(use):
        match parent:
            case cst.SubscriptElement() | cst.CompIf():
                return True
            case cst.If() | cst.IfExp() | cst.While():
                if parent.test is node:
                    return True
            case cst.For():
                return parent.iter is node
            case cst.BaseStatement() | cst.BaseSmallStatement():
                if isinstance(parent, cst.BaseCompoundStatement):
                    return False
        node = parent
    return False


# The script with functions.

_Changes: TypeAlias = dict[cst.CSTNode, list[cst.BaseStatement]]
"""Lines by the original ones."""


def with_functions(
    script: Script, steps: Sequence[InlineStep]
) -> tuple[cst.Module, dict[int, int]]:
    """Make functions of steps.

    Returns:
        The script's tree with the functions, and the lines of the original by those
        of it.
    """
    used = names_in(script.module)
    changes: _Changes = {}
    functions: _Changes = defaultdict(list)
    for step in steps:
        name = free_name(used, "train_step")
        used.add(name)
        first, *others = step.lines
        results = ", ".join(step.results)
        call = f"{name}({', '.join(step.parameters)})"
        line = cst.parse_statement(f"{results} = {call}" if results else call)
        changes[first] = [line]
        changes.update((line, []) for line in others)
        end = [cst.parse_statement(f"return {results}")] if results else []
        made = cst.parse_statement(f"def {name}({', '.join(step.parameters)}): pass")
        assert isinstance(made, cst.FunctionDef)
        made = made.with_changes(
            body=cst.IndentedBlock([*step.lines, *end]),
            leading_lines=[cst.EmptyLine(indent=False)],
        )
        functions[step.loop].append(made)
    module = script.module.visit(_Replacing(changes, functions))
    return module, _lines_before(script, module)


class _Replacing(cst.CSTTransformer):
    """Replaces lines by others, and inserts functions above loops."""

    def __init__(self, changes: _Changes, functions: _Changes) -> None:
        super().__init__()
        self._changes = changes
        self._functions = functions

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        if original_node in self._changes:
            return cst.FlattenSentinel(self._changes[original_node])
        if original_node in self._functions:
            return cst.FlattenSentinel([*self._functions[original_node], updated_node])
        return updated_node


def _lines_before(script: Script, module: cst.Module) -> dict[int, int]:
    """The original's lines by those of a tree that has most of its nodes."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    lines: dict[int, int] = {}
    for node in walk(module):
        if script.parent(node) is not None:
            lines.setdefault(positions[node].start.line, script.line(node))
    last = 1
    for number in range(1, positions[module].end.line + 1):
        last = lines.setdefault(number, last)
    return lines
