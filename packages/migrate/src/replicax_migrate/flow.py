"""Reaching definitions: which bindings of a variable each use may see.

After `x = a` and `if c: x = b`, a use of `x` is reached by both definitions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import libcst as cst

from replicax_migrate.tree import methods_of

__all__ = ["Definition", "Flow"]

_Key: TypeAlias = tuple[int, str]
_Environment: TypeAlias = dict[_Key, frozenset["Definition"]]
_NONE: frozenset["Definition"] = frozenset()
_Given = TypeVar("_Given", bound=cst.BaseExpression | None)


@dataclass(eq=False)
class Definition:
    """One binding of a variable.

    Attributes:
        node: The name or `self.x` that is bound.
        values: The expressions that may be bound, as far as the script shows them.
        index: In `a, b = f()`, the position of the name; else None.
    """

    node: cst.CSTNode
    values: list[cst.BaseExpression] = field(default_factory=list)
    index: int | None = None


class Flow:
    """The definitions in a script, and for each use those that reach it.

    The analysis follows statements in order, merges branches, and repeats loops once.
    All bindings of an outer variable reach a use in a function, and all bindings of an
    attribute of `self` reach each use in the class.

    Attributes:
        definitions: All definitions, in the order of the analysis.
    """

    def __init__(
        self, module: cst.Module, key: Callable[[cst.Name], _Key | None]
    ) -> None:
        self.definitions: list[Definition] = []
        self._key = key
        self._by_key: dict[_Key, list[Definition]] = defaultdict(list)
        self._by_node: dict[cst.CSTNode, Definition] = {}
        self._reaching: dict[cst.CSTNode, frozenset[Definition]] = {}
        self._outer_uses: dict[cst.CSTNode, _Key] = {}
        self._uses: dict[Definition, list[cst.CSTNode]] = defaultdict(list)
        self._called: dict[str, list[Sequence[cst.Param]]] = defaultdict(list)
        self._calls: list[cst.Call] = []
        self._loops: list[list[_Environment]] = []
        self._bodies: list[tuple[cst.FunctionDef | cst.Lambda, int]] = []
        self._class = 0
        self._block(module.body, {})
        while self._bodies:
            body, self._class = self._bodies.pop(0)
            self._parameters(body)
        self._pass_arguments()

    def reaching(self, use: cst.CSTNode | None) -> frozenset[Definition]:
        """The definitions that reach a use of a name or of an attribute of `self`."""
        if use is None:
            return _NONE
        if use in self._outer_uses:
            return frozenset(self._by_key[self._outer_uses[use]])
        return self._reaching.get(use, _NONE)

    def definition_of(self, node: cst.CSTNode) -> Definition | None:
        """The definition whose bound name is `node`; None if there is none."""
        return self._by_node.get(node)

    def attributes(self, owner: cst.ClassDef, name: str) -> list[Definition]:
        """The definitions of `self.<name>` in the methods of a class."""
        return self._by_key.get((id(owner), f"self.{name}"), [])

    def uses(self, definition: Definition) -> list[cst.CSTNode]:
        """The uses that a definition reaches."""
        if not self._uses:
            for node in [*self._reaching, *self._outer_uses]:
                for reaching in self.reaching(node):
                    self._uses[reaching].append(node)
        return self._uses.get(definition, [])

    def values(self, node: cst.CSTNode | None) -> list[cst.BaseExpression]:
        """The expressions that may be bound to a variable, as far as they are shown."""
        return [
            value for definition in self.reaching(node) for value in definition.values
        ]

    def value(self, node: cst.CSTNode | None) -> cst.BaseExpression | None:
        """The only expression bound to a variable; None if there may be more."""
        match [
            (definition.values, definition.index) for definition in self.reaching(node)
        ]:
            case [([value], None)]:
                return value
        return None

    def resolve(self, node: _Given) -> _Given | cst.BaseExpression:
        """The only value of a variable; the node itself if there is no only value."""
        return self.value(node) or node

    # Statements. Each method maps the environment before a statement to that after it,
    # or to None if control flow does not reach the next statement.

    def _block(
        self, body: Sequence[cst.CSTNode], env: _Environment | None
    ) -> _Environment | None:
        for statement in body:  # Unreachable statements count, too.
            env = self._statement(statement, env if env is not None else {})
        return env

    def _statement(self, node: cst.CSTNode, env: _Environment) -> _Environment | None:
        match node:
            case cst.SimpleStatementLine() | cst.BaseSuite():
                return self._block(node.body, env)
            case cst.Else() | cst.Finally():
                return self._statement(node.body, env)
            case cst.FunctionDef() | cst.ClassDef():
                return self._named(node, env)
            case cst.For() | cst.While():
                return self._loop(node, env)
            case cst.Try() | cst.TryStar():
                return self._try(node, env)
            case cst.With():
                for item in node.items:
                    self._read(item.item, env)
                    if item.asname:
                        self._bind(item.asname.name, None, env)
                return self._statement(node.body, env)
            case cst.If() | cst.Match():
                return self._branches(node, env)
            case _:
                return self._small(node, env)

    def _branches(
        self, node: cst.If | cst.Match, env: _Environment
    ) -> _Environment | None:
        if isinstance(node, cst.Match):
            self._read(node.subject, env)
            cases = [self._statement(case.body, dict(env)) for case in node.cases]
            return _merged([env, *cases])
        self._read(node.test, env)
        after = self._statement(node.body, dict(env))
        other = self._statement(node.orelse, dict(env)) if node.orelse else env
        return _merged([after, other])

    def _small(self, node: cst.CSTNode, env: _Environment) -> _Environment | None:
        match node:
            case cst.Assign():
                self._read(node.value, env)
                for target in node.targets:
                    self._bind(target.target, node.value, env)
            case cst.AnnAssign():
                if node.value is not None:
                    self._read(node.value, env)
                    self._bind(node.target, node.value, env)
            case cst.AugAssign():
                self._read(node.target, env)
                self._read(node.value, env)
                self._bind(node.target, None, env)
            case cst.Continue() | cst.Break():
                if self._loops:
                    self._loops[-1].append(dict(env))
                return None
            case _:
                self._read(node, env)
        return None if isinstance(node, cst.Return | cst.Raise) else env

    def _named(
        self, node: cst.FunctionDef | cst.ClassDef, env: _Environment
    ) -> _Environment:
        for part in node.decorators:
            self._read(part, env)
        if isinstance(node, cst.FunctionDef):
            self._called[node.name.value].append(node.params.params)
            self._read(node.params, env)
            self._bodies.append((node, self._class))
        else:
            outer, self._class = self._class, id(node)
            for base in node.bases:
                self._read(base, env)
            self._statement(node.body, {})
            self._class = outer
            if init := methods_of(node).get("__init__"):
                self._called[node.name.value].append(init.params.params[1:])
        self._bind(node.name, None, env)
        return env

    def _loop(self, node: cst.For | cst.While, env: _Environment) -> _Environment:
        self._read(node.iter if isinstance(node, cst.For) else node.test, env)
        around = env
        for _ in range(2):  # Bindings of one iteration reach the next one.
            inside = dict(around)
            if isinstance(node, cst.For):
                self._bind(node.target, None, inside)
            else:
                self._read(node.test, inside)
            self._loops.append([])
            after = self._statement(node.body, inside)
            around = _merged([around, after, *self._loops.pop()]) or {}
        if node.orelse:
            return _merged([around, self._statement(node.orelse, dict(around))]) or {}
        return around

    def _try(self, node: cst.Try | cst.TryStar, env: _Environment) -> _Environment:
        points, inside = [dict(env)], dict(env)
        for statement in node.body.body:
            inside = self._statement(statement, inside) or {}
            points.append(dict(inside))
        last = self._statement(node.orelse, inside) if node.orelse else inside
        ends = [last]
        for handler in node.handlers:
            begin = _merged(points) or {}
            if handler.type:
                self._read(handler.type, begin)
            ends.append(self._statement(handler.body, begin))
        after = _merged(ends) or {}
        if node.finalbody:
            after = self._statement(node.finalbody, after) or {}
        return after

    # Bindings and uses.

    def _bind(
        self,
        target: cst.CSTNode,
        value: cst.BaseExpression | None,
        env: _Environment,
        index: int | None = None,
    ) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            parts = [element.value for element in target.elements]
            if isinstance(value, cst.Tuple) and len(value.elements) == len(parts):
                for part, element in zip(parts, value.elements, strict=True):
                    self._bind(part, element.value, env)
            else:
                for i, part in enumerate(parts):
                    self._bind(part, value, env, i)
        elif isinstance(target, cst.Name):
            key = self._key(target)
            if key is not None:
                env[key] = frozenset([self._definition(target, value, key, index)])
        elif isinstance(target, cst.StarredElement):
            self._bind(target.value, None, env)
        elif (key := self._self_key(target)) is not None:
            self._definition(target, value, key, index)
        elif target is not None:
            self._read(target, env)

    def _definition(
        self,
        node: cst.CSTNode,
        value: cst.BaseExpression | None,
        key: _Key,
        index: int | None = None,
    ) -> Definition:
        if node not in self._by_node:
            definition = Definition(node, [] if value is None else [value], index)
            self._by_node[node] = definition
            self._by_key[key].append(definition)
            self.definitions.append(definition)
        return self._by_node[node]

    def _self_key(self, node: cst.CSTNode) -> _Key | None:
        """The key of `self.x`, one for each class."""
        match node:
            case cst.Attribute(value=cst.Name("self"), attr=cst.Name(name)):
                return (self._class, f"self.{name}")
        return None

    def _read(self, node: cst.CSTNode, env: _Environment) -> None:
        """Record the uses in an expression, from left to right."""
        match node:
            case cst.Name():
                if (key := self._key(node)) in env:
                    self._reaching[node] = self._reaching.get(node, _NONE) | env[key]
                elif key is not None:
                    self._outer_uses[node] = key
            case cst.Lambda():
                self._read(node.params, env)
                self._bodies.append((node, self._class))
            case cst.NamedExpr():
                self._read(node.value, env)
                self._bind(node.target, node.value, env)
            case _:
                if isinstance(node, cst.Call):
                    self._calls.append(node)
                elif (key := self._self_key(node)) is not None:
                    self._outer_uses[node] = key
                for child in _read_parts(node):
                    self._read(child, env)

    # Functions.

    def _parameters(self, node: cst.FunctionDef | cst.Lambda) -> None:
        env: _Environment = {}
        for param in node.params.children:
            if isinstance(param, cst.Param):
                self._bind(param.name, None, env)
        if isinstance(node, cst.Lambda):
            self._read(node.body, env)
        else:
            self._statement(node.body, env)

    def _pass_arguments(self) -> None:
        """Add the arguments at each call site to the definitions of the parameters."""
        for call in dict.fromkeys(self._calls):
            name = call.func.value if isinstance(call.func, cst.Name) else ""
            for parameters in self._called.get(name, ()):
                for param, value in _arguments(parameters, call):
                    if definition := self._by_node.get(param):
                        definition.values.append(value)


def _read_parts(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The children that evaluation reads: not keywords or names of attributes."""
    match node:
        case cst.Arg() | cst.Attribute():
            return [node.value]
        case cst.Param():
            return [node.default] if node.default is not None else []
        case cst.Import() | cst.ImportFrom():
            return []
        case _:
            return node.children


def _arguments(
    parameters: Sequence[cst.Param], call: cst.Call
) -> Iterator[tuple[cst.Name, cst.BaseExpression]]:
    """Pairs of parameter name and argument of a call."""
    named = {param.name.value: param.name for param in parameters}
    by_position = dict(enumerate(named.values()))
    for i, arg in enumerate(call.args):
        name = named.get(arg.keyword.value) if arg.keyword else by_position.get(i)
        if name is not None and not arg.star:
            yield name, arg.value


def _merged(environments: Iterable[_Environment | None]) -> _Environment | None:
    """The union of the environments after branches; None if all of them leave."""
    live = [env for env in environments if env is not None]
    if not live:
        return None
    keys = dict.fromkeys(key for env in live for key in env)
    return {key: frozenset(d for env in live for d in env.get(key, ())) for key in keys}
