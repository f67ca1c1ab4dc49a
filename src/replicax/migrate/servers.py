"""Branches that only start a server: strategies start their own."""

from typing import Any

import libcst as cst

from replicax.migrate.names import dotted
from replicax.migrate.script import Script, walk

__all__ = ["plan_servers"]

_SERVERS = ("distribute.Server", "train.Server")
_NOTE = (
    "the server is taken out: the strategy serves in a ps task, workers run the script"
)


def plan_servers(script: Script) -> None:
    """Plan to take out `if task is a server:` with all that is in it."""
    for node in walk(script.module):
        if isinstance(node, cst.If) and _only_serves(script, node.body):
            if isinstance(script.parent(node), cst.If):
                continue
            script.note(node.test, _NOTE)
            script.frozen.add(node.test)
            script.frozen.add(node.body)
            script.replacements[node] = _without_first_branch


def _only_serves(script: Script, block: cst.BaseSuite) -> bool:
    if not isinstance(block, cst.IndentedBlock):
        return False
    names: set[str] = set()
    for statement in block.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        for small in statement.body:
            if isinstance(small, cst.Assign) and _is_server(script, small.value):
                names |= {dotted(target.target) or "" for target in small.targets}
            elif not _belongs_to_server(script, small, names):
                return False
    return bool(names) or any(_is_server(script, node) for node in walk(block))


def _is_server(script: Script, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and script.names.path(node.func) in _SERVERS


def _belongs_to_server(
    script: Script, small: cst.BaseSmallStatement, names: set[str]
) -> bool:
    if isinstance(small, (cst.Pass, cst.Return)):
        return True
    if isinstance(small, cst.Assign):
        return script.code(small.targets[0].target).startswith("os.environ[")
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return isinstance(small, cst.Expr) and not isinstance(small.value, cst.Call)
    func = small.value.func
    name = dotted(func) or ""
    if isinstance(func, cst.Attribute) and func.attr.value == "join":
        return dotted(func.value) in names or _is_server(script, func.value)
    return name in {"print", "exit", "sys.exit", "quit"} or name.startswith("logging.")


def _without_first_branch(updated: cst.If) -> Any:
    """What is left of an `if` without its first branch."""
    rest = updated.orelse
    if rest is None:
        return cst.RemoveFromParent()
    if isinstance(rest, cst.If):
        return rest.with_changes(leading_lines=updated.leading_lines)
    body: list[Any] = list(rest.body.body)
    if not isinstance(rest.body, cst.IndentedBlock):
        body = [cst.SimpleStatementLine(body=body)]
    lines = [*updated.leading_lines, *body[0].leading_lines]
    body[0] = body[0].with_changes(leading_lines=lines)
    return cst.FlattenSentinel(body)
