"""Statements as a whole: those taken out, and contexts that are unwrapped."""

from typing import Any

import libcst as cst

from replicax.migrate.script import Script
from replicax.migrate.tables import DROPPED

__all__ = [
    "body_in_place",
    "is_dropped",
    "note_dropped",
    "transparent_items",
    "unless_empty",
    "unwrapped",
]

_TRANSPARENT = ("control_dependencies", "Graph.as_default", "init_scope")


def is_dropped(script: Script, line: cst.SimpleStatementLine) -> bool:
    """Whether a line is one call of those that only TensorFlow needs."""
    return _dropped_path(script, line) is not None


def note_dropped(script: Script, line: cst.SimpleStatementLine) -> None:
    """Say that a line is gone, and why."""
    path = _dropped_path(script, line)
    if path is not None:
        script.note(line, f"tf.{path} is taken out: {DROPPED[path]}")


def _dropped_path(script: Script, line: cst.SimpleStatementLine) -> str | None:
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Expr):
        return None
    call = line.body[0].value
    if not isinstance(call, cst.Call):
        return None
    path = script.names.path(call.func)
    if path is None and isinstance(call.func, cst.Attribute):
        inner = call.func.value
        if isinstance(inner, cst.Call):
            inner_path = script.names.path(inner.func)
            path = f"{inner_path}().{call.func.attr.value}"
    return path if path in DROPPED else None


def transparent_items(script: Script, node: cst.With) -> list[cst.WithItem]:
    """The contexts of a `with` that only graphs needed."""
    gone = []
    for item in node.items:
        func = item.item.func if isinstance(item.item, cst.Call) else item.item
        if script.names.path(func) in _TRANSPARENT:
            gone.append(item)
    return gone


def unwrapped(script: Script, node: cst.With, updated: cst.With) -> Any:
    """The body of `with tf.control_dependencies(...)`, or the statement itself."""
    gone = transparent_items(script, node)
    pairs = zip(node.items, updated.items, strict=True)
    kept = [new for item, new in pairs if item not in gone]
    if len(kept) == len(node.items):
        return updated
    if kept:
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(items=kept)
    return body_in_place(updated)


def body_in_place(updated: cst.With) -> Any:
    """The statements of a `with`, without it; comments above it stay above them."""
    body: list[Any] = list(updated.body.body)
    if not isinstance(updated.body, cst.IndentedBlock):
        body = [cst.SimpleStatementLine(body=body)]
    if not body:
        return cst.RemoveFromParent()
    lines = [*updated.leading_lines, *body[0].leading_lines]
    body[0] = body[0].with_changes(leading_lines=lines)
    return cst.FlattenSentinel(body)


def unless_empty(node: cst.For | cst.If, updated: cst.For | cst.If) -> Any:
    """The statement, or nothing if all that was in it is taken out."""
    was, now = node.body, updated.body
    if (
        isinstance(was, cst.IndentedBlock)
        and isinstance(now, cst.IndentedBlock)
        and was.body
        and not now.body
        and updated.orelse is None
    ):
        return cst.RemoveFromParent()
    return updated
