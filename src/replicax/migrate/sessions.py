"""Ports `tf.Session` and initializers of TensorFlow 1 to loops that call the step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from replicax.migrate.names import dotted, method_of
from replicax.migrate.script import (
    Replacement,
    Script,
    Statement,
    Unported,
    names_in,
    walk,
)
from replicax.migrate.statements import body_in_place

__all__ = ["plan_sessions"]

_INITIALIZERS = (
    "global_variables_initializer",
    "initialize_all_variables",
    "local_variables_initializer",
    "tables_initializer",
)
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
    for node in walk(script.module):
        if isinstance(node, cst.With) and (name := _session_name(script, node)):
            try:
                _plan(script, node, name)
            except Unported as why:
                script.leave(why.node or node, why.reason)


def _session_name(script: Script, node: cst.With) -> str | None:
    if len(node.items) != 1:
        return None
    item = node.items[0]
    if not isinstance(item.item, cst.Call) or item.asname is None:
        return None
    is_session = script.names.path(item.item.func) in _SESSIONS
    name = item.asname.name
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
    item = session.items[0]
    script.frozen.add(item)
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
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Assign):
        return
    assign = line.body[0]
    targets = list(_target_names(assign.targets))
    value = assign.value
    if _makes_iterator(value) and len(targets) == 1:
        graph.iterators[targets[0]] = line
        return
    initialized = _initializers(script, graph, value)
    if initialized is not None:
        for target in targets:
            graph.initializers[target] = initialized
        graph.removed.append(line)
    elif _has_get_next(value) or names_in(value) & graph.values.keys():
        for target in targets:
            graph.values[target] = line


def _target_names(targets: Iterable[cst.AssignTarget]) -> Iterator[str]:
    for target in targets:
        for node in walk(target.target):
            if isinstance(node, cst.Name):
                yield node.value


def _makes_iterator(value: cst.BaseExpression) -> bool:
    return method_of(value) in {"make_initializable_iterator", "make_one_shot_iterator"}


def _has_get_next(value: cst.BaseExpression) -> bool:
    return any(
        isinstance(node, cst.Attribute) and node.attr.value == "get_next"
        for node in walk(value)
    )


def _initializers(
    script: Script, graph: _Graph, value: cst.BaseExpression
) -> str | None:
    """`""` or an iterator's name if `value` only initializes; else None."""
    if isinstance(value, (cst.List, cst.Tuple)):
        parts = [_initializers(script, graph, e.value) for e in value.elements]
        if not parts or any(part is None for part in parts):
            return None
        return "".join(part for part in parts if part)
    if isinstance(value, cst.Name):
        return graph.initializers.get(value.value)
    if isinstance(value, cst.Attribute):
        return dotted(value.value) if value.attr.value == "initializer" else None
    if not isinstance(value, cst.Call):
        return None
    if script.names.path(value.func) in _INITIALIZERS:
        return ""
    if isinstance(value.func, cst.Attribute):
        if script.names.path(value.func) == "group":
            return None
        if value.func.attr.value == "initialize" and not value.args:
            return dotted(value.func.value)
    return None


def _runs(script: Script, session: cst.With, name: str) -> Iterator[cst.Call]:
    for node in walk(session.body):
        if not isinstance(node, cst.Name) or node.value != name:
            continue
        attribute = script.parent(node)
        call = script.parent(attribute) if attribute is not None else None
        is_run = isinstance(attribute, cst.Attribute) and attribute.attr.value == "run"
        if not is_run or not isinstance(call, cst.Call) or call.func is not attribute:
            raise Unported(
                f"the session `{name}` is used in more ways than `run`", node
            )
        if len(call.args) != 1 or call.args[0].keyword:
            raise Unported(
                "a session's run with feed_dict or options stays: pass the arrays to a "
                "step function",
                call,
            )
        yield call


def _values_of(script: Script, graph: _Graph, call: cst.Call) -> list[str] | None:
    """The values that a run computes; None if it only initializes."""
    fetched = call.args[0].value
    if _initializers(script, graph, fetched) is not None:
        return None
    parts = [fetched]
    if isinstance(fetched, (cst.List, cst.Tuple)):
        parts = [element.value for element in fetched.elements]
    values = []
    for part in parts:
        text = dotted(part)
        if text is None or text not in graph.values:
            raise Unported(
                f"`{script.code(part)}` is run in a session, and how it is made from "
                "the iterator was not understood: call the step in a loop",
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
    is_alone = len(statement.body) == 1 and script.parent(call) is statement.body[0]
    is_alone = is_alone and isinstance(statement.body[0], cst.Expr)
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
