"""Resolves the names of a script to paths of TensorFlow, through its imports.

After `from tensorflow.keras import layers as L`, `L.Dense` is `keras.layers.Dense`.
"""

import functools
import re
from collections import defaultdict

import libcst as cst
from libcst.metadata import (
    GlobalScope,
    MetadataWrapper,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from replicax_migrate.tables import (
    NAMES,
    NEED_TENSORFLOW,
    OLD_PREFIXES,
    find_target,
    is_known,
)
from replicax_migrate.tree import dotted_name, find, first_name, module_of

__all__ = ["Names", "path_in_tensorflow"]

_ROOTS = {
    **dict.fromkeys(("tensorflow", "tensorflow_core"), ""),
    **dict.fromkeys(("tf_keras", "keras"), "keras"),  # Keras 2 was also a package.
    "keras_preprocessing": "keras.preprocessing",
}
"""Packages that count as TensorFlow, and their paths."""
_KERAS_ALIAS = re.compile(r"optimizers\.|(initializers|losses|metrics)\.[A-Z]")
"""Second names of Keras classes in TensorFlow 2, such as `tf.losses.Hinge`."""


@functools.cache
def path_in_tensorflow(name: str) -> str | None:
    """The path in TensorFlow 2 of a full name; None for other packages.

    Example:
        >>> path_in_tensorflow("tensorflow.compat.v1.train.Saver")
        'train.Saver'
    """
    root, _, path = name.partition(".")
    if root not in _ROOTS:
        return None
    path = ".".join(filter(None, [_ROOTS[root], path]))
    if path in {"compat.v1", "compat.v2", "_api.v2"}:
        return ""
    for old, new in OLD_PREFIXES.items():
        if path.startswith(old):
            return path_in_tensorflow(f"tensorflow.{new}{path[len(old) :]}")
        if f"{path}." == old:
            return new.rstrip(".")
    return _public_path(f"keras.{path}" if _KERAS_ALIAS.match(path) else path)


def _public_path(path: str) -> str:
    """The public path of a name in a private module of Keras 2.

    `keras.layers.core.dense.Dense` is `keras.layers.Dense`, and the module
    `keras.layers.core` is `keras.layers`.
    """
    *package, name = path.split(".")
    if package[:1] != ["keras"] or len(package) < 2 or is_known(path):
        return path
    if name in NAMES["old_modules"]:
        return _public_path(".".join(package))
    if any(module.endswith("_v1") for module in package):
        return path  # Modules `..._v1` define another class with the same name.
    for n in range(len(package) - 1, 1, -1):
        if is_known(public := ".".join([*package[:n], name])):
            return public
    return path


class Names:
    """Resolves names of one module by its scopes, imports and aliases.

    Attributes:
        assumes_tensorflow: Whether the script uses `tf` without binding `tf`.
        ambiguous: Maps the keys of variables that hold a path in some places, and other
            values elsewhere, to one of their paths.
    """

    def __init__(self, wrapper: MetadataWrapper) -> None:
        self._scopes = wrapper.resolve(ScopeProvider)
        self.assumes_tensorflow = False
        self._stars = [  # Modules of `from x import *`, in the order of the text.
            f"{'.' * len(node.relative)}{module_of(node)}"
            for node in find(wrapper.module, cst.ImportFrom)
            if isinstance(node.names, cst.ImportStar)
        ]
        self._all_scopes = {scope for scope in self._scopes.values() if scope}
        scopes = (s for s in self._all_scopes if isinstance(s, GlobalScope))
        self._globals = next(scopes, None)
        self.ambiguous: dict[tuple[int, str], str] = {}
        self._aliases: dict[tuple[int, str], str] = {}
        self._find_aliases(wrapper.module)

    def tf_path(self, node: cst.CSTNode | None) -> str | None:
        """Resolve a dotted name to its path in TensorFlow.

        Returns:
            The path, such as `"keras.layers.Dense"`; `""` for the package itself; None
            for names of other packages.
        """
        text, root = dotted_name(node), first_name(node)
        scope = (self._scopes.get(root) if root else None) or self._globals
        if text is None or root is None or scope is None:
            return None
        name, rest = root.value, text[len(root.value) :]
        bound = scope[name]
        if rest and (alias := self.alias(root)):
            return alias + rest
        if all(assignment.scope is self._globals for assignment in bound):
            if name == "tf" and not bound:
                self.assumes_tensorflow = True
                return path_in_tensorflow("tensorflow" + rest)
            if self._stars and not bound:
                path = self.starred(name)
                return path + rest if path else None
        full_name = self._module_name(scope, text)
        return path_in_tensorflow(full_name) if full_name else None

    def starred(self, name: str) -> str | None:
        """The path of a name that `from tensorflow.keras.layers import *` may bind.

        An unknown name belongs to the last of these modules, unless the script also
        imports names of another package with `*`.
        """
        paths = [path_in_tensorflow(module) for module in self._stars]
        modules = [p for p in paths if p and f"{p}.".startswith("keras.")]
        for path in reversed(modules):
            if find_target(f"{path}.{name}") or f"{path}.{name}" in NEED_TENSORFLOW:
                return f"{path}.{name}"
        is_only_keras = bool(modules) and len(modules) == len(paths)
        is_special = name.startswith("__") or self.is_bound(name)
        return f"{modules[-1]}.{name}" if is_only_keras and not is_special else None

    def imported(self, node: cst.CSTNode | None) -> str | None:
        """The full name of a dotted name, if an import binds its first part."""
        text, root = dotted_name(node), first_name(node)
        scope = self._scopes.get(root) if root else None
        return self._module_name(scope, text) if scope and text else None

    def is_read(self, node: cst.Name) -> bool:
        """Whether a node reads its name; False for bindings and keywords."""
        scope = self._scopes.get(node)
        accesses = scope.accesses[node.value] if scope else ()
        return any(access.node is node for access in accesses)

    def key(self, name: cst.Name) -> tuple[int, str] | None:
        """The key of a variable: the id of the scope that binds it, and the name."""
        scope = self._scopes.get(name)
        if scope is None:
            return None
        for assignment in scope[name.value]:
            return (id(assignment.scope), name.value)
        return (0, name.value)

    def is_bound(self, name: str, path: str | None = None) -> bool:
        """Whether a scope binds `name`; with `path`, only to something else than it."""
        names = (self._module_name(s, name) for s in self._all_scopes if name in s)
        return any(path is None or path_in_tensorflow(n or "") != path for n in names)

    def _module_name(self, scope: Scope, text: str) -> str | None:
        for qualified in scope.get_qualified_names_for(text):
            if qualified.source is QualifiedNameSource.IMPORT:
                return qualified.name
        return None

    def alias(self, name: cst.Name) -> str | None:
        """The path of a variable such as `layers` after `layers = tf.keras.layers`."""
        return self._aliases.get(self.key(name) or (0, ""))

    def alias_paths(self, name: str) -> set[str | None]:
        """The paths of a name in all scopes; None for another value in a scope."""
        bound = (assignment for scope in self._all_scopes for assignment in scope[name])
        return {self._aliases.get((id(assignment.scope), name)) for assignment in bound}

    def _find_aliases(self, module: cst.Module) -> None:
        """Find the variables that are bound to one path only."""
        paths = defaultdict[tuple[int, str], dict[cst.CSTNode, str]](dict)
        for node in find(module, cst.Assign):
            target, path = node.targets[0].target, self.tf_path(node.value)
            if path and isinstance(target, cst.Name) and len(node.targets) == 1:
                paths[self.key(target) or (0, "")][target] = path
        scopes = {id(scope): scope for scope in self._all_scopes}
        for key, by_target in paths.items():
            bound = scopes[key[0]][key[1]] if key[0] in scopes else ()
            are_paths = all(
                getattr(assignment, "node", None) in by_target for assignment in bound
            )
            is_alias = are_paths and len(set(by_target.values())) == 1
            table = self._aliases if is_alias else self.ambiguous
            table[key] = next(iter(by_target.values()))
