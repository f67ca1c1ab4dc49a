"""Ports what is used for a while: sessions, writers of event files, `tf.TensorArray`.

`with tf.Session()` and initializers of TensorFlow 1 become loops that call the step.

`with writer.as_default(): tf.summary.scalar(...)` becomes `writer.scalar(...)`. All of
a script is ported or none: one writer that stays needs TensorFlow all the same.

A `tf.TensorArray` that Python loops fill in order becomes a list: `ta = ta.write(i, x)`
becomes `ta.append(x)`, `ta.stack()` becomes `keras.ops.stack(ta)`. An array that is
used in another way stays, and is reported.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import libcst as cst

from replicax_migrate.flow import Definition
from replicax_migrate.script import Expression, Replacement, Script, Statement, Unported
from replicax_migrate.statements import body_in_place
from replicax_migrate.tables import DROPPED, MESSAGES, NAMES
from replicax_migrate.tracing import is_traced
from replicax_migrate.tree import (
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
    reached,
    renamed,
    value_of,
)

__all__ = ["plan_sessions", "plan_summaries", "plan_tensor_arrays"]


def plan_sessions(script: Script) -> None:
    """Plan to unwrap each `with tf.Session()`, or report it.

    The statements that lead from the iterator to a value move to where a session runs
    the value. A session with other uses stays.
    """
    for node in script.nodes(cst.With):
        item, *others = node.items
        name = item.asname.name if item.asname is not None else None
        is_session = not others and script.called(item.item) in NAMES["sessions"]
        if is_session and isinstance(name, cst.Name):
            script.attempt(node, _GraphSession(script, node, name.value).plan, None)


class _GraphSession:
    """Plans the port of a session, and of the graph that is built before it."""

    def __init__(self, script: Script, node: cst.With, name: str) -> None:
        self._script = script
        self._node = node
        self._name = name
        # Names of initializers, each with the iterator it is of, if any; of values
        # that each run makes anew, and of iterators, with the lines that make them.
        self._initializers: dict[str, str | None] = {}
        self._values: dict[str, cst.SimpleStatementLine] = {}
        self._iterators: dict[str, cst.SimpleStatementLine] = {}
        self._removed: list[cst.SimpleStatementLine] = []

    def plan(self) -> None:
        """Plan the port of all runs."""
        script = self._script
        for line in self._lines_before():
            self._read(line)
        fetched = {call: self._fetched(call) for call in list(self._runs())}
        moved: set[cst.CSTNode] = set()
        for call, values in fetched.items():
            moved |= self._plan_run(call, values)
        for line in moved:
            script.move(line)
        for line in self._removed:
            script.take_out(line)
        script.frozen.add(self._node.items[0])
        script.replacements[self._node] = body_in_place

    def _lines_before(self) -> list[cst.SimpleStatementLine]:
        """The lines before the session, in its block and in those around it."""
        before: list[cst.SimpleStatementLine] = []
        inner: cst.CSTNode = self._node
        for outer in self._script.parents(self._node):
            if isinstance(outer, cst.IndentedBlock | cst.Module):
                lines = itertools.takewhile(
                    lambda x, end=inner: x is not end, outer.body
                )
                found = [x for x in lines if isinstance(x, cst.SimpleStatementLine)]
                before = [*found, *before]
            if isinstance(outer, cst.FunctionDef):
                break
            inner = outer
        return before

    def _read(self, line: cst.SimpleStatementLine) -> None:
        assign = only_of(line)
        if not isinstance(assign, cst.Assign):
            return
        targets = [n.value for t in assign.targets for n in find(t.target, cst.Name)]
        value = assign.value
        attributes = map(attr_of, find(value, cst.Attribute))
        if method_of(value) in NAMES["graph_iterators"] and len(targets) == 1:
            self._iterators[targets[0]] = line
        elif (initialized := self._initialized(value)) is not None:
            self._initializers |= dict.fromkeys(targets, initialized)
            self._removed.append(line)
        elif "get_next" in attributes or names_in(value) & self._values.keys():
            self._values |= dict.fromkeys(targets, line)

    def _initialized(self, value: Expression) -> str | None:
        """`""` or an iterator's name if `value` only initializes; else None."""
        if isinstance(value, cst.List | cst.Tuple):
            parts = [self._initialized(part) for part in parts_of(value)]
            known = [part for part in parts if part is not None]
            return "".join(known) if known and known == parts else None
        if isinstance(value, cst.Name):
            return self._initializers.get(value.value)
        if attr_of(value) == "initializer":
            return (dotted(value) or "").rpartition(".")[0] or None
        if self._script.called(value) in NAMES["graph_initializers"]:
            return ""
        is_made = method_of(value) == "initialize"
        is_made = is_made and isinstance(value, cst.Call) and not value.args
        return dotted(object_of(value)) if is_made else None

    def _runs(self) -> Iterator[cst.Call]:
        for node in find(self._node.body, cst.Name):
            if node.value != self._name:
                continue
            call = self._script.method_call(node)
            if call is None or method_of(call) != "run":
                what = f"the session `{self._name}` is used in more ways than `run`"
                raise Unported(what, node)
            if len(call.args) != 1 or call.args[0].keyword:
                raise Unported(MESSAGES["session_options"], call)
            yield call

    def _fetched(self, call: cst.Call) -> list[str] | None:
        """The values that a run computes; None if it only initializes."""
        fetched = call.args[0].value
        if self._initialized(fetched) is not None:
            return None
        is_display = isinstance(fetched, cst.List | cst.Tuple)
        parts = parts_of(fetched) if is_display else [fetched]
        for part in parts:
            if dotted(part) not in self._values:
                code = self._script.code(part)
                raise Unported(MESSAGES["session_value"].format(value=code), call)
        return [dotted(part) or "" for part in parts]

    def _needed(self, values: list[str]) -> list[cst.SimpleStatementLine]:
        """The lines that make values, in their order."""

        def inside(name: str) -> set[str]:
            assign = self._values[name].body[0]
            assert isinstance(assign, cst.Assign)
            return names_in(assign.value) & self._values.keys()

        found = {self._values[name] for name in reached(values, inside)}
        return [line for line in dict.fromkeys(self._values.values()) if line in found]

    def _plan_run(
        self, call: cst.Call, values: list[str] | None
    ) -> set[cst.SimpleStatementLine]:
        """Plan the port of a run; the lines that move to it."""
        script, statement = self._script, self._script.statement_of(call)
        if not isinstance(statement, cst.SimpleStatementLine):
            raise Unported("a session's run in the head of a statement stays", call)
        small = only_of(statement)
        is_alone = isinstance(small, cst.Expr) and small.value is call
        if values is None:
            if not is_alone:
                raise Unported("the result of an initializer is used", call)
            self._plan_initialization(call, statement)
            return set()
        needed = self._needed(values)

        def after(updated: Statement) -> Replacement:
            """Copies of the lines that the run needs, and then its own statement."""
            first, *others = [script.moved[line].deep_clone() for line in needed]
            own = [line for line in first.leading_lines if line.comment]
            first = first.with_changes(leading_lines=[*updated.leading_lines, *own])
            last = [] if is_alone else [updated.with_changes(leading_lines=())]
            return cst.FlattenSentinel([first, *others, *last])

        script.replacements[call] = lambda updated: updated.args[0].value
        if needed:
            script.replacements[statement] = after
        return set(needed)

    def _plan_initialization(
        self, call: cst.Call, statement: cst.SimpleStatementLine
    ) -> None:
        """Plan to remove an initializer's run; in a loop, to make its iterator anew."""
        script = self._script
        around = script.parents(statement)
        inside = itertools.takewhile(lambda x: x is not self._node, around)
        in_loop = any(isinstance(node, cst.For | cst.While) for node in inside)
        line = self._iterators.get(self._initialized(call.args[0].value) or "")
        if not in_loop or line is None:
            script.take_out(statement)
            return
        script.frozen.add(statement)
        script.replacements[statement] = lambda updated: (
            script.outcomes[line][0]
            .deep_clone()
            .with_changes(leading_lines=updated.leading_lines)
        )


