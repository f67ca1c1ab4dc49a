"""Ports imports: replaces those of TensorFlow by those that the ported code needs."""

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst

from replicax.migrate.names import path_in_tensorflow
from replicax.migrate.script import Replacement, Script, Statement, with_marks
from replicax.migrate.statements import comment_lines
from replicax.migrate.tables import (
    ALIASES,
    DEVICE_OPERATORS,
    FOREIGN,
    find_reason,
    find_target,
)
from replicax.migrate.tree import (
    find,
    import_alias,
    import_names,
    imported_modules,
    is_name,
    module_of,
    only_of,
    used_names,
)

__all__ = ["find_retained", "ported_imports", "uses_tensorflow"]


def uses_tensorflow(module: cst.Module) -> bool:
    """Whether a module imports TensorFlow, or uses `tf` without importing it.

    Names of the package `keras` that Keras 3 does not have count as TensorFlow's.
    """
    imports = [*find(module, cst.Import, cst.ImportFrom)]
    pairs = [pair for node in imports for pair in import_names(node)]
    targets = (node.target for node in find(module, cst.AssignTarget))
    is_bound = any(is_name(target, "tf") for target in targets)
    is_bound = is_bound or any(local == "tf" for local, _ in pairs)
    attributes = find(module, cst.Attribute)
    return any(_is_old(name) for _, name in pairs) or (
        not is_bound and any(is_name(node.value, "tf") for node in attributes)
    )


def _is_old(name: str) -> bool:
    """Whether an imported name is TensorFlow's, or one of Keras that Keras 3 lacks."""
    path = path_in_tensorflow(name)
    if path is None or name.partition(".")[0] != "keras":
        return path is not None
    return find_target(path) is None


def find_retained(script: Script) -> None:
    """Record the imported names that stay, because Keras has them by the same name."""
    for node in script.nodes(cst.Import):
        for alias in node.names:
            target = _module_target(alias.evaluated_name)
            if target and alias.asname:
                script.retained[alias.evaluated_alias or ""] = target
    for node in script.nodes(cst.ImportFrom):
        for local, name in import_names(node):
            if local == "*":
                _retain_starred(script, name)
            elif target := _name_target(name):
                script.retained[local] = target


def _retain_starred(script: Script, module: str) -> None:
    """Record the used names that a star import binds to the same names of Keras."""
    home = _module_target(module)
    for name in used_names(script.module) if home else ():
        path = script.names.starred(name) if not script.names.is_bound(name) else None
        if path and find_target(path) == f"{home}.{name}":
            script.retained[name] = f"{home}.{name}"


def _module_target(name: str) -> str | None:
    path = path_in_tensorflow(name)
    target = find_target(path) if path else None
    return target if target and target.partition(".")[0] == "keras" else None


def _name_target(name: str) -> str | None:
    """The target of an imported name in Keras, if both have the same last part."""
    path = path_in_tensorflow(name)
    target = _module_target(name)
    if path is None or target is None or path in DEVICE_OPERATORS:
        return None
    is_same = target.rpartition(".")[2] == path.rpartition(".")[2]
    return target if is_same else None


def ported_imports(script: Script, module: cst.Module) -> cst.Module:
    """Port the imports of a module whose other code is ported."""
    used = used_names(module)
    module = module.visit(_Imports(script, used))
    return _with_new_imports(script, module, used)


