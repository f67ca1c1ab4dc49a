"""Removes statements, servers and settings that only TensorFlow needs.

`with tf.control_dependencies(x): step()` becomes `step()`.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.flow import Definition
from replicax_migrate.script import Replacement, Script, Statement
from replicax_migrate.tables import DROPPED, MESSAGES, NAMES
from replicax_migrate.tree import (
    dotted_name,
    elements_of,
    find,
    has_keyword,
    is_name,
    method_name,
    object_of,
    only_statement,
    string_of,
    walk,
)

__all__ = [
    "comment_lines",
    "inlined_body",
    "is_set_shape",
    "is_version_of_tensorflow",
    "lost_comments",
    "needless_items",
    "plan_servers",
    "plan_settings",
    "remaining_comments",
    "removal_reason",
    "without_empty_block",
    "without_needless_items",
]

_DEFAULT_DEVICE = re.compile(r"/?(device:)?(gpu|tpu)(:0)?", re.IGNORECASE)


def removal_reason(script: Script, line: cst.SimpleStatementLine) -> str | None:
    """Why the port removes a line that only TensorFlow needs; None for other lines.

    `""` removes a line without a note.
    """
    small = only_statement(line)
    if isinstance(small, cst.Assert):
        has_version = _only_tests_version(script, small.test)
        return MESSAGES["asserted_version"] if has_version else None
    call = small.value if isinstance(small, cst.Expr) else None
    if not isinstance(call, cst.Call):
        return None
    if is_set_shape(script, call):
        return ""
    if script.names.imported(call.func) == "tensorflow_datasets.disable_progress_bar":
        return ""
    path = script.called_path(call)
    if not path and isinstance(object_of(call), cst.Call):
        path = f"{script.called_path(object_of(call))}().{method_name(call)}"
    return f"tf.{path} is removed: {DROPPED[path]}" if path in DROPPED else None


def _only_tests_version(script: Script, test: cst.BaseExpression) -> bool:
    names = find(test, cst.Attribute, cst.Name)
    has_version = any(is_version_of_tensorflow(script, name) for name in names)
    return has_version and not isinstance(test, cst.BooleanOperation)


def is_version_of_tensorflow(script: Script, node: cst.CSTNode) -> bool:
    """Whether a node is TensorFlow's version, such as `tf.__version__`."""
    return f"{script.names.tf_path(node)}.".startswith(NAMES["version_attributes"])


def is_set_shape(script: Script, node: cst.CSTNode | None) -> bool:
    """Whether a node is the statement `x.set_shape(...)` for a tensor `x`.

    False for all calls if the script defines a method `set_shape`.
    """
    return (
        isinstance(node, cst.Call)
        and method_name(node) == "set_shape"
        and script.names.tf_path(node.func) is None
        and not script.functions("set_shape")
        and isinstance(script.parent(node), cst.Expr)
    )


def needless_items(script: Script, node: cst.With) -> list[cst.WithItem]:
    """The items of a `with` that only graphs need, or that name the default device."""
    return [item for item in node.items if _is_needless(script, item.item)]


def _is_needless(script: Script, context: cst.BaseExpression) -> bool:
    if script.called_path(context) != "device":
        name = script.called_path(context) or script.names.tf_path(context)
        return name in NAMES["transparent_contexts"]
    # By default, JAX puts arrays on the first accelerator, or on the CPU.
    text = string_of(script.resolved_arg(context, 0, "device_name"))
    return bool(_DEFAULT_DEVICE.fullmatch(text))


def without_needless_items(
    script: Script, node: cst.With, updated: cst.With
) -> Replacement:
    """Remove items without effect; inline the body of a `with` without other items."""
    needless = needless_items(script, node)
    pairs = zip(node.items, updated.items, strict=True)
    kept = [new for item, new in pairs if item not in needless]
    if not needless or not kept:
        return inlined_body(updated) if needless else updated
    kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return updated.with_changes(items=kept)


def inlined_body(updated: cst.With | cst.Else) -> Replacement:
    """Replace a block by its statements, below the comments above the block."""
    body: list[Any] = list(updated.body.body)
    if not isinstance(updated.body, cst.IndentedBlock):
        body = [cst.SimpleStatementLine(body=body)]
    if not body:
        return cst.RemoveFromParent()
    lines = [*updated.leading_lines, *body[0].leading_lines]
    body[0] = body[0].with_changes(leading_lines=lines)
    return cst.FlattenSentinel(body)