# Writers of event files.

_MADE = "summary.create_file_writer"


def plan_summaries(script: Script) -> None:
    """Plan the port of all writers and written values, if each can be ported."""
    paths = {node: script.called(node) for node in script.calls}
    calls = [
        n for n, p in paths.items() if p.startswith("summary.") and p not in DROPPED
    ]
    if any(paths[node] == _MADE for node in calls):
        script.attempt(script.module.body[0], _Writers(script, calls).plan, None)


class _Writers:
    """Plans the port of all writers of a script, and of what is written with them."""

    def __init__(self, script: Script, calls: list[cst.Call]) -> None:
        self._script = script
        self._made = [node for node in calls if script.called(node) == _MADE]
        self._others = [node for node in calls if node not in self._made]
        # Blocks and calls that make a writer the default, and its name in each.
        self._scopes: dict[cst.CSTNode, str] = {}
        self._defaults: dict[cst.Call, str] = {}

    def plan(self) -> None:
        """Plan the port of calls that make writers, and of all that use them."""
        script = self._script
        try:
            self._find_uses()
            written = {node: self._writer(node) for node in self._others}
        except Unported as why:
            what = f"event files stay TensorFlow's: {why.reason}"
            raise Unported(what, why.node) from None
        for scope in self._scopes:
            assert isinstance(scope, cst.With)
            script.frozen |= set(scope.items)
            script.replacements[scope] = body_in_place
        for node in self._defaults:
            script.take_out(script.statement_of(node))
        for node, writer in written.items():
            name = script.called(node).rpartition(".")[2]
            method = cst.Attribute(cst.parse_expression(writer), cst.Name(name))
            script.frozen.add(node.func)
            script.replacements[node] = lambda call, method=method: _value(call, method)
        for node in self._made:
            script.frozen.add(node.func)
            script.replacements[node] = lambda call: call.with_changes(
                func=script.expression("rx.SummaryWriter"),
                args=[cst.Arg(call.args[0].value)],
            )

    def _find_uses(self) -> None:
        """Find where writers are the default; refuses other uses."""
        flow = self._script.flow
        found = {
            d for d in flow.definitions if not set(d.values).isdisjoint(self._made)
        }
        named = [d.values for d in found if dotted(d.node)]
        for call in self._made:
            if len(call.args) != 1 or call.args[0].star:
                raise Unported("the writer has more than a folder", call)
            if [call] not in named:
                raise Unported("the writer has no name of its own", call)
        for definition in (d for d in flow.definitions if d in found):
            if outside := _use_outside(self._script, definition):
                raise Unported("the writer is used outside of its class", outside)
            for use in flow.uses(definition):
                if not flow.reaching(use) <= found:
                    raise Unported("a name is not always that of a writer", use)
                self._read_use(use)

    def _read_use(self, use: cst.CSTNode) -> None:
        script, call = self._script, self._script.method_call(use)
        if call is None:
            raise Unported("the writer is given to what is not ported", use)
        method, around = method_of(call), script.parent(call)
        scope = script.parent(around) if isinstance(around, cst.WithItem) else None
        if method in NAMES["writer_methods"]:
            return
        if call.args or method not in {"as_default", "set_as_default"}:
            raise Unported(f"{method} of the writer has no counterpart", call)
        if method == "set_as_default" and isinstance(around, cst.Expr):
            self._defaults[call] = script.code(use)
        elif isinstance(scope, cst.With) and len(scope.items) == 1:
            self._scopes[scope] = script.code(use)
        else:
            raise Unported("the writer is not the only one of a `with`", call)

    def _writer(self, node: cst.Call) -> str:
        """The name of the writer that a value is written with."""
        script, path = self._script, self._script.called(node)
        if path not in NAMES["summaries"]:
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
            if parent in self._scopes and script.function_of(parent) is function:
                return self._scopes[parent]
        defaults = self._defaults.items()
        found = {text for call, text in defaults if not script.function_of(call)}
        if len(found) != 1:
            raise Unported("which writer is the default is not seen here", node)
        return found.pop()


