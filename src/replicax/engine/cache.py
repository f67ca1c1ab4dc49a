"""Keys of functions, and the cache of programs."""

import dis
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from replicax._util.types import PyTree

__all__ = ["Identity", "ProgramCache", "function_key"]

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
    """A key for a constant of a program: plain values by value, others by identity."""
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 == -0.0, and NaN equals nothing.
    return (type(value), value) if isinstance(value, _PLAIN) else Identity(value)


class _KeyOfFunction:
    """A function's key, and the objects from which it was made, to validate it fast."""

    def __init__(self, fn: types.FunctionType, *, with_globals: bool = True) -> None:
        self._fn = weakref.ref(fn)
        self._with_globals = with_globals
        self._functions: list[types.FunctionType] = []
        self._cells: list[tuple[types.CellType, object]] = []
        self._names: list[tuple[dict[str, object], str, object]] = []
        self.key = self._key_of(fn)
        self._functions.clear()

    def is_current(self, fn: types.FunctionType) -> bool:
        """Whether this is the key of `fn`, and no object of the key was replaced."""
        return (
            self._fn() is fn  # `functools.wraps` copies attributes to other functions.
            and all(values.get(name) is value for values, name, value in self._names)
            and all(_content(cell) is content for cell, content in self._cells)
        )

    def refers_to(self, fn: types.FunctionType) -> bool:
        """Whether the function is one of the objects that its key depends on."""
        return any(x is fn for *_, x in [*self._cells, *self._names])

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None: a pickled function takes its attributes along."""
        return (type(None), ())

    def _key_of(self, fn: types.FunctionType) -> Hashable:
        if fn in self._functions:  # A recursive call has its position as key.
            return self._functions.index(fn)
        self._functions.append(fn)
        keys: list[Hashable] = []
        for cell in fn.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            keys.append(self._content_key(content))
        keys += map(static_key, fn.__defaults__ or ())
        defaults, module = fn.__kwdefaults__ or {}, fn.__globals__
        keys += [static_key(self._value_of(defaults, name)) for name in defaults]
        for name in _global_names(fn.__code__) if self._with_globals else ():
            keys.append(self._global_key(self._value_of(module, name), module))
        return (fn.__code__, Identity(module), tuple(keys))

    def _value_of(self, values: dict[str, object], name: str) -> object:
        value = values.get(name)
        self._names.append((values, name, value))
        return value

    def _content_key(self, content: object) -> Hashable:
        if isinstance(content, types.MethodType):
            return (Identity(content.__self__), self._content_key(content.__func__))
        is_function = isinstance(content, types.FunctionType)
        return self._key_of(content) if is_function else static_key(content)

    def _global_key(self, value: object, module: dict[str, object]) -> Hashable:
        """A key of a global; a function of the same module is compared by content."""
        if isinstance(value, types.FunctionType) and value.__globals__ is module:
            return self._key_of(value)
        kind = type(value)
        if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
            return value  # Python compares modules and models by identity, in C.
        return static_key(value)


def _content(cell: types.CellType) -> object:
    """A cell's content; None if the outer function has not bound the name yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# Making a key takes longer than the rest of `Strategy.run` on the host, so the key is
# stored as an attribute of the function. (A dictionary would keep models alive.)
_KEY = "_replicax_key"


def function_key(fn: Callable[..., PyTree], *, with_globals: bool = True) -> Hashable:
    """A key that is equal for functions that would trace to the same program.

    A lambda or inner function in a loop is a new object each time. So keys consist of
    the code, the closed-over values, the defaults and, `with_globals`, the values of
    the globals that the code names.
    """
    if isinstance(fn, types.MethodType):
        key = function_key(fn.__func__, with_globals=with_globals)
        return (Identity(fn.__self__), key)
    if not isinstance(fn, types.FunctionType):
        # Python compares objects without `__eq__` by identity, in C.
        return fn if type(fn).__eq__ is object.__eq__ else Identity(fn)
    stored: _KeyOfFunction | None = fn.__dict__.get(_KEY) if with_globals else None
    if stored is not None and stored.is_current(fn):
        return stored.key
    new = _KeyOfFunction(fn, with_globals=with_globals)
    if with_globals and not new.refers_to(fn):  # Avoid a reference cycle.
        fn.__dict__[_KEY] = new
    return new.key


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
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


class _Entry(Generic[T]):
    """A program and its key; `holder` is the dictionary that keeps the entry alive."""

    __slots__ = ("__weakref__", "holder", "key", "program")

    def __init__(self, key: Hashable, program: T | None = None) -> None:
        self.key = key
        self.program = program
        self.holder: dict[int, _Entry[T]] = {}

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entry) and self.key == other.key


class _Programs(dict[int, Any]):
    """The entries that a variable keeps alive, by id; a copied variable has none."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_Programs, ())


_PROGRAMS = "_replicax_programs"


class ProgramCache(Generic[T]):
    """The `size` most recently used programs.

    A program and its key refer to variables and functions. To let the garbage collector
    free a model with its programs, only a program's owner, such as a weight, keeps the
    program alive. If `owner_of` returns None, the cache does.
    """

    def __init__(
        self, size: int = 512, owner_of: Callable[[T], object] = lambda _: None
    ) -> None:
        # Weak references to equal entries are equal.
        self._entries: OrderedDict[weakref.ref[_Entry[T]], weakref.ref[_Entry[T]]]
        self._entries = OrderedDict()
        self._kept: dict[int, _Entry[T]] = {}
        self._size = size
        self._owner_of = owner_of
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        """The programs, the least recently used one first."""
        entries = [reference() for reference in list(self._entries)]
        programs = [None if entry is None else entry.program for entry in entries]
        return iter([program for program in programs if program is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, fn: Callable[..., PyTree], key: Hashable, make: Callable[[], T]) -> T:
        """The program under `(function, key)`, made with `make` if it is new."""
        probe: _Entry[T] = _Entry((function_key(fn), key))
        with self._lock:
            reference = weakref.ref(probe)
            entry_reference = self._entries.get(reference)
            entry = None if entry_reference is None else entry_reference()
            if entry is not None and entry.program is not None:
                self._entries.move_to_end(reference)
                return entry.program
        program = make()
        self._keep(probe.key, program)
        return program

    def keep(self, fn: Callable[..., PyTree], key: Hashable, program: T) -> None:
        """Store a program again: its trace may have changed the function's key.

        An example is a closed-over counter.
        """
        self._keep((function_key(fn), key), program)

    def _keep(self, full_key: Hashable, program: T) -> None:
        owner, holder = self._owner_of(program), self._kept
        if owner is not None:
            holder = vars(owner).setdefault(_PROGRAMS, _Programs())
        with self._lock:
            entry = _Entry(full_key, program)
            reference = weakref.ref(entry)
            self._drop(reference)
            entry.holder = holder
            holder[id(entry)] = entry
            self._entries[reference] = reference
            for freed in [x for x in self._entries if x() is None]:
                del self._entries[freed]
            if len(self._entries) > self._size:
                self._drop(next(iter(self._entries)))

    def _drop(self, reference: weakref.ref[_Entry[T]]) -> None:
        stored = self._entries.pop(reference, None)
        entry = None if stored is None else stored()
        if entry is not None:
            entry.holder.pop(id(entry), None)