def without_empty_block(
    script: Script, node: cst.For | cst.If, updated: cst.For | cst.If
) -> Replacement:
    """Remove a loop or an `if` if the port has removed its whole body."""
    is_elif = isinstance(node, cst.If) and isinstance(script.parent(node), cst.If)
    was_empty = not node.body.body
    if was_empty or updated.body.body or updated.orelse is not None or is_elif:
        return updated
    return cst.RemoveFromParent()


def comment_lines(statement: cst.CSTNode) -> list[cst.EmptyLine]:
    """The comments of a removed statement, one per line."""
    return [cst.EmptyLine(comment=comment) for comment in _comments(statement)]


def remaining_comments(statement: cst.CSTNode) -> list[cst.EmptyLine]:
    """The comments of a removed statement that stay.

    The port removes comments directly above the statement or on its line. Others stay,
    such as the heading of a section with a blank line below.
    """
    removed: list[cst.CSTNode] = []
    for node in walk(statement):
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            for line in itertools.takewhile(
                lambda line: line.comment, reversed(node.leading_lines)
            ):
                removed += _comments(line)
        if isinstance(node, cst.SimpleStatementLine):
            removed += _comments(node.trailing_whitespace)
        elif isinstance(node, cst.IndentedBlock):
            removed += _comments(node.header)
    kept = [comment for comment in _comments(statement) if comment not in removed]
    return [cst.EmptyLine(comment=comment) for comment in kept]


def lost_comments(
    original: Statement, nodes: Sequence[Statement]
) -> list[cst.EmptyLine]:
    """The comments in a simple statement that are missing in its port `nodes`.

    Compound statements lose no comments.
    """
    if not isinstance(original, cst.SimpleStatementLine):
        return []
    remaining = [c.value for node in nodes for c in _comments(node)]
    lost = []
    for comment in _comments(original):
        if comment.value in remaining:
            remaining.remove(comment.value)
        else:
            lost.append(cst.EmptyLine(comment=comment))
    return lost


def _comments(node: cst.CSTNode) -> list[cst.Comment]:
    return list(find(node, cst.Comment))


_SERVER_NOTE = (
    "the server is removed: the strategy serves in a ps task, workers run the script"
)


def plan_servers(script: Script) -> Edits:
    """Plan to remove the `if` of a server task, and functions that start clusters."""
    edits = Edits()
    for function in script.nodes(cst.FunctionDef):
        if _starts_cluster(script, function):
            script.note(function.name, MESSAGES["cluster"])
            edits.remove(function)
            for node in script.calls:
                if is_name(node.func, function.name.value):
                    edits.unchanged.update({node.func, *node.args})
                    edits.replacements[node] = lambda updated: script.template(
                        "rx.cluster_resolver.TFConfigClusterResolver()"
                    )
    for node in script.nodes(cst.If):
        is_elif = isinstance(script.parent(node), cst.If)
        if not is_elif and _only_serves(script, node.body):
            script.note(node.test, _SERVER_NOTE)
            edits.unchanged.update({node.test, node.body})
            edits.replacements[node] = _without_first_branch
    return edits


def _starts_cluster(script: Script, function: cst.FunctionDef) -> bool:
    """Whether a function starts servers, and returns a cluster resolver."""
    has_server = any(_is_server(script, call) for call in find(function.body, cst.Call))
    values = [n.value for n in find(function.body, cst.Return) if n.value]
    paths = [script.called_path(script.flow.resolve(value)) for value in values]
    is_resolver = [path.startswith("distribute.cluster_resolver.") for path in paths]
    return has_server and bool(paths) and all(is_resolver)


def _only_serves(script: Script, block: cst.BaseSuite) -> bool:
    if not isinstance(block, cst.IndentedBlock):
        return False
    names: set[str] = set()
    for statement in block.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        for small in statement.body:
            if isinstance(small, cst.Assign) and _is_server(script, small.value):
                names |= {dotted_name(target.target) or "" for target in small.targets}
            elif not _belongs_to_server(script, small, names):
                return False
    return bool(names) or any(_is_server(script, node) for node in walk(block))


def _is_server(script: Script, node: cst.CSTNode) -> bool:
    return script.called_path(node) in NAMES["servers"]


def _belongs_to_server(
    script: Script, small: cst.BaseSmallStatement, names: set[str]
) -> bool:
    if isinstance(small, cst.Assign):
        return script.code(small.targets[0].target).startswith("os.environ[")
    if not isinstance(small, cst.Expr):
        return isinstance(small, cst.Pass | cst.Return)
    if not isinstance(small.value, cst.Call):
        return True
    if method_name(small.value) == "join":
        owner = object_of(small.value)
        return dotted_name(owner) in names or _is_server(script, owner)
    name = dotted_name(small.value.func) or ""
    return name in {"print", "exit", "sys.exit", "quit"} or name.startswith("logging.")