def _use_outside(script: Script, definition: Definition) -> cst.CSTNode | None:
    """A use of a writer, an attribute, through another name than `self`."""
    name, uses = attr_of(definition.node), script.flow.uses(definition)
    others = (n for n in script.nodes(cst.Attribute) if name and attr_of(n) == name)
    return next(
        (n for n in others if n not in uses and not script.flow.defined(n)), None
    )


def _value(call: cst.Call, method: cst.Attribute) -> cst.Call:
    """Port `tf.summary.scalar(...)` to `writer.scalar(name, value, step=step)`."""
    order = ("name", "value", "step", "buckets")
    args = []
    for i, arg in enumerate(call.args):
        if arg.keyword is None and i >= 2:
            arg = renamed(arg, order[i])
        args.append(renamed(arg, "value") if is_named(arg, "data") else arg)
    return call.with_changes(func=method, args=args)


# Arrays that loops fill.

_READS = {
    "stack": "keras.ops.stack({x})",
    "concat": "keras.ops.concatenate({x}, axis=0)",
    "size": "len({x})",
}
"""Templates of methods without arguments that read an array."""
_PortOfUse: TypeAlias = tuple[cst.CSTNode, Callable[[Any], cst.CSTNode]]


def plan_tensor_arrays(script: Script) -> None:
    """Plan lists for all arrays that are written in order and read in known ways."""
    for call in script.calls:
        if script.called(call) == "TensorArray" and not script.runs_on_host(call):
            uses = list(_uses_of_array(script, call))
            if uses and all(uses):
                script.frozen |= {call.func, *call.args}
                script.replacements[call] = lambda updated: cst.List([])
                script.replacements |= dict(filter(None, uses))


