"""Which calls share a program: keys of functions and the bounded program cache."""

import dis
import functools
import logging
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from replicax._util.types import PyTree
from replicax._util.user_code import describe

__all__ = ["Identity", "ProgramCache", "function_key"]

_logger = logging.getLogger("replicax")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


T = TypeVar("T")


class Identity:
    """A hashable handle to an object that compares by identity and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value


def static_key(value: object) -> Hashable:
    """A key for a value that a program bakes in: plain values by value."""
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 == -0.0, and NaN equals nothing.
    return (type(value), value) if isinstance(value, _PLAIN) else Identity(value)


def function_key(
    fn: Callable[..., PyTree],
    seen: list[Callable[..., PyTree]] | None = None,
    *,
    with_globals: bool = True,
) -> Hashable:
    """A key that is equal for functions that would trace to the same program.

    A lambda or inner function made anew in a loop has a new identity each time; it is
    the same to us when its code is, everything it closes over, and the globals that it
    names: a cell of a notebook that runs again makes a new model of the same name.

    Args:
        fn: A function, or any other callable.
        seen: The functions that are in the key already, and are named by number.
        with_globals: Whether the values of globals are part of the key.
    """
    if isinstance(fn, types.MethodType):
        key = function_key(fn.__func__, seen, with_globals=with_globals)
        return (Identity(fn.__self__), key)
    if isinstance(fn, types.FunctionType):
        seen = [] if seen is None else seen
        if fn in seen:
            return seen.index(fn)
        seen.append(fn)
        closed_over = tuple(
            _cell_key(cell, seen, with_globals) for cell in fn.__closure__ or ()
        )
        defaults = tuple(map(static_key, fn.__defaults__ or ()))
        named = tuple((k, static_key(v)) for k, v in (fn.__kwdefaults__ or {}).items())
        known = fn.__globals__
        used = tuple(
            _global_key(known[name], known, seen)
            for name in (_global_names(fn.__code__) if with_globals else ())
            if name in known
        )
        return (fn.__code__, Identity(known), closed_over, defaults, named, used)
    # Most objects compare by identity, and in C.
    return fn if type(fn).__eq__ is object.__eq__ else Identity(fn)


def _cell_key(
    cell: types.CellType, seen: list[Callable[..., PyTree]], with_globals: bool
) -> Hashable:
    try:
        content = cell.cell_contents
    except ValueError:  # A name of the enclosing function that is not bound yet.
        return None
    if isinstance(content, types.FunctionType | types.MethodType):
        return function_key(content, seen, with_globals=with_globals)
    return static_key(content)


def _global_key(
    value: object, known: dict[str, object], seen: list[Callable[..., PyTree]]
) -> Hashable:
    """A key of a global; of functions of the same module also what they use."""
    if isinstance(value, types.FunctionType) and value.__globals__ is known:
        return function_key(value, seen)
    kind = type(value)
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        return value  # Modules, models: compared by identity, and in C.
    return static_key(value)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function and those inside it look up in its module."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def unwrap_partial(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]]:
    """Turn the arguments bound by `functools.partial` into ordinary ones."""
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    return fn, args, kwargs


class ProgramCache(Generic[T]):
    """The most recently used programs, at most `size` of them.

    Args:
        size: Programs kept; the least recently used one is dropped for a new one.
    """

    def __init__(self, size: int = 512) -> None:
        self._programs: OrderedDict[Hashable, T] = OrderedDict()
        self._size = size
        # Hashes, which unlike the keys keep nothing alive; none once it was said.
        self._dropped: set[int] | None = set()
        self._lock = threading.Lock()
        self._versions: dict[types.CodeType, list[list[int]]] = {}
        self._warned: set[types.CodeType] = set()

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, fn: Callable[..., PyTree], key: Hashable, make: Callable[[], T]) -> T:
        """The program under `(function, key)`, made with `make` if it is new."""
        full_key = (function_key(fn), key)
        with self._lock:
            program = self._programs.get(full_key)
            if program is not None:
                self._programs.move_to_end(full_key)
                return program
        self._warn_if_dropped(fn, full_key)
        self._warn_if_made_anew(fn)
        program = make()
        self._keep(full_key, program)
        return program

    def keep(self, fn: Callable[..., PyTree], key: Hashable, program: T) -> None:
        """Keep a program that has run for the first time.

        Tracing it may have changed what `fn` closes over, such as a counter.
        """
        self._keep((function_key(fn), key), program)

    def _keep(self, full_key: Hashable, program: T) -> None:
        with self._lock:
            self._programs[full_key] = program
            if len(self._programs) > self._size:
                dropped, _ = self._programs.popitem(last=False)
                if self._dropped is not None:
                    self._dropped.add(hash(dropped))

    def _warn_if_dropped(self, fn: Callable[..., PyTree], full_key: Hashable) -> None:
        if self._dropped is None or hash(full_key) not in self._dropped:
            return
        self._dropped = None
        _logger.warning(
            "%s is compiled again for a shape of arguments that it had before: more "
            "than %d programs are in use, and those used least recently are dropped. "
            "Pad batches to a few shapes; every other shape costs a compilation.",
            describe(fn),
            self._size,
        )

    def _warn_if_made_anew(self, fn: Callable[..., PyTree]) -> None:
        fn = getattr(fn, "__func__", fn)
        if not isinstance(fn, types.FunctionType) or fn.__code__ in self._warned:
            return
        contents = _contents(fn)
        # Hashes, which unlike the keys keep nothing alive.
        version = [hash(key) for key in contents.values()]
        versions = self._versions.setdefault(fn.__code__, [])
        if version not in versions:
            versions.append(version)
        if len(versions) < 3:
            return
        self._warned.add(fn.__code__)
        changed = [
            name
            for name, hashes in zip(contents, zip(*versions, strict=True), strict=True)
            if len(set(hashes)) > 1
        ]
        _logger.warning(
            "%s has been compiled %d times because it is made anew with other "
            "closed-over values (%s) each time. Define it once outside the loop and "
            "pass what changes through args; every new version costs a compilation.",
            describe(fn),
            len(versions),
            ", ".join(changed),
        )


def _contents(fn: types.FunctionType) -> dict[str, Hashable]:
    """What a function closes over, its globals and defaults, as keys by name."""
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    contents = {name: _cell_key(cell, [fn], True) for name, cell in cells.items()}
    known = fn.__globals__
    for name in _global_names(fn.__code__):
        if name in known:
            contents[name] = _global_key(known[name], known, [fn])
    for i, value in enumerate(fn.__defaults__ or ()):
        contents[f"default {i}"] = static_key(value)
    for name, value in (fn.__kwdefaults__ or {}).items():
        contents[f"default {name}"] = static_key(value)
    return contents
