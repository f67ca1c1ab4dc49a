"""Ports imports: replaces those of TensorFlow by those that the ported code needs."""

from collections.abc import Sequence

import libcst as cst

from replicax.migrate.names import (
    import_alias,
    import_names,
    is_name,
    module_of,
    path_in_tensorflow,
    used_names,
)
from replicax.migrate.new_imports import NOTHING, with_new_imports
from replicax.migrate.script import Replacement, Script, walk, with_marks
from replicax.migrate.statements import comment_lines
from replicax.migrate.tables import DEVICE_OPERATORS, FOREIGN, find_reason, find_target

__all__ = ["find_retained", "ported_imports", "uses_tensorflow"]


def uses_tensorflow(module: cst.Module) -> bool:
    """Whether a module imports TensorFlow, or uses `tf` without importing it.

    Names of the package `keras` that Keras 3 does not have count as TensorFlow's.
    """
    binds_tf = any(
        isinstance(node, cst.AssignTarget) and is_name(node.target, "tf")
        for node in walk(module)
    )
    for node in walk(module):
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            if any(_is_old(name) for _, name in import_names(node)):
                return True
        elif (
            isinstance(node, cst.Attribute)
            and is_name(node.value, "tf")
            and not (binds_tf or _imports_name(module, "tf"))
        ):
            return True
    return False


def _is_old(name: str) -> bool:
    """Whether an imported name is TensorFlow's, or one of Keras that Keras 3 lacks."""
    path = path_in_tensorflow(name)
    if path is None or name.partition(".")[0] != "keras":
        return path is not None
    return find_target(path) is None


def _imports_name(module: cst.Module, name: str) -> bool:
    """Whether any import of a module binds `name`."""
    return any(
        local == name
        for node in walk(module)
        if isinstance(node, (cst.Import, cst.ImportFrom))
        for local, _ in import_names(node)
    )


def find_retained(script: Script) -> None:
    """Record the imported names that stay, because Keras has them by the same name."""
    for node in walk(script.module):
        if isinstance(node, cst.Import):
            for alias in node.names:
                target = _module_target(alias.evaluated_name)
                if target and alias.asname:
                    script.retained[alias.evaluated_alias or ""] = target
        elif isinstance(node, cst.ImportFrom):
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
    return with_new_imports(script, module, used)


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
        return cst.SimpleStatementLine([NOTHING], leading_lines=lines)
    if len(line.body) > 1:
        new = line.with_changes(body=body)
        return with_marks(new, marks)
    first = line.with_changes(body=[body[0]])
    others = [cst.SimpleStatementLine([small]) for small in body[1:]]
    return cst.FlattenSentinel([with_marks(first, marks), *others])
