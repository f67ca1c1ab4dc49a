"""Which code is the user's, and not that of replicax or of what it builds on."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

__all__ = ["describe", "is_user_file"]

_LIBRARIES = ("replicax", "keras", "jax", "jaxlib", "flax", "optree", "numpy")


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in _LIBRARIES)
    found = [Path(s.origin).parent for s in specs if s is not None and s.origin]
    return tuple(f"{folder}/" for folder in {*found, Path(jax.__file__).parent})


def is_user_file(name: str) -> bool:
    """Whether a source file, as code objects name it, is the user's."""
    made = name.startswith("<") and not name.startswith(("<ipython", "<stdin"))
    return not made and not name.startswith(_folders())


def describe(fn: Callable[..., Any]) -> str:
    """`fn`'s name, and where it stands if it is the user's, for messages."""
    name = getattr(fn, "__qualname__", None) or repr(fn)
    inner = inspect.unwrap(fn)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return name
    return f"{name} (line {code.co_firstlineno})"
