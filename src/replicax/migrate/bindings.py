"""What imports bind, and which names a module reads."""

from collections.abc import Iterable
from typing import Any

import libcst as cst

from replicax.migrate.script import walk

__all__ = [
    "NOTHING",
    "dotted_name",
    "import_alias",
    "import_names",
    "imports_name",
    "is_name",
    "is_nothing",
    "local_name",
    "module_of",
    "used_names",
]

# LibCST removes lines without statements by itself, with their comments.
NOTHING = cst.Expr(cst.Name("__nothing__"))
"""Stands where an import was, until new ones are there."""


def is_nothing(statement: Any) -> bool:
    """Whether a statement is `NOTHING`."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and statement.body[0].deep_equals(NOTHING)
    )


def used_names(module: cst.CSTNode) -> set[str]:
    """The names that a module reads, roughly: all but those of imports."""
    found: set[str] = set()
    pending: list[cst.CSTNode] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            continue
        if isinstance(node, (cst.Attribute, cst.Arg)):
            pending.append(node.value)
        elif isinstance(node, cst.Name):
            found.add(node.value)
        else:
            pending += node.children
    return found


def import_names(node: cst.Import | cst.ImportFrom) -> Iterable[tuple[str, str]]:
    """What an import binds: name here, full name; of a star, the module."""
    if isinstance(node, cst.Import):
        for alias in node.names:
            name = alias.evaluated_name
            yield (alias.evaluated_alias or name.partition(".")[0], name)
    elif node.module is not None and not node.relative:
        module = module_of(node)
        if isinstance(node.names, cst.ImportStar):
            yield ("*", module)
        else:
            for alias in node.names:
                yield (local_name(alias), f"{module}.{alias.evaluated_name}")


def imports_name(module: cst.Module, name: str) -> bool:
    """Whether any import of a module binds `name`."""
    return any(
        local == name
        for node in walk(module)
        if isinstance(node, (cst.Import, cst.ImportFrom))
        for local, _ in import_names(node)
    )


def local_name(alias: cst.ImportAlias) -> str:
    """What `from x import y as z` binds: `z`."""
    return alias.evaluated_alias or alias.evaluated_name


def module_of(node: cst.ImportFrom) -> str:
    """The module that `from x import y` names, without leading dots."""
    return cst.Module([]).code_for_node(node.module) if node.module else ""


def is_name(node: cst.CSTNode, name: str) -> bool:
    """Whether a node is exactly this name."""
    return isinstance(node, cst.Name) and node.value == name


def dotted_name(name: str) -> Any:
    """`a.b.c` as a node."""
    return cst.parse_expression(name)


def import_alias(name: str, local: str) -> cst.ImportAlias:
    """`name as local` of an import; `name` alone where they are the same."""
    asname = None if name == local else cst.AsName(cst.Name(local))
    return cst.ImportAlias(dotted_name(name), asname)
