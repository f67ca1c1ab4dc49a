"""Ports what a script opens for a block: sessions, and writers of event files.

`with tf.Session()` and initializers of TensorFlow 1 become loops that call the step.

`with writer.as_default(): tf.summary.scalar(...)` becomes `writer.scalar(...)`. All of
a script is ported or none: one writer that stays needs TensorFlow all the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from replicax.migrate.script import (
    Expression,
    Replacement,
    Script,
    Statement,
    Unported,
)
from replicax.migrate.statements import body_in_place
from replicax.migrate.tables import DROPPED, WHY
from replicax.migrate.tracing import is_traced
from replicax.migrate.tree import (
    argument,
    attr_of,
    dotted,
    find,
    is_named,
    keyword_of,
    method_of,
    names_in,
    object_of,
    only_of,
    parts_of,
    renamed,
)

__all__ = ["plan_sessions", "plan_summaries"]

_INITIALIZERS = (
    "global_variables_initializer",
    "initialize_all_variables",
    "local_variables_initializer",
    "tables_initializer",
)
_ITERATORS = ("make_initializable_iterator", "make_one_shot_iterator")
_SESSIONS = ("Session", "InteractiveSession")


@dataclass
class _Graph:
    """The graph that a script builds before its session runs it.

    Attributes:
        initializers: Names of initializers, each with the iterator it is of, if any.
        values: Names of values made anew by each run, with the lines that make them.
        iterators: Names of iterators, with the lines that make them.
        removed: Lines that make initializers, which the port does not need.
    """

    initializers: dict[str, str | None] = field(default_factory=dict)
    values: dict[str, cst.SimpleStatementLine] = field(default_factory=dict)
    iterators: dict[str, cst.SimpleStatementLine] = field(default_factory=dict)
    removed: list[cst.SimpleStatementLine] = field(default_factory=list)


def plan_sessions(script: Script) -> None:
    """Plan to unwrap each `with tf.Session()`, or report it.

    The statements that lead from the iterator to a value move to where a session runs
    the value. A session with other uses stays.
    """
    for node in script.nodes(cst.With):
        if name := _session_name(script, node):
            script.attempt(node, lambda n=node, name=name: _plan(script, n, name), None)


def _session_name(script: Script, node: cst.With) -> str | None:
    item, *others = node.items
    name = item.asname.name if item.asname is not None else None
    is_session = not others and script.called(item.item) in _SESSIONS
    return name.value if is_session and isinstance(name, cst.Name) else None


def _plan(script: Script, session: cst.With, name: str) -> None:
    graph = _Graph()
    for line in _lines_before(script, session):
        _read_line(script, graph, line)
    runs = list(_runs(script, session, name))
    actions = [(call, _values_of(script, graph, call)) for call in runs]
    moved: set[cst.CSTNode] = set()
    for call, values in actions:
        needed = _needed(graph, values)
        moved |= set(needed)
        _plan_run(script, session, graph, call, values, needed)
    for line in moved:
        script.move(line)
    for line in graph.removed:
        script.take_out(line)
    script.frozen.add(session.items[0])
    script.replacements[session] = body_in_place


def _lines_before(
    script: Script, session: cst.With
) -> Iterator[cst.SimpleStatementLine]:
    """The assignments before the session, in its block and in those around it."""
    before: list[cst.SimpleStatementLine] = []
    inner: cst.CSTNode = session
    for outer in script.parents(session):
        if isinstance(outer, (cst.IndentedBlock, cst.Module)):
            lines = list(outer.body)[: list(outer.body).index(inner)]  # type: ignore[arg-type]
            found = [x for x in lines if isinstance(x, cst.SimpleStatementLine)]
            before = [*found, *before]
        if isinstance(outer, cst.FunctionDef):
            break
        inner = outer
    yield from before


def _read_line(script: Script, graph: _Graph, line: cst.SimpleStatementLine) -> None:
    assign = only_of(line)
    if not isinstance(assign, cst.Assign):
        return
    targets = [n.value for t in assign.targets for n in find(t.target, cst.Name)]
    value = assign.value
    if method_of(value) in _ITERATORS and len(targets) == 1:
        graph.iterators[targets[0]] = line
        return
    initialized = _initializers(script, graph, value)
    if initialized is not None:
        graph.initializers |= dict.fromkeys(targets, initialized)
        graph.removed.append(line)
    elif _has_get_next(value) or names_in(value) & graph.values.keys():
        graph.values |= dict.fromkeys(targets, line)


def _has_get_next(value: Expression) -> bool:
    return any(attr_of(node) == "get_next" for node in find(value, cst.Attribute))


def _initializers(script: Script, graph: _Graph, value: Expression) -> str | None:
    """`""` or an iterator's name if `value` only initializes; else None."""
    if isinstance(value, (cst.List, cst.Tuple)):
        parts = [_initializers(script, graph, part) for part in parts_of(value)]
        if not parts or any(part is None for part in parts):
            return None
        return "".join(part for part in parts if part)
    if isinstance(value, cst.Name):
        return graph.initializers.get(value.value)
    if isinstance(value, cst.Attribute):
        return dotted(value.value) if value.attr.value == "initializer" else None
    if script.called(value) in _INITIALIZERS:
        return ""
    is_initializer = isinstance(value, cst.Call) and not value.args
    is_initializer = is_initializer and method_of(value) == "initialize"
    return dotted(object_of(value)) if is_initializer else None


