"""Docstrings of the package as the API pages take them."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_ARGS = re.compile(r"^Args:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Reads the section `Example:` as what it is: a sample with its output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section to the only name that is known."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)


def classes(parent: griffe.Object) -> Iterator[griffe.Class]:
    """All classes that are defined below `parent`."""
    for member in parent.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from classes(member)


def modules(parent: griffe.Module) -> Iterator[griffe.Module]:
    """A package and all modules below it."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Module):
            yield from modules(member)


class Namesakes(griffe.Extension):
    """Shows what a package exports under the name of a module that it is made in.

    Python binds the name to the function; a reader of the sources sees the module.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put the function or class into the module's place."""
        for package in list(modules(pkg)):
            for name in [str(name) for name in package.exports or ()]:
                module = package.members.get(name)
                if not isinstance(module, griffe.Module) or name not in module.members:
                    continue
                made = module.members[name]
                if isinstance(made, griffe.Function | griffe.Class):
                    package.set_member(name, made)


class Constructors(griffe.Extension):
    """Leaves the constructors of classes out that users get and never construct.

    A class that is for users to construct says in its docstring what the arguments are.
    Of others `__init__` may say it: that is for the package itself.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Drop what the pages would show as the class's signature."""
        for cls in classes(pkg):
            if cls.name.startswith("_"):
                continue  # Public classes inherit its constructor.
            if cls.docstring is None or not _ARGS.search(cls.docstring.value):
                cls.members.pop("__init__", None)