class _Imports(cst.CSTTransformer):
    """Removes imports of TensorFlow; turns those of `tensorflow.keras` to Keras."""

    def __init__(self, script: Script, used: set[str]) -> None:
        super().__init__()
        self._script = script
        self._used = used
        self._was_used = used_names(script.module)
        self._reported = {each.reason for each in script.report.findings}

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,
        updated_node: cst.SimpleStatementLine,
    ) -> Replacement:
        body: list[cst.BaseSmallStatement] = []
        marks: list[str] = []
        for small in original_node.body:
            if isinstance(small, (cst.Import, cst.ImportFrom)):
                body += self._ported(small, marks)
            elif not self._is_own_alias(small):
                body.append(small)
        return _as_lines(original_node, body, marks)

    def _is_own_alias(self, small: cst.BaseSmallStatement) -> bool:
        """Whether a ported alias is idle: `keras = keras`, from `keras = tf.keras`."""
        if not isinstance(small, cst.Assign) or len(small.targets) != 1:
            return False
        target = small.targets[0].target
        return (
            isinstance(target, cst.Name)
            and target.value in self._script.names.aliases
            and is_name(small.value, target.value)
        )

    def _ported(
        self, small: cst.Import | cst.ImportFrom, marks: list[str]
    ) -> list[cst.BaseSmallStatement]:
        self._note_foreign(small, marks)
        if isinstance(small, cst.Import):
            return self._import(small)
        names = list(import_names(small))
        is_ours = [path_in_tensorflow(name) is not None for _, name in names]
        if isinstance(small.names, cst.ImportStar):
            return self._star(small, marks)
        return self._from_import(small, marks) if any(is_ours) else [small]

    def _note_foreign(
        self, small: cst.Import | cst.ImportFrom, marks: list[str]
    ) -> None:
        if isinstance(small, cst.ImportFrom) and small.relative:
            return
        is_kept = isinstance(small, cst.ImportFrom)
        roots = {
            name.partition(".")[0]
            for local, name in import_names(small)
            if is_kept or local in self._used or local not in self._was_used
        }
        for root in sorted(roots & FOREIGN.keys()):
            self._leave(small, f"{root} {FOREIGN[root]}", marks)

    def _leave(self, small: cst.CSTNode, reason: str, marks: list[str]) -> None:
        self._script.leave(small, reason)
        marks.append(reason)

    def _import(self, small: cst.Import) -> list[cst.BaseSmallStatement]:
        kept: list[cst.ImportAlias] = []
        for alias in small.names:
            local = alias.evaluated_alias or alias.evaluated_name.partition(".")[0]
            if path_in_tensorflow(alias.evaluated_name) is None:
                if local in self._used or local not in self._was_used:
                    kept.append(alias)  # The port removed all uses of the others.
                continue
            target = self._script.retained.get(local)
            if local in self._used and target is None:
                kept.append(alias)
            elif target is not None and (
                local in self._used or local not in self._was_used
            ):
                kept.append(import_alias(target, local))
        if not kept:
            return []
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return [small.with_changes(names=kept)]

    def _star(
        self, small: cst.ImportFrom, marks: list[str]
    ) -> list[cst.BaseSmallStatement]:
        name = module_of(small)
        path = path_in_tensorflow(name)
        if path is None:
            return [small]
        target = _module_target(name)
        if target is None:
            self._leave(
                small,
                f"names of `{name}` are imported with `*`: import it by name",
                marks,
            )
            return [small]
        return [small.with_changes(module=cst.parse_expression(target))]

    def _from_import(
        self, small: cst.ImportFrom, marks: list[str]
    ) -> list[cst.BaseSmallStatement]:
        assert not isinstance(small.names, cst.ImportStar)
        groups: dict[str, list[cst.ImportAlias]] = {}
        module = module_of(small)
        for alias in small.names:
            name = alias.evaluated_name
            local = alias.evaluated_alias or name
            target = self._script.retained.get(local)
            if local not in self._used and (target is None or local in self._was_used):
                continue
            if target is None:
                path = path_in_tensorflow(f"{module}.{name}") or ""
                reason = find_reason(path)
                if reason not in self._reported:  # Else its use was reported.
                    self._leave(small, reason, marks)
                groups.setdefault(module, []).append(alias)
            else:
                home = target.rpartition(".")[0]
                groups.setdefault(home, []).append(alias)
        return [self._from(small, home, names) for home, names in groups.items()]

    def _from(
        self, small: cst.ImportFrom, home: str, names: list[cst.ImportAlias]
    ) -> cst.BaseSmallStatement:
        if not home:  # `from tensorflow import keras`.
            local = names[0].evaluated_alias or names[0].evaluated_name
            return cst.Import([import_alias("keras", local)])
        assert not isinstance(small.names, cst.ImportStar)
        last = small.names[-1]
        names = [*names[:-1], names[-1].with_changes(comma=last.comma)]
        module = import_alias(home, home).name
        return small.with_changes(module=module, names=names)


def _as_lines(
    line: cst.SimpleStatementLine,
    body: Sequence[cst.BaseSmallStatement],
    marks: list[str],
) -> Replacement:
    """Replace the statements of a line; imports that were split get their own lines."""
    if list(body) == list(line.body) and not marks:
        return line
    if not body:  # A place for new imports, taken out later.
        gap = [blank for blank in line.leading_lines if not blank.comment]
        lines = [*gap, *comment_lines(line)]
        return cst.SimpleStatementLine([_NOTHING], leading_lines=lines)
    if len(line.body) > 1:
        new = line.with_changes(body=body)
        return with_marks(new, marks)
    first = line.with_changes(body=[body[0]])
    others = [cst.SimpleStatementLine([small]) for small in body[1:]]
    return cst.FlattenSentinel([with_marks(first, marks), *others])


# New imports.

# LibCST would remove a line without statements together with its comments.
_NOTHING = cst.Expr(cst.Name("__nothing__"))
"""The placeholder of a removed import, until the new ones are inserted."""

_WHY_FIRST = "# Before keras: it settles the backend."


def _is_nothing(statement: cst.CSTNode) -> bool:
    """Whether a statement is `_NOTHING`."""
    small = only_of(statement)
    return small is not None and small.deep_equals(_NOTHING)


def _with_new_imports(script: Script, module: cst.Module, used: set[str]) -> cst.Module:
    """Insert the imports that the ported code needs where TensorFlow's were.

    Args:
        script: The script that was ported.
        module: The ported module, in which `_NOTHING` stands where imports were.
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
                [_NOTHING], leading_lines=comment_lines(original_node)
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
        node.attr.value == attr and is_name(node.value, root)
        for node in find(module, cst.Attribute)
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
    imports = [x for x in line.body if isinstance(x, (cst.Import, cst.ImportFrom))]
    return any(
        path_in_tensorflow(name) is not None or name.partition(".")[0] == "keras"
        for small in imports
        for _, name in import_names(small)
    )


def _is_prologue(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not statement.body:
        return False
    small = statement.body[0]
    if isinstance(small, cst.Expr):
        return isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))
    return isinstance(small, cst.ImportFrom) and module_of(small) == "__future__"
