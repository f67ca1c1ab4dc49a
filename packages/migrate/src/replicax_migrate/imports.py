"""Replaces imports of TensorFlow by the imports that the ported code needs.

`import tensorflow as tf` becomes `import replicax as rx`, `import keras`...
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.names import path_in_tensorflow
from replicax_migrate.script import (
    Replacement,
    Script,
    Statement,
    mark_reason,
    with_marks,
)
from replicax_migrate.statements import comment_lines
from replicax_migrate.tables import (
    ALIASES,
    ARGUMENTS,
    DEVICE_OPERATORS,
    MESSAGES,
    NEED_TENSORFLOW,
    OPTIMIZERS,
    exists,
    find_reason,
    find_target,
    foreign_problem,
    is_module,
    is_module_of_keras,
)
from replicax_migrate.tree import (
    dotted_name,
    find,
    has_keyword,
    import_alias,
    import_names,
    imported_modules,
    is_docstring,
    is_name,
    module_of,
    only_statement,
    small_statements,
    used_names,
)

__all__ = ["plan_kept_imports", "ported_imports", "report_rebound", "uses_tensorflow"]


def uses_tensorflow(module: cst.Module) -> bool:
    """Whether a module imports TensorFlow, or uses `tf` without an import.

    Names of the package `keras` that Keras 3 lacks count as TensorFlow's.
    """
    imports = find(module, cst.Import, cst.ImportFrom)
    pairs = [pair for node in imports for pair in import_names(node)]
    if any(_is_missing_in_keras_3(name) for _, name in pairs) or _uses_keras_2(
        module, dict(pairs)
    ):
        return True
    is_assigned = any(is_name(x.target, "tf") for x in find(module, cst.AssignTarget))
    is_bound = is_assigned or any(local == "tf" for local, _ in pairs)
    is_used = any(is_name(x.value, "tf") for x in find(module, cst.Attribute))
    return is_used and not is_bound


def _is_missing_in_keras_3(name: str) -> bool:
    """Whether an imported name is TensorFlow's, or a name of Keras 2 only."""
    path = path_in_tensorflow(name)
    if path is None or name.partition(".")[0] != "keras":
        return path is not None
    return find_target(path) is None or not exists(name)


_KERAS_2_METHODS = {*ARGUMENTS, "predict_classes", "as_list", "get_shape"} - {"compile"}


def _uses_keras_2(module: cst.Module, imported: dict[str, str]) -> bool:
    """Whether a module uses the package `keras` in a way that Keras 3 lacks."""
    if not any(name.partition(".")[0] == "keras" for name in imported.values()):
        return False
    for node in find(module, cst.Attribute, cst.Call):
        func = node.func if isinstance(node, cst.Call) else node
        local, dot, rest = (dotted_name(func) or "").partition(".")
        name = f"{imported.get(local, '')}{dot}{rest}"
        if isinstance(node, cst.Call):
            is_optimizer = path_in_tensorflow(name) in OPTIMIZERS
            old = ("lr", "decay") if is_optimizer else ("batch_input_shape",)
            is_old = any(has_keyword(arg, *old) for arg in node.args)
        else:
            is_method = node.attr.value in _KERAS_2_METHODS
            is_old = is_method or (
                _is_missing_in_keras_3(name) and name not in NEED_TENSORFLOW
            )
        if is_old:
            return True
    return False


def plan_kept_imports(script: Script) -> Edits:
    """Record imported names that Keras 3 has too, so that the imports stay."""
    edits = Edits()
    for node in script.nodes(cst.Import):
        for alias in node.names:
            name, target = alias.evaluated_name, _module_target(alias.evaluated_name)
            if target and (alias.asname or name == "tf_keras"):
                edits.kept_imports[alias.evaluated_alias or name] = target
    for node in script.nodes(cst.ImportFrom):
        for local, name in import_names(node):
            if local == "*":
                _keep_starred(script, edits, name)
            elif target := _name_target(name):
                edits.kept_imports[local] = target
    return edits


def report_rebound(script: Script) -> None:
    """Report uses of a variable that holds a TensorFlow module in some places only."""
    names = script.names
    for node in script.nodes(cst.Attribute) if names.ambiguous else ():
        if not isinstance(node.value, cst.Name):
            continue
        path = names.ambiguous.get(names.key(node.value) or (0, ""))
        values = map(names.tf_path, script.flow.values(node.value))
        if path and is_module(path) and path in values:
            reason = MESSAGES["rebound"].format(name=node.value.value, path=path)
            script.leave(node, reason)


def _keep_starred(script: Script, edits: Edits, module: str) -> None:
    """Record the names that `import *` binds and Keras 3 has too."""
    home = _module_target(module)
    for name in used_names(script.module) if home else ():
        path = script.names.starred(name) if not script.names.is_bound(name) else None
        if path and find_target(path) == f"{home}.{name}":
            edits.kept_imports[name] = f"{home}.{name}"


def _module_target(name: str) -> str | None:
    target = find_target(path_in_tensorflow(name) or "") or ""
    return target if target.partition(".")[0] == "keras" else None


