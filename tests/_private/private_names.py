"""Finds the private names of Keras, JAX and other libraries in replicax' sources."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import replicax
import replicax_estimator
import replicax_migrate

CORE = Path(replicax.__file__).parent
SATELLITES = [Path(m.__file__).parent for m in (replicax_estimator, replicax_migrate)]
_MODULE = re.compile(r"(keras\.src|jax\._src|jaxlib)(\.|$)")
_NAME = re.compile(r"_[A-Za-z]\w*$")
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "operator.attrgetter")
# Most of what this folder reads belongs to Keras or JAX.
_BINDINGS = ("_private",)


@dataclass(frozen=True)
class Use:
    """One use of a name, which is a dotted path or the name of an attribute.

    `where` is "file:line". `call` has the number of positional arguments and the
    keywords, if the name is called with arguments that can be counted.
    """

    name: str
    where: str
    call: tuple[int, tuple[str, ...]] | None = None


@functools.cache
def sources() -> dict[str, ast.Module]:
    """All modules by path: of the core in its folder, of others in their package."""
    return {
        str(file.relative_to(base)): ast.parse(file.read_text(encoding="utf-8"))
        for root, base in ((CORE, CORE), *((s, s.parent) for s in SATELLITES))
        for file in sorted(root.rglob("*.py"))
    }


def imported_names(file: str, module: ast.Module) -> Iterator[Use]:
    """Find the uses of names that a file imports from private modules."""
    bound: dict[str, str] = {}
    for node in ast.walk(module):
        for local, path, imported in _imports(node):
            bound[local] = path
            yield Use(imported, f"{file}:{node.lineno}")
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                bound.update({name: p} if (p := _path(value, bound)) else {})
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                bound.update({name: p} if (p := _path(value, bound)) else {})
    for node in ast.walk(module):
        match node:
            case ast.Call() if path := _path(node.func, bound):
                yield Use(path, f"{file}:{node.lineno}", _arguments(node))
            case ast.Attribute(ctx=ast.Load()) if path := _path(node, bound):
                if _MODULE.match(path):
                    yield Use(path, f"{file}:{node.lineno}")


def _imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield the imports of private modules: local name, path, imported name."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                root = alias.name.partition(".")[0]
                if _MODULE.match(alias.name):
                    path = alias.name if alias.asname else root
                    yield alias.asname or root, path, alias.name
        case ast.ImportFrom(module=str(source), names=names) if _MODULE.match(source):
            for alias in names:
                path = f"{source}.{alias.name}"
                yield alias.asname or alias.name, path, path


def _path(node: ast.expr, bound: dict[str, str]) -> str | None:
    """The dotted path of an expression with an imported name; else None."""
    match node:
        case ast.Name():
            return bound.get(node.id)
        case ast.Attribute():
            base = _path(node.value, bound)
            return base and f"{base}.{node.attr}"
        case ast.Call(
            func=ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name))],
        ) if _MODULE.match(name):
            return name
    return None


def attributes(file: str, module: ast.Module, own: set[str]) -> Iterator[Use]:
    """Find attributes and strings with an underscore that are not in `own`."""
    is_binding = file.split("/")[0] in _BINDINGS
    if is_binding:
        own = {n.name for n in module.body if isinstance(n, ast.ClassDef)}
    calls = {id(n.func): n for n in ast.walk(module) if isinstance(n, ast.Call)}
    asked, others = _strings(module)
    for node in ast.walk(module):
        call = None
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                call = calls.get(id(node)) and _arguments(calls[id(node)])
            case ast.Constant(value=str(name)):
                if id(node) in others or not (is_binding or id(node) in asked):
                    continue
            case _:
                continue
        if _NAME.match(name) and not name.startswith("_replicax") and name not in own:
            yield Use(name, f"{file}:{node.lineno}", call)


def _strings(module: ast.Module) -> tuple[set[int], set[int]]:
    """Identities of strings that name an attribute, and of strings that name none."""
    asked, others = set[int](), set[int]()
    for node in ast.walk(module):
        match node:
            case ast.Call() if ast.unparse(node.func) in _BY_NAME:
                asked.update(map(id, node.args))
            case ast.JoinedStr():
                others.update(map(id, node.values))
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                others.update(map(id, ast.walk(node.value)))
    return asked, others


def inherited(file: str, module: ast.Module, own: set[str]) -> Iterator[Use]:
    """Find attributes of `self` with an underscore that replicax never sets."""
    for cls in ast.walk(module):
        if not isinstance(cls, ast.ClassDef):
            continue
        ours = set(defined(cls)) | (set() if file.split("/")[0] in _BINDINGS else own)
        for node in ast.walk(cls):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if (
                    _NAME.match(name) and name not in ours
                ):
                    yield Use(name, f"{file}:{node.lineno}")


def defined(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes and values that a part of the sources defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(
                value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()
            ):
                yield name


def _arguments(call: ast.Call) -> tuple[int, tuple[str, ...]] | None:
    """The positional arguments and keywords of a call; None if it unpacks some."""
    keywords = [keyword.arg for keyword in call.keywords]
    if None in keywords or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    return len(call.args), tuple(k for k in keywords if k)