def _uses_of_array(script: Script, made: cst.Call) -> Iterator[_PortOfUse | None]:
    """The nodes of each use of an array, with their ports; None for another use."""
    target, writes = script.target_of(made), 0
    name = target.value if isinstance(target, cst.Name) else None
    for node in find(script.function_of(made) or script.module, cst.Name):
        if node is target or node.value != name:
            continue
        call, around = script.method_call(node), script.parent(node)
        assign = script.parent(around) if around is not None else None
        if isinstance(assign, cst.Assign) and isinstance(around, cst.AssignTarget):
            writes += 1
            yield _write(script, assign, made) if writes == 1 else None
        elif call is None:
            yield None
        elif method_of(call) != "write":
            yield _read(script, call)


def _write(script: Script, assign: cst.Assign, made: cst.Call) -> _PortOfUse | None:
    """The port of `ta = ta.write(i, x)` in a loop that counts `i`: `ta.append(x)`."""
    call, line = assign.value, script.statement_of(assign)
    target, loop = assign.targets[0].target, script.parent(script.parent(line) or line)
    if not isinstance(loop, cst.For) or not isinstance(call, cst.Call):
        return None
    index = value_of(call, 0, "index")
    if method_of(call) != "write" or index is None or len(call.args) != 2:
        return None
    is_own = object_of(call).deep_equals(target)
    block = script.parent(script.statement_of(made))
    if not (is_own and script.parent(loop) is block and _counts(script, loop, index)):
        return None

    def port(updated: cst.Assign) -> cst.Expr:
        assert isinstance(updated.value, cst.Call)
        value = value_of(updated.value, 1, "value")
        assert value is not None
        made = script.template("{x}.append({y})", x=object_of(updated.value), y=value)
        return cst.Expr(made, semicolon=updated.semicolon)

    return assign, port


def _counts(script: Script, loop: cst.For, index: Expression) -> bool:
    """Whether a loop counts an index from 0, in each turn."""
    iterated, target = loop.iter, loop.target
    if not isinstance(iterated, cst.Call) or len(iterated.args) != 1:
        return False
    name = script.called(iterated) or script.code(iterated.func)
    if name == "enumerate" and parts_of(target):
        target = parts_of(target)[0]
    is_whole = next(find(loop.body, cst.Continue), None) is None
    return name in {"range", "enumerate"} and target.deep_equals(index) and is_whole


def _read(script: Script, call: cst.Call) -> _PortOfUse | None:
    """The port of a call that reads an array."""
    method = method_of(call)
    if method == "read" and len(call.args) == 1 and value_of(call, 0, "index"):
        return call, lambda updated: script.template(
            "{x}[{i}]", x=object_of(updated), i=updated.args[0].value
        )
    if method not in _READS or call.args:
        return None
    text = _READS[method]
    return call, lambda updated: script.template(text, x=object_of(updated))