def _existing_package(alias: cst.ImportAlias) -> cst.ImportAlias:
    """Shorten `keras.a.b` in an import to a module that Keras 3 has."""
    parts = alias.evaluated_name.split(".")
    if alias.asname or parts[0] != "keras":
        return alias
    names = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
    module = next((name for name in names if is_module_of_keras(name)), "keras")
    return alias.with_changes(name=cst.parse_expression(module))


def _name_target(name: str) -> str | None:
    """The target of an imported name in Keras, if both have the same last part."""
    path, target = path_in_tensorflow(name) or "", _module_target(name) or ""
    is_same = target.rpartition(".")[2] == name.rpartition(".")[2]
    return target if is_same and path not in DEVICE_OPERATORS else None


def ported_imports(script: Script, module: cst.Module) -> cst.Module:
    """Port the imports of a module whose other code is ported."""
    used = used_names(module)
    return _with_new_imports(script, module.visit(_Imports(script, used)), used)


class _Imports(cst.CSTTransformer):
    """Removes imports of TensorFlow, and ports imports from `tensorflow.keras`."""

    def __init__(self, script: Script, used: set[str]) -> None:
        super().__init__()
        self._script = script
        self._used = used
        self._was_used = used_names(script.module)
        self._reported = {finding.reason for finding in script.findings}
        self._marks: list[str] = []

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: Statement
    ) -> Replacement:
        self._marks = []
        body = [new for small in original_node.body for new in self._ported(small)]
        return _as_lines(original_node, body, self._marks)

    def _ported(self, small: cst.BaseSmallStatement) -> list[cst.BaseSmallStatement]:
        if isinstance(small, cst.Assign):  # `keras = keras`, from `keras = tf.keras`.
            name = (
                dotted_name(small.targets[0].target) if len(small.targets) == 1 else ""
            )
            is_same = bool(name) and dotted_name(small.value) == name
            is_useless = is_same and any(self._script.names.alias_paths(name or ""))
            return [] if is_useless else [small]
        if not isinstance(small, cst.Import | cst.ImportFrom):
            return [small]
        pairs, is_from = list(import_names(small)), isinstance(small, cst.ImportFrom)
        names = [name for local, name in pairs if is_from or self._stays(local)]
        for why in sorted(set(map(foreign_problem, names)) - {""}):
            self._leave(small, why)
        if isinstance(small, cst.Import):
            return self._import(small)
        if all(path_in_tensorflow(name) is None for _, name in pairs):
            return [small]
        if not isinstance(small.names, cst.ImportStar):
            return self._from_import(small, small.names)
        module = module_of(small)
        if (target := _module_target(module)) is not None:
            return [small.with_changes(module=cst.parse_expression(target))]
        self._leave(small, f"`*` imports names of `{module}`: import the names you use")
        return [small]

    def _stays(self, local: str) -> bool:
        """Whether an import stays: the port uses it, or the original never used it."""
        return local in self._used or local not in self._was_used

    def _leave(self, small: cst.CSTNode, reason: str) -> None:
        self._script.leave(small, reason)
        self._marks.append(reason)

    def _import(self, small: cst.Import) -> list[cst.BaseSmallStatement]:
        kept: list[cst.ImportAlias] = []
        for alias in small.names:
            local = alias.evaluated_alias or alias.evaluated_name.partition(".")[0]
            target = self._script.edits.kept_imports.get(local)
            is_of_tf = path_in_tensorflow(alias.evaluated_name) is not None
            if is_of_tf and target is None:
                kept += [_existing_package(alias)] if local in self._used else []
            elif self._stays(local):
                kept.append(
                    import_alias(target, local) if is_of_tf and target else alias
                )
        if not kept:
            return []
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return [small.with_changes(names=kept)]

    def _from_import(
        self, small: cst.ImportFrom, aliases: Sequence[cst.ImportAlias]
    ) -> list[cst.BaseSmallStatement]:
        groups = defaultdict[str, list[cst.ImportAlias]](list)
        module = module_of(small)
        for alias in aliases:
            name = alias.evaluated_name
            local = alias.evaluated_alias or name
            target = self._script.edits.kept_imports.get(local)
            if target is not None and self._stays(local):
                groups[target.rpartition(".")[0]].append(alias)
            elif target is None and local in self._used:
                reason = find_reason(path_in_tensorflow(f"{module}.{name}") or "")
                if reason not in self._reported:
                    self._leave(small, reason)
                groups[module].append(alias)
        imports: list[cst.BaseSmallStatement] = []
        for home, names in groups.items():
            names[-1] = names[-1].with_changes(comma=aliases[-1].comma)
            local = names[0].evaluated_alias or names[0].evaluated_name
            if home:
                parsed = cst.parse_expression(home)
                imports.append(small.with_changes(module=parsed, names=names))
            else:  # `from tensorflow import keras`.
                imports.append(cst.Import([import_alias("keras", local)]))
        return imports


