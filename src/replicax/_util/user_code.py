"""Distinguishes the user's code from that of replicax and other libraries."""

import functools
import importlib.util
import inspect
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["describe", "is_installed_file", "is_user_file", "library_of"]

_LIBRARIES = ("replicax", "keras", "jax", "jaxlib", "flax", "numpy")
# The path of a source file may contain a link: compare both forms of each folder.
_INSTALLED = tuple(
    f"{form(path)}{os.sep}"
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(__file__)),
    }
    for form in (str, os.path.realpath)
)


@functools.cache
def _folders() -> dict[str, str]:
    specs = {name: importlib.util.find_spec(name) for name in _LIBRARIES}
    return {
        f"{Path(spec.origin).parent}/": name
        for name, spec in specs.items()
        if spec is not None and spec.origin
    }


def library_of(file_name: str) -> str | None:
    """Return which of `_LIBRARIES` a source file belongs to, such as `"jax"`."""
    folders = _folders().items()
    return next((name for path, name in folders if file_name.startswith(path)), None)


def is_user_file(file_name: str) -> bool:
    """Whether a source file is interactive input, or of none of `_LIBRARIES`.

    Files of other packages count as the user's, so messages name lines in them.
    """
    is_generated = file_name.startswith("<") and not file_name.startswith(
        ("<ipy", "<stdin")
    )
    return not is_generated and library_of(file_name) is None


def is_installed_file(file_name: str) -> bool:
    """Whether a source file is of Python, of an installed package, or of replicax."""
    return file_name.startswith(("<frozen", *_INSTALLED))


def describe(fn: Callable[..., Any]) -> str:
    """Format a function's name for messages, with the line if it is the user's."""
    name = getattr(fn, "__qualname__", None) or repr(fn)
    inner = inspect.unwrap(fn)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return name
    return f"{name} (line {code.co_firstlineno})"