def _without_first_branch(updated: cst.If) -> Replacement:
    rest = updated.orelse
    if rest is None:
        return cst.RemoveFromParent()
    if isinstance(rest, cst.If):
        return rest.with_changes(leading_lines=updated.leading_lines)
    return inlined_body(rest.with_changes(leading_lines=updated.leading_lines))


def plan_settings(script: Script) -> Edits:
    """Plan to remove variables with settings of TensorFlow.

    Settings are `tf.data.Options()`, `ConfigProto()`, `AUTOTUNE`, and lists of
    `tf.TensorSpec` for the signature of a `tf.function`. If one use of a variable
    stays, the variable stays, with the assignments to its attributes. The pass also
    removes an `if` that only raises an error for a version of TensorFlow.
    """
    edits = Edits()
    for node in script.nodes(cst.If):
        first, *rest = node.body.body
        is_raise = isinstance(only_statement(first) or first, cst.Raise) and not rest
        is_alone = node.orelse is None and not isinstance(script.parent(node), cst.If)
        if is_raise and is_alone and _only_tests_version(script, node.test):
            script.note(node.test, MESSAGES["asserted_version"])
            edits.remove(node)
    settings = {d for d in script.flow.definitions if _is_setting(script, edits, d)}
    unused = set(settings)

    def has_use(definition: Definition) -> bool:
        """Whether a setting has a use that stays."""
        return not all(
            _is_in_ported_call(script, edits, use)
            or (
                _attribute_assignment(script, use)
                and script.flow.reaching(use) <= unused
            )
            for use in script.flow.uses(definition)
        )

    while used := set(filter(has_use, unused)):  # One use may keep other settings, too.
        unused -= used
    for definition in sorted(settings, key=lambda d: script.line(d.node)):
        uses = script.flow.uses(definition)
        assigns = list(filter(None, (_attribute_assignment(script, u) for u in uses)))
        if definition in unused:
            _drop_statement(script, edits, definition.values[0])
            for assign in assigns:
                _drop_statement(script, edits, assign)
                _note_policy(script, assign)
        elif isinstance(value := definition.values[0], cst.Call):
            script.leave(value, f"{script.code(value.func)} has uses that stay")
            edits.unchanged.update({value, *assigns})
    return edits


def _is_setting(script: Script, edits: Edits, definition: Definition) -> bool:
    unchanged = script.edits.unchanged | edits.unchanged
    if not unchanged.isdisjoint(script.parents(definition.node)):
        return False  # The rewriter does not visit a node in an unchanged node.
    if len(definition.values) != 1 or not isinstance(definition.node, cst.Name):
        return False
    value = definition.values[0]
    if isinstance(value, cst.Call):
        return script.called_path(value) in NAMES["settings_objects"]
    if isinstance(value, cst.List | cst.Tuple):
        paths = [script.called_path(part) for part in elements_of(value)]
        return bool(paths) and set(paths) == {"TensorSpec"}
    path = script.names.tf_path(value) or ""
    return path.startswith("data.") and path.endswith("AUTOTUNE")


def _is_in_ported_call(script: Script, edits: Edits, use: cst.CSTNode) -> bool:
    """Whether a use is an argument of a ported call, or the signature of a step."""
    arg, call = script.parent(use), script.call_of_arg(use)
    if not isinstance(arg, cst.Arg):
        return False
    is_signature = has_keyword(arg, "input_signature")
    is_signature = is_signature and script.called_path(call) == "function"
    return is_signature or call in script.edits.replacements


def _attribute_assignment(script: Script, use: cst.CSTNode) -> cst.Assign | None:
    """The assignment `options.a.b = c` with the use `options`; None for other uses."""
    node: cst.CSTNode | None = use
    while isinstance(parent := script.parent(node) if node else None, cst.Attribute):
        node = parent
    assign = script.parent(parent) if isinstance(parent, cst.AssignTarget) else None
    return assign if isinstance(assign, cst.Assign) and node is not use else None


def _note_policy(script: Script, node: cst.Assign) -> None:
    if "policy" not in (dotted_name(node.targets[0].target) or "").lower():
        return
    policy = (dotted_name(node.value) or script.code(node.value)).rpartition(".")[2]
    script.note(node, MESSAGES["dataset_options"].format(policy=policy))


def _drop_statement(script: Script, edits: Edits, node: cst.CSTNode) -> None:
    line = script.statement_of(node)
    if only_statement(line) is not None:
        edits.remove(line)
