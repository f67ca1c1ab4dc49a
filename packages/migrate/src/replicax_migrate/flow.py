"""Reaching definitions: the bindings whose value a use of a variable may have.

After `x = a` and `if c: x = b`, both definitions reach a use of `x`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import libcst as cst

from replicax_migrate.tree import methods_of

__all__ = ["Definition", "Flow"]

_Key: TypeAlias = tuple[int, str]
"""The key of a variable: the id of the scope or class that binds it, and the name."""
_Environment: TypeAlias = dict[_Key, frozenset["Definition"]]
_NONE: frozenset["Definition"] = frozenset()
_Expression = TypeVar("_Expression", bound=cst.BaseExpression | None)


@dataclass(eq=False)
class Definition:
    """One binding of a variable.

    Attributes:
        node: The bound name, or `self.x`.
        values: The known expressions that the name may be bound to.
        index: In `a, b = f()`, the position of the name; else None.
    """

    node: cst.CSTNode
    values: list[cst.BaseExpression] = field(default_factory=list)
    index: int | None = None


class Flow:
    """The definitions in a script, and the definitions that reach each use.

    The analysis follows statements in order, merges branches, and visits the body of a
    loop twice. All bindings of an outer variable reach its uses in a function. All
    bindings of an attribute of `self` reach its uses in the class.

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
        self._signatures: dict[str, list[Sequence[cst.Param]]] = defaultdict(list)
        self._calls: list[cst.Call] = []
        self._loops: list[list[_Environment]] = []
        self._bodies: list[tuple[cst.FunctionDef | cst.Lambda, int]] = []
        self._class = 0
        self._block(module.body, {})
        while self._bodies:
            body, self._class = self._bodies.pop(0)
            self._function_body(body)
        self._pass_arguments()

    def reaching(self, use: cst.CSTNode | None) -> frozenset[Definition]:
        """The definitions that reach a use of a name or of an attribute of `self`."""
        if use is None:
            return _NONE
        if use in self._outer_uses:
            return frozenset(self._by_key[self._outer_uses[use]])
        return self._reaching.get(use, _NONE)

    def definition_of(self, node: cst.CSTNode) -> Definition | None:
        """The definition that binds the name `node`; None for other nodes."""
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
        """The known expressions that a variable may be bound to."""
        return [v for definition in self.reaching(node) for v in definition.values]

    def value(self, node: cst.CSTNode | None) -> cst.BaseExpression | None:
        """The only expression that a variable may be bound to; else None."""
        match [(d.values, d.index) for d in self.reaching(node)]:
            case [([value], None)]:
                return value
        return None

    def resolve(self, node: _Expression) -> _Expression | cst.BaseExpression:
        """The only value of a variable; for other expressions, the node itself."""
        return self.value(node) or node

    # Statements. Each method maps the environment before a statement to the environment
    # after it; None if control flow does not reach the next statement.

    def _block(
        self, body: Sequence[cst.CSTNode], env: _Environment | None
    ) -> _Environment | None:
        for statement in body:  # Includes statements below a `return`.
            env = self._statement(statement, env if env is not None else {})
        return env

    def _statement(self, node: cst.CSTNode, env: _Environment) -> _Environment | None:
        match node:
            case cst.SimpleStatementLine() | cst.BaseSuite():
                return self._block(node.body, env)
            case cst.Else() | cst.Finally():
                return self._statement(node.body, env)
            case cst.FunctionDef() | cst.ClassDef():
                return self._function_or_class(node, env)
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
        after_if = self._statement(node.body, dict(env))
        after_else = self._statement(node.orelse, dict(env)) if node.orelse else env
        return _merged([after_if, after_else])

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

    def _function_or_class(
        self, node: cst.FunctionDef | cst.ClassDef, env: _Environment
    ) -> _Environment:
        for part in node.decorators:
            self._read(part, env)
        if isinstance(node, cst.FunctionDef):
            self._signatures[node.name.value].append(node.params.params)
            self._read(node.params, env)
            self._bodies.append((node, self._class))
        else:
            outer, self._class = self._class, id(node)
            for base in node.bases:
                self._read(base, env)
            self._statement(node.body, {})
            self._class = outer
            if init := methods_of(node).get("__init__"):
                self._signatures[node.name.value].append(init.params.params[1:])
        self._bind(node.name, None, env)
        return env

    def _loop(self, node: cst.For | cst.While, env: _Environment) -> _Environment:
        self._read(node.iter if isinstance(node, cst.For) else node.test, env)
        merged = env
        for _ in range(2):  # Bindings of an iteration reach the next iteration.
            body_env = dict(merged)
            if isinstance(node, cst.For):
                self._bind(node.target, None, body_env)
            else:
                self._read(node.test, body_env)
            self._loops.append([])
            after = self._statement(node.body, body_env)
            merged = _merged([merged, after, *self._loops.pop()]) or {}
        if node.orelse:
            return _merged([merged, self._statement(node.orelse, dict(merged))]) or {}
        return merged

    def _try(self, node: cst.Try | cst.TryStar, env: _Environment) -> _Environment:
        # An error may leave the body after each statement.
        raising, body_env = [dict(env)], dict(env)
        for statement in node.body.body:
            body_env = self._statement(statement, body_env) or {}
            raising.append(dict(body_env))
        ends = [self._statement(node.orelse, body_env) if node.orelse else body_env]
        for handler in node.handlers:
            handler_env = _merged(raising) or {}
            if handler.type:
                self._read(handler.type, handler_env)
            ends.append(self._statement(handler.body, handler_env))
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
        """The key of `self.x` in the current class; None for other nodes."""
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

    def _function_body(self, node: cst.FunctionDef | cst.Lambda) -> None:
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
            for parameters in self._signatures.get(name, ()):
                for param, value in _arguments(parameters, call):
                    if definition := self._by_node.get(param):
                        definition.values.append(value)


def _read_parts(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The children that Python evaluates: not keywords or names of attributes."""
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
    """Pairs of the name of a parameter and the argument of a call."""
    by_keyword = {param.name.value: param.name for param in parameters}
    by_position = dict(enumerate(by_keyword.values()))
    for i, arg in enumerate(call.args):
        name = by_keyword.get(arg.keyword.value) if arg.keyword else by_position.get(i)
        if name is not None and not arg.star:
            yield name, arg.value


def _merged(environments: Iterable[_Environment | None]) -> _Environment | None:
    """The union of environments; None if all are None."""
    live = [env for env in environments if env is not None]
    if not live:
        return None
    keys = dict.fromkeys(key for env in live for key in env)
    return {key: frozenset(d for env in live for d in env.get(key, ())) for key in keys}