def _as_lines(
    line: cst.SimpleStatementLine,
    body: Sequence[cst.BaseSmallStatement],
    marks: list[str],
) -> Replacement:
    """Replace the statements of a line; put several imports on several lines."""
    if list(body) == list(line.body) and not marks:
        return line
    if not body:  # `_WithoutPlaceholders` removes the placeholder.
        gap = [blank for blank in line.leading_lines if not blank.comment]
        lines = [*gap, *comment_lines(line)]
        return cst.SimpleStatementLine([_PLACEHOLDER], leading_lines=lines)
    if len(line.body) > 1:
        return with_marks(line.with_changes(body=body), marks)
    first = line.with_changes(body=[body[0]])
    others = [cst.SimpleStatementLine([small]) for small in body[1:]]
    return cst.FlattenSentinel([with_marks(first, marks), *others])


# New imports.

# LibCST removes a line without statements together with its comments.
_PLACEHOLDER = cst.Expr(cst.Name("__nothing__"))
"""Stands for a removed import until the port inserts the new imports."""


def _is_placeholder(statement: cst.CSTNode) -> bool:
    small = only_statement(statement)
    return small is not None and small.deep_equals(_PLACEHOLDER)


def _with_new_imports(script: Script, module: cst.Module, used: set[str]) -> cst.Module:
    place = _import_index(script, module)
    lines = _new_lines(script, module, used, place)
    body: list[Statement] = list(module.body)
    if lines:
        if place < len(body) and (
            _is_placeholder(body[place]) or _is_anchor(body[place])
        ):
            leading = body[place].leading_lines
            marks = [line for line in leading if mark_reason(line)]
            above = [line for line in leading if line not in marks]
            lines[0] = lines[0].with_changes(leading_lines=above)
            body[place] = body[place].with_changes(leading_lines=marks)
        body[place:place] = lines
    return module.with_changes(body=body).visit(_WithoutPlaceholders())


class _WithoutPlaceholders(cst.CSTTransformer):
    """Removes placeholders; their comments move to the next statement."""

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        if isinstance(original_node, cst.Module | cst.IndentedBlock):
            body: list[Statement] = []
            pending: list[cst.EmptyLine] = []
            for statement in updated_node.body:
                above = statement.leading_lines
                if _is_placeholder(statement):
                    pending += [line for line in above if line.comment]
                else:
                    lines = [*pending, *above]
                    body.append(statement.with_changes(leading_lines=lines))
                    pending = []
            return updated_node.with_changes(body=body)
        if isinstance(original_node, cst.Try):
            had_only_imports = all(map(_is_placeholder, original_node.body.body))
            if had_only_imports and not (updated_node.orelse or updated_node.finalbody):
                lines = comment_lines(original_node)
                return cst.SimpleStatementLine([_PLACEHOLDER], leading_lines=lines)
        return updated_node


def _new_lines(
    script: Script, module: cst.Module, used: set[str], place: int
) -> list[Statement]:
    modules = imported_modules(module)
    imported = {name: alias for alias, name in modules}
    wanted = {(ALIASES[root], script.alias(root)) for root in script.needed}
    wanted = {(n, a) for n, a in wanted if a in used and imported.get(n) != a}
    names = [*imported, *(name for name, _ in wanted)]
    sources = (x for x in small_statements(module) if isinstance(x, cst.ImportFrom))
    names += map(module_of, sources)  # Such as `from keras import *`.
    has_keras = any(name.partition(".")[0] == "keras" for name in names)
    if has_keras and "replicax" not in imported:
        wanted.add(("replicax", script.alias("rx")))
    lines: list[str] = []
    for name, alias in sorted(wanted, key=lambda pair: (pair[0] != "replicax", pair)):
        if name == "absl":  # `import absl` does not import its modules.
            dots = {dotted_name(node) for node in find(module, cst.Attribute)}
            parts = [p for p in ("app", "flags") if f"{alias}.{p}" in dots]
            lines += [f"import absl.{part}" for part in parts]
        else:
            line = f"import {name}" + f" as {alias}" * (alias != name)
            is_first = name == "replicax" and has_keras
            why = "  # Before keras: it settles the backend."
            lines.append(line + why * is_first)
    return [cst.parse_statement(line) for line in lines]


def _import_index(script: Script, module: cst.Module) -> int:
    """The index of the first import of Keras or TensorFlow, for the new imports."""
    index = 0
    for statement in script.module.body:
        if _is_anchor(statement):
            return min(index, len(module.body))
        index += len(script.ported_statements.get(statement, [statement]))
    return len(list(itertools.takewhile(_is_prologue, module.body)))


def _is_anchor(statement: cst.CSTNode) -> bool:
    """Whether a line imports Keras or TensorFlow."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    imports = find(statement, cst.Import, cst.ImportFrom)
    names = (name for node in imports for _, name in import_names(node))
    return any(path_in_tensorflow(name) is not None for name in names)


def _is_prologue(statement: cst.CSTNode) -> bool:
    """Whether a line is a docstring, or an import from `__future__`."""
    small = only_statement(statement)
    is_future = isinstance(small, cst.ImportFrom) and module_of(small) == "__future__"
    return is_future or is_docstring(statement)
