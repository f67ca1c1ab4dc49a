"""Ports event files: `tf.summary` with writers in sight to `rx.SummaryWriter`.

`with writer.as_default(): tf.summary.scalar(...)` becomes `writer.scalar(...)`. All of
a script is ported or none: one writer that stays needs TensorFlow all the same.
"""

import libcst as cst

from replicax.migrate.arguments import argument, is_named, renamed
from replicax.migrate.script import Script, Unported
from replicax.migrate.statements import body_in_place
from replicax.migrate.tables import DROPPED
from replicax.migrate.tracing import is_traced

__all__ = ["plan_summaries"]

_MADE = "summary.create_file_writer"
_VALUES = ("summary.scalar", "summary.histogram")
_METHODS = ("flush", "close")


def plan_summaries(script: Script) -> None:
    """Plan the port of all writers and written values, if each can be ported."""
    calls = {
        node: path
        for node in script.calls
        if (path := script.called(node)).startswith("summary.") and path not in DROPPED
    }
    if not any(path == _MADE for path in calls.values()):
        return
    try:
        scopes, defaults = _uses(script, [n for n, p in calls.items() if p == _MADE])
        written = {
            node: _written(script, node, scopes, defaults)
            for node, path in calls.items()
            if path != _MADE
        }
    except Unported as why:
        script.leave(
            why.node or script.module.body[0],
            f"event files stay TensorFlow's: {why.reason}",
        )
        return
    for node in scopes:
        assert isinstance(node, cst.With)
        script.frozen |= set(node.items)
        script.replacements[node] = body_in_place
    for node in defaults:
        script.take_out(script.statement_of(node))
    for node, writer in written.items():
        name = calls[node].rpartition(".")[2]
        method = cst.Attribute(cst.Name(writer), cst.Name(name))
        script.frozen.add(node.func)
        script.replacements[node] = lambda call, method=method: _value(call, method)
    for node in (n for n, path in calls.items() if path == _MADE):
        script.frozen.add(node.func)
        func = script.expression("rx.SummaryWriter")
        script.replacements[node] = lambda call, func=func: call.with_changes(
            func=func, args=[cst.Arg(call.args[0].value)]
        )


def _uses(
    script: Script, made: list[cst.Call]
) -> tuple[dict[cst.CSTNode, str], dict[cst.Call, str]]:
    """The blocks and calls that make a writer the default, and its name in each.

    Raises:
        Unported: If a writer is used in another way.
    """
    scopes: dict[cst.CSTNode, str] = {}
    defaults: dict[cst.Call, str] = {}
    definitions = [d for d in script.flow.definitions if set(d.values) & set(made)]
    for call in made:
        if len(call.args) != 1 or call.args[0].star:
            raise Unported("the writer has more than a folder", call)
        if not any(
            d.values == [call] and isinstance(d.node, cst.Name) for d in definitions
        ):
            raise Unported("the writer has no name of its own", call)
    for definition in definitions:
        for use in script.flow.uses(definition):
            if not script.flow.reaching(use) <= set(definitions):
                raise Unported("a name is not always that of a writer", use)
            _use(script, use, scopes, defaults)
    return scopes, defaults


def _use(
    script: Script,
    use: cst.CSTNode,
    scopes: dict[cst.CSTNode, str],
    defaults: dict[cst.Call, str],
) -> None:
    attribute = script.parent(use)
    call = script.parent(attribute) if attribute is not None else None
    if not isinstance(attribute, cst.Attribute) or not isinstance(call, cst.Call):
        raise Unported("the writer is given to what is not ported", use)
    method, around = attribute.attr.value, script.parent(call)
    scope = script.parent(around) if isinstance(around, cst.WithItem) else None
    if method in _METHODS:
        return
    if call.args or method not in {"as_default", "set_as_default"}:
        raise Unported(f"{method} of the writer has no counterpart", call)
    if method == "set_as_default" and isinstance(around, cst.Expr):
        defaults[call] = script.code(use)
    elif isinstance(scope, cst.With) and len(scope.items) == 1:
        scopes[scope] = script.code(use)
    else:
        raise Unported("the writer is not the only one of a `with`", call)


def _written(
    script: Script,
    node: cst.Call,
    scopes: dict[cst.CSTNode, str],
    defaults: dict[cst.Call, str],
) -> str:
    """The name of the writer that a value is written with.

    Raises:
        Unported: If there is none, or if `SummaryWriter` does not write such a value.
    """
    path = script.called(node)
    if path not in _VALUES:
        raise Unported(f"tf.{path} has no counterpart in rx.SummaryWriter", node)
    known = {"name", "data", "step", "buckets"}
    names = {arg.keyword.value for arg in node.args if arg.keyword}
    if not names <= known or any(arg.star for arg in node.args) or len(node.args) > 4:
        raise Unported("an argument has no counterpart in rx.SummaryWriter", node)
    if argument(node.args, 2, "step") is None:
        raise Unported("a value needs step=", node)
    if is_traced(script, node):
        why = "a compiled step writes nothing: return the value, and write it there"
        raise Unported(why, node)
    function = script.function_of(node)
    for parent in script.parents(node):
        if parent in scopes and script.function_of(parent) is function:
            return scopes[parent]
    found = {
        name for call, name in defaults.items() if script.function_of(call) is None
    }
    if len(found) != 1:
        raise Unported("which writer is the default is not seen here", node)
    return found.pop()


def _value(call: cst.Call, method: cst.Attribute) -> cst.Call:
    """Port `tf.summary.scalar(...)` to `writer.scalar(name, value, step=step)`."""
    order = ("name", "value", "step", "buckets")
    args = []
    for i, arg in enumerate(call.args):
        if arg.keyword is None and i >= 2:
            arg = renamed(arg, order[i])
        args.append(renamed(arg, "value") if is_named(arg, "data") else arg)
    return call.with_changes(func=method, args=args)