def _runs(script: Script, session: cst.With, name: str) -> Iterator[cst.Call]:
    for node in find(session.body, cst.Name):
        if node.value != name:
            continue
        call = script.method_call(node)
        if call is None or method_of(call) != "run":
            what = f"the session `{name}` is used in more ways than `run`"
            raise Unported(what, node)
        if len(call.args) != 1 or call.args[0].keyword:
            raise Unported(
                WHY["session_options"],
                call,
            )
        yield call


def _values_of(script: Script, graph: _Graph, call: cst.Call) -> list[str] | None:
    """The values that a run computes; None if it only initializes."""
    fetched = call.args[0].value
    if _initializers(script, graph, fetched) is not None:
        return None
    is_display = isinstance(fetched, cst.List | cst.Tuple)
    values = []
    for part in parts_of(fetched) if is_display else [fetched]:
        text = dotted(part)
        if text is None or text not in graph.values:
            raise Unported(
                WHY["session_value"].format(value=script.code(part)),
                call,
            )
        values.append(text)
    return values


def _needed(graph: _Graph, values: list[str] | None) -> list[cst.SimpleStatementLine]:
    """The lines that make values, in their order."""
    found: list[cst.SimpleStatementLine] = []
    pending = list(values or ())
    while pending:
        line = graph.values.get(pending.pop())
        if line is not None and line not in found:
            found.append(line)
            assign = line.body[0]
            assert isinstance(assign, cst.Assign)
            pending += sorted(names_in(assign.value) & graph.values.keys())
    order = list(graph.values.values())
    return sorted(found, key=order.index)


def _plan_run(
    script: Script,
    session: cst.With,
    graph: _Graph,
    call: cst.Call,
    values: list[str] | None,
    needed: list[cst.SimpleStatementLine],
) -> None:
    statement = script.statement_of(call)
    if not isinstance(statement, cst.SimpleStatementLine):
        raise Unported("a session's run in the head of a statement stays", call)
    small = only_of(statement)
    is_alone = isinstance(small, cst.Expr) and small.value is call
    if values is None:
        if not is_alone:
            raise Unported("the result of an initializer is used", call)
        _plan_initialization(script, session, graph, call, statement)
        return
    script.replacements[call] = lambda updated: updated.args[0].value
    script.replacements[statement] = lambda updated: _after(
        script, needed, None if is_alone else updated, updated
    )


def _plan_initialization(
    script: Script,
    session: cst.With,
    graph: _Graph,
    call: cst.Call,
    statement: cst.SimpleStatementLine,
) -> None:
    """Plan to remove an initializer's run; in a loop, to make its iterator anew."""
    iterator = _initializers(script, graph, call.args[0].value)
    around = list(script.parents(statement))
    in_loop = any(
        isinstance(node, (cst.For, cst.While))
        for node in around[: around.index(session)]
    )
    line = graph.iterators.get(iterator or "")
    if not in_loop or line is None:
        script.take_out(statement)
        return
    script.frozen.add(statement)

    def again(updated: Statement) -> Replacement:
        made = script.outcomes[line][0].deep_clone()
        return made.with_changes(leading_lines=updated.leading_lines)

    script.replacements[statement] = again


