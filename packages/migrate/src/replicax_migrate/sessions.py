"""Ports sessions of TensorFlow 1 to statements that run in order.

`with tf.Session() as sess: sess.run(train_op)` becomes the statements that compute
`train_op`. Runs of initializers are removed.
"""

import itertools
from collections.abc import Iterator

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.script import Expression, Replacement, Script, Statement, Unported
from replicax_migrate.statements import inlined_body
from replicax_migrate.tables import MESSAGES, NAMES
from replicax_migrate.tree import (
    attr_of,
    dotted_name,
    elements_of,
    find,
    method_name,
    names_in,
    object_of,
    only_statement,
    reachable,
)

__all__ = ["plan_sessions"]


def plan_sessions(script: Script) -> Edits:
    """Plan to replace each `with tf.Session()` by its body, or report the session.

    Statements that compute the argument of `sess.run` move to its call. A session with
    uses other than `run` stays.
    """
    edits = Edits()
    for node in script.nodes(cst.With):
        item, *others = node.items
        name = item.asname.name if item.asname is not None else None
        is_session = not others and script.called_path(item.item) in NAMES["sessions"]
        if is_session and isinstance(name, cst.Name):
            session = _GraphSession(script, node, name.value)
            edits |= script.attempt(node, session.edits, Edits())
    return edits


