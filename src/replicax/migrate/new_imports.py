"""Inserts the imports that ported code needs, where those of TensorFlow were."""

from collections.abc import Iterable
from typing import Any

import libcst as cst

from replicax.migrate.names import (
    import_alias,
    import_names,
    is_name,
    module_of,
    path_in_tensorflow,
    used_names,
)
from replicax.migrate.script import (
    Replacement,
    Script,
    Statement,
    imported_modules,
    walk,
)
from replicax.migrate.statements import comment_lines
from replicax.migrate.tables import ALIASES

__all__ = ["NOTHING", "with_new_imports"]

# LibCST would remove a line without statements together with its comments.
NOTHING = cst.Expr(cst.Name("__nothing__"))
"""The placeholder of a removed import, until the new ones are inserted."""

_WHY_FIRST = "# Before keras: it settles the backend."


def _is_nothing(statement: cst.CSTNode) -> bool:
    """Whether a statement is `NOTHING`."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and statement.body[0].deep_equals(NOTHING)
    )


def with_new_imports(script: Script, module: cst.Module, used: set[str]) -> cst.Module:
    """Insert the imports that the ported code needs where TensorFlow's were.

    Args:
        script: The script that was ported.
        module: The ported module, in which `NOTHING` stands where imports were.
        used: The names that it reads.
    """
    place = _place(script, module)
    lines = _new_lines(script, module, used, place)
    body: list[Statement] = list(module.body)
    if lines:
        if place < len(body) and _is_anchor_or_nothing(body[place]):
            leading = body[place].leading_lines
            lines[0] = lines[0].with_changes(leading_lines=leading)
            body[place] = body[place].with_changes(leading_lines=())
        body[place:place] = lines
    return module.with_changes(body=body).visit(_WithoutNothing())


class _WithoutNothing(cst.CSTTransformer):
    """Removes placeholders; their comments move to the next statement."""

    def leave_Module(
        self, original_node: cst.Module, updated_node: cst.Module
    ) -> cst.Module:
        return updated_node.with_changes(body=_without_nothing(updated_node.body))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=_without_nothing(updated_node.body))

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Replacement:
        """Take out a `try` that only imported TensorFlow."""
        body = original_node.body.body
        is_gone = all(_is_nothing(statement) for statement in body)
        if is_gone and not (updated_node.orelse or updated_node.finalbody):
            return cst.SimpleStatementLine(
                [NOTHING], leading_lines=comment_lines(original_node)
            )
        return updated_node


def _without_nothing(body: Iterable[Any]) -> list[Statement]:
    result: list[Statement] = []
    pending: list[cst.EmptyLine] = []
    for statement in body:
        if _is_nothing(statement):
            pending += [line for line in statement.leading_lines if line.comment]
        elif pending:
            lines = [*pending, *statement.leading_lines]
            result.append(statement.with_changes(leading_lines=lines))
            pending = []
        else:
            result.append(statement)
    return result


def _is_anchor_or_nothing(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and (
        _is_nothing(statement) or _is_anchor(statement)
    )


def _new_lines(
    script: Script, module: cst.Module, used: set[str], place: int
) -> list[Statement]:
    there = {name: alias for alias, name in imported_modules(module)}
    late = _late_imports(module, place)
    there = {name: alias for name, alias in there.items() if alias not in late}
    has_keras = any(name.partition(".")[0] == "keras" for name in there)
    wanted = []
    for root in script.needed:
        alias, name = script.alias(root), ALIASES[root]
        if there.get(name) != alias and alias in used:
            wanted.append((name, alias))
    has_keras = has_keras or any(name == "keras" for name, _ in wanted)
    if has_keras and "replicax" not in there:
        wanted.append(("replicax", script.alias("rx")))
    wanted = sorted(set(wanted), key=lambda pair: (pair[0] != "replicax", pair[0]))
    lines: list[Statement] = []
    for name, alias in wanted:
        if name == "absl":  # Its modules are imported one by one.
            parts = [p for p in ("app", "flags") if _has_attribute(module, alias, p)]
            lines += [cst.parse_statement(f"import absl.{part}") for part in parts]
        else:
            lines.append(_import_line(name, alias, has_keras))
    return lines


def _late_imports(module: cst.Module, place: int) -> set[str]:
    """Names that the top level reads from `place` on before it imports them."""
    read: set[str] = set()
    late: set[str] = set()
    for statement in module.body[place:]:
        lines = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        for small in lines:
            if isinstance(small, (cst.Import, cst.ImportFrom)):
                late |= read & {local for local, _ in import_names(small)}
        read |= used_names(statement)
    return late


def _import_line(name: str, alias: str, has_keras: bool) -> cst.SimpleStatementLine:
    line = cst.SimpleStatementLine([cst.Import([import_alias(name, alias)])])
    if name == "replicax" and has_keras:
        space = cst.SimpleWhitespace("  ")
        why = cst.TrailingWhitespace(whitespace=space, comment=cst.Comment(_WHY_FIRST))
        return line.with_changes(trailing_whitespace=why)
    return line


def _has_attribute(module: cst.Module, root: str, attr: str) -> bool:
    return any(
        isinstance(node, cst.Attribute)
        and node.attr.value == attr
        and is_name(node.value, root)
        for node in walk(module)
    )


def _place(script: Script, module: cst.Module) -> int:
    """The index for new imports: that of the first import of Keras or TensorFlow."""
    originals = [
        statement
        for statement in script.module.body
        if isinstance(statement, cst.SimpleStatementLine) and _is_anchor(statement)
    ]
    if originals:
        first = script.module.body.index(originals[0])
        before = sum(
            len(script.outcomes.get(s, [s])) for s in script.module.body[:first]
        )
        return min(before, len(module.body))
    for i, statement in enumerate(module.body):
        if not _is_prologue(statement):
            return i
    return len(module.body)


def _is_anchor(line: cst.SimpleStatementLine) -> bool:
    for small in line.body:
        if isinstance(small, (cst.Import, cst.ImportFrom)):
            for _, name in import_names(small):
                root = name.partition(".")[0]
                if path_in_tensorflow(name) is not None or root == "keras":
                    return True
    return False


def _is_prologue(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not statement.body:
        return False
    small = statement.body[0]
    if isinstance(small, cst.Expr):
        return isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))
    return isinstance(small, cst.ImportFrom) and module_of(small) == "__future__"