def _after(
    script: Script,
    needed: list[cst.SimpleStatementLine],
    last: Statement | None,
    replaced: Statement,
) -> Replacement:
    """Copies of the moved lines that a run needs, and the statement `last` behind."""
    lines = [script.moved[line].deep_clone() for line in needed]
    nodes = [*lines, *([last] if last is not None else [])]
    own = [line for line in nodes[0].leading_lines if line.comment]
    if nodes[0] is not last:
        leading = [*replaced.leading_lines, *own]
        nodes[0] = nodes[0].with_changes(leading_lines=leading)
        if last is not None:
            nodes[-1] = last.with_changes(leading_lines=())
    return cst.FlattenSentinel(nodes)


# Writers of event files.

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
    made = [node for node, path in calls.items() if path == _MADE]
    if made:
        first = script.module.body[0]
        script.attempt(first, lambda: _plan_writers(script, made, [*calls]), None)


def _plan_writers(script: Script, made: list[cst.Call], calls: list[cst.Call]) -> None:
    """Plan the port of calls that make writers, and of all that use them.

    Raises:
        Unported: If one of them cannot be ported; nothing is planned.
    """
    try:
        scopes, defaults = _writer_uses(script, made)
        others = [node for node in calls if node not in made]
        written = {node: _written(script, node, scopes, defaults) for node in others}
    except Unported as why:
        raise Unported(
            f"event files stay TensorFlow's: {why.reason}", why.node
        ) from None
    for node in scopes:
        script.frozen |= set(node.items)
        script.replacements[node] = body_in_place
    for node in defaults:
        script.take_out(script.statement_of(node))
    for node, writer in written.items():
        name = script.called(node).rpartition(".")[2]
        method = cst.Attribute(cst.Name(writer), cst.Name(name))
        script.frozen.add(node.func)
        script.replacements[node] = lambda call, method=method: _value(call, method)
    for node in made:
        script.frozen.add(node.func)
        script.replacements[node] = lambda call: call.with_changes(
            func=script.expression("rx.SummaryWriter"),
            args=[cst.Arg(call.args[0].value)],
        )


def _writer_uses(
    script: Script, made: list[cst.Call]
) -> tuple[dict[cst.With, str], dict[cst.Call, str]]:
    """The blocks and calls that make a writer the default, and its name in each.

    Raises:
        Unported: If a writer is used in another way.
    """
    scopes: dict[cst.With, str] = {}
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
            _writer_use(script, use, scopes, defaults)
    return scopes, defaults


def _writer_use(
    script: Script,
    use: cst.CSTNode,
    scopes: dict[cst.With, str],
    defaults: dict[cst.Call, str],
) -> None:
    call = script.method_call(use)
    if call is None:
        raise Unported("the writer is given to what is not ported", use)
    method, around = method_of(call), script.parent(call)
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
    scopes: dict[cst.With, str],
    defaults: dict[cst.Call, str],
) -> str:
    """The name of the writer that a value is written with.

    Raises:
        Unported: If there is none, or if `SummaryWriter` does not write such a value.
    """
    path = script.called(node)
    if path not in _VALUES:
        raise Unported(f"tf.{path} has no counterpart in rx.SummaryWriter", node)
    known = {"", "name", "data", "step", "buckets"}
    is_plain = all(keyword_of(arg) in known and not arg.star for arg in node.args)
    if not is_plain or len(node.args) > 4:
        raise Unported("an argument has no counterpart in rx.SummaryWriter", node)
    if argument(node.args, 2, "step") is None:
        raise Unported("a value needs step=", node)
    if is_traced(script, node):
        why = "a compiled step writes nothing: return the value, and write it there"
        raise Unported(why, node)
    function = script.function_of(node)
    for parent in script.parents(node):
        writer = scopes.get(parent) if isinstance(parent, cst.With) else None
        if writer is not None and script.function_of(parent) is function:
            return writer
    found = {text for call, text in defaults.items() if not script.function_of(call)}
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