class _GraphSession:
    """Plans the port of a session, and of the graph above it."""

    def __init__(self, script: Script, node: cst.With, name: str) -> None:
        self._script = script
        self._node = node
        self._name = name
        self._edits = Edits()
        # By variable of an initializer: its iterator; `""` if it initializes variables.
        self._initializers: dict[str, str | None] = {}
        # By variable of a value or an iterator: the line that assigns the variable.
        self._values: dict[str, cst.SimpleStatementLine] = {}
        self._iterators: dict[str, cst.SimpleStatementLine] = {}
        self._removed: list[cst.SimpleStatementLine] = []

    def edits(self) -> Edits:
        """Plan the port of all runs."""
        script = self._script
        for line in self._lines_before():
            self._classify(line)
        values_by_run = {call: self._values_of_run(call) for call in list(self._runs())}
        moved: set[cst.CSTNode] = set()
        for call, values in values_by_run.items():
            moved |= self._plan_run(call, values)
        for line in moved:
            self._edits.replacements[line] = script.move_away(line)
        for line in self._removed:
            self._edits.remove(line)
        self._edits.unchanged.add(self._node.items[0])
        self._edits.replacements[self._node] = inlined_body
        return self._edits

    def _lines_before(self) -> list[cst.SimpleStatementLine]:
        """The lines above the session, in its block and in the outer blocks."""
        before: list[cst.SimpleStatementLine] = []
        inner: cst.CSTNode = self._node
        for outer in self._script.parents(self._node):
            if isinstance(outer, cst.IndentedBlock | cst.Module):
                lines = itertools.takewhile(
                    lambda x, end=inner: x is not end, outer.body
                )
                simple = [x for x in lines if isinstance(x, cst.SimpleStatementLine)]
                before = [*simple, *before]
            if isinstance(outer, cst.FunctionDef):
                break
            inner = outer
        return before

    def _classify(self, line: cst.SimpleStatementLine) -> None:
        assign = only_statement(line)
        if not isinstance(assign, cst.Assign):
            return
        targets = [n.value for t in assign.targets for n in find(t.target, cst.Name)]
        value = assign.value
        attributes = map(attr_of, find(value, cst.Attribute))
        if method_name(value) in NAMES["graph_iterators"] and len(targets) == 1:
            self._iterators[targets[0]] = line
        elif (iterator := self._initialized_iterator(value)) is not None:
            self._initializers |= dict.fromkeys(targets, iterator)
            self._removed.append(line)
        elif "get_next" in attributes or names_in(value) & self._values.keys():
            self._values |= dict.fromkeys(targets, line)

    def _initialized_iterator(self, value: Expression) -> str | None:
        """The iterator that `value` initializes; `""` for variables; else None."""
        if isinstance(value, cst.List | cst.Tuple):
            parts = [self._initialized_iterator(part) for part in elements_of(value)]
            names = [part for part in parts if part is not None]
            return "".join(names) if names and names == parts else None
        if isinstance(value, cst.Name):
            return self._initializers.get(value.value)
        if attr_of(value) == "initializer":
            return (dotted_name(value) or "").rpartition(".")[0] or None
        if self._script.called_path(value) in NAMES["graph_initializers"]:
            return ""
        has_no_args = isinstance(value, cst.Call) and not value.args
        is_initializer = has_no_args and method_name(value) == "initialize"
        return dotted_name(object_of(value)) if is_initializer else None

    def _runs(self) -> Iterator[cst.Call]:
        for node in find(self._node.body, cst.Name):
            if node.value != self._name:
                continue
            call = self._script.method_call(node)
            if call is None or method_name(call) != "run":
                reason = f"the session `{self._name}` has other uses than `run`"
                raise Unported(reason, node)
            if len(call.args) != 1 or call.args[0].keyword:
                raise Unported(MESSAGES["session_options"], call)
            yield call

    def _values_of_run(self, call: cst.Call) -> list[str] | None:
        """The variables in the argument of a `run`; None for initializers."""
        fetches = call.args[0].value
        if self._initialized_iterator(fetches) is not None:
            return None
        is_list = isinstance(fetches, cst.List | cst.Tuple)
        parts = elements_of(fetches) if is_list else [fetches]
        for part in parts:
            if dotted_name(part) not in self._values:
                code = self._script.code(part)
                raise Unported(MESSAGES["session_value"].format(value=code), call)
        return [dotted_name(part) or "" for part in parts]

    def _lines_for(self, values: list[str]) -> list[cst.SimpleStatementLine]:

        def inputs(name: str) -> set[str]:
            assign = self._values[name].body[0]
            assert isinstance(assign, cst.Assign)
            return names_in(assign.value) & self._values.keys()

        needed = {self._values[name] for name in reachable(values, inputs)}
        return [line for line in dict.fromkeys(self._values.values()) if line in needed]

    def _plan_run(
        self, call: cst.Call, values: list[str] | None
    ) -> set[cst.SimpleStatementLine]:
        script, statement = self._script, self._script.statement_of(call)
        if not isinstance(statement, cst.SimpleStatementLine):
            raise Unported("write the session's run on a line of its own", call)
        small = only_statement(statement)
        is_alone = isinstance(small, cst.Expr) and small.value is call
        if values is None:
            if not is_alone:
                raise Unported("the result of an initializer has uses", call)
            self._plan_initialization(call, statement)
            return set()
        needed = self._lines_for(values)

        def inlined(updated: Statement) -> Replacement:
            """Copies of the needed lines, and the statement with the `run`."""
            first, *others = [script.moved[line].deep_clone() for line in needed]
            comments = [line for line in first.leading_lines if line.comment]
            above = [*updated.leading_lines, *comments]
            first = first.with_changes(leading_lines=above)
            last = [] if is_alone else [updated.with_changes(leading_lines=())]
            return cst.FlattenSentinel([first, *others, *last])

        self._edits.replacements[call] = lambda updated: updated.args[0].value
        if needed:
            self._edits.replacements[statement] = inlined
        return set(needed)

    def _plan_initialization(
        self, call: cst.Call, statement: cst.SimpleStatementLine
    ) -> None:
        """Plan to remove a run of an initializer; in a loop, to make a new iterator."""
        script = self._script
        parents = script.parents(statement)
        inner = itertools.takewhile(lambda x: x is not self._node, parents)
        in_loop = any(isinstance(node, cst.For | cst.While) for node in inner)
        line = self._iterators.get(self._initialized_iterator(call.args[0].value) or "")
        if not in_loop or line is None:
            self._edits.remove(statement)
            return
        self._edits.unchanged.add(statement)
        self._edits.replacements[statement] = lambda updated: (
            script.ported_statements[line][0]
            .deep_clone()
            .with_changes(leading_lines=updated.leading_lines)
        )
