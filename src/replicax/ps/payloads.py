"""Serializes closures: names of functions, arguments, results and errors as JSON.

Code is never sent. An argument may stand for a value that each worker creates for
itself (`PerWorkerValues`), or for the result of another closure (`RemoteValue`).
"""

import builtins
import functools
import json
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import keras
import numpy as np

from replicax import errors
from replicax._util import json_codec
from replicax._util.json_codec import MARK, is_number
from replicax._util.signatures import positional_count
from replicax._util.types import JSON, JSONObject, PyTree
from replicax.engine.cache import function_key, static_key
from replicax.engine.values import PerReplica
from replicax.errors import ClusterMismatchError
from replicax.input import InputContext
from replicax.ps.closures import Outcome

__all__ = [
    "MAX_BYTES",
    "ClosureCancelledError",
    "ClosureError",
    "FunctionNames",
    "PerWorkerSources",
    "PerWorkerValues",
    "RemoteValue",
    "because_of",
    "dataset_maker",
    "decode",
    "encode",
    "error_from_json",
    "error_of",
    "error_to_json",
    "require_size",
]


MAX_BYTES = 3 * 2**20
"""Bytes of a closure's arguments, or of its result, as JSON."""

_MAX_LENGTH = 200
_KEPT_VALUES = 16


def encode(
    value: PyTree,
    what: str,
    mark: Callable[[PyTree], JSONObject | None] = lambda value: None,
) -> JSON:
    """Encode a value as JSON: the types of `json_codec`, variables, `PerReplica`.

    `what` names the value in errors. `mark` encodes values of other types; it returns
    None for types that it does not know. A value of an unknown type raises a
    `TypeError` that names the value's place.
    """

    def extend(value: PyTree, what: str) -> JSON:
        marked = mark(value)
        if marked is not None:
            return {MARK: "mark", **marked}
        if isinstance(value, keras.Variable):
            return json_codec.encode(value.value, what)
        if isinstance(value, PerReplica):
            array = json_codec.encode(value.array, what)
            return {MARK: "replicas", "v": array, "n": value.num_active}
        if isinstance(value, np.ndarray | np.generic) and not is_number(value.dtype):
            raise TypeError(f"{what} is an array of dtype {value.dtype}")
        return None

    try:
        return json_codec.encode(value, what, extend)
    except TypeError as error:
        raise TypeError(
            f"ClusterCoordinator: {error}, which cannot be sent to another task; "
            "numbers, texts, arrays, and lists, tuples and dicts of them can. Let the "
            "function close over it: the script is the same in every task."
        ) from error


def decode(sent: Any, resolve: Callable[[JSONObject], PyTree] | None = None) -> PyTree:
    """Decode the result of `encode`; `resolve` decodes what `mark` encoded."""

    def extend(sent: JSONObject) -> PyTree:
        if sent[MARK] == "mark" and resolve is not None:
            return resolve(sent)
        if sent[MARK] == "replicas":
            return PerReplica(json_codec.decode(sent["v"]), sent["n"])
        raise ValueError(f"not a value of a closure: {repr(sent)[:80]}")

    return json_codec.decode(sent, extend)


def require_size(sent: JSON, what: str) -> None:
    """Raise a `ValueError` if the JSON text is longer than `MAX_BYTES`."""
    size = len(json.dumps(sent))
    if size > MAX_BYTES:
        raise ValueError(
            f"ClusterCoordinator: {what} has {size:,} bytes as text; at most "
            f"{MAX_BYTES:,} are sent. Closures are for small results: save large ones "
            "to a file, and let the function close over large inputs."
        )


class FunctionNames:
    """The functions that a script has scheduled.

    A function's name is its module and qualified name. The second and later functions
    of the same name also get a number, in the order of their first use. So a function
    has the same name in every task of the script.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._functions: dict[str, Callable[..., PyTree]] = {}
        self._used: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All names."""
        return list(self._functions)

    def __getitem__(self, name: str) -> Callable[..., PyTree]:
        return self._functions[name]

    def register(self, fn: Callable[..., PyTree]) -> str:
        """Return a function's name, after adding the function if it is new."""
        if not callable(fn):
            raise TypeError(
                f"ClusterCoordinator.schedule: fn must be a function; got {fn!r}."
            )
        key = _key(fn)
        if key not in self._names:
            self._names[key] = self._add(fn)
        return self._names[key]

    def _add(self, fn: Callable[..., PyTree]) -> str:
        plain = _qualified_name(fn)
        number = self._used.get(plain, 0)
        self._used[plain] = number + 1
        name = plain if number == 0 else f"{plain} ({number + 1})"
        self._functions[name] = fn
        return name


def _key(fn: Callable[..., PyTree]) -> Hashable:
    if isinstance(fn, functools.partial):
        bound = (*fn.args, *fn.keywords.values())
        return (_key(fn.func), tuple(fn.keywords), tuple(map(static_key, bound)))
    # Without globals, which may differ between tasks when `schedule` is called.
    return function_key(fn, with_globals=False)


def _qualified_name(fn: Callable[..., PyTree]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"[-_MAX_LENGTH:]


class PerWorkerValues:
    """A value that each worker creates for itself, such as a dataset.

    `ClusterCoordinator.create_per_worker_dataset` returns a `PerWorkerValues`. As an
    argument of `schedule` it stands for the value of the worker that runs the closure.
    `iter` of such a dataset returns another `PerWorkerValues`: each worker's iterator.
    (TF: `tf.distribute.experimental.coordinator.PerWorkerValues`.)

    Raises:
        TypeError: For `next` of such an iterator outside of a closure.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.ParameterServerStrategy()  # doctest: +SKIP
        >>> coordinator = rx.ClusterCoordinator(strategy)  # doctest: +SKIP
        >>> def dataset_fn(context):
        ...     first, step = context.input_pipeline_id, context.num_input_pipelines
        ...     return range(first, 1000, step)
        >>> create = coordinator.create_per_worker_dataset  # doctest: +SKIP
        >>> iterator = iter(create(dataset_fn))  # doctest: +SKIP
        >>> value = coordinator.schedule(next, (iterator,))  # doctest: +SKIP
    """

    def __init__(
        self, sources: "PerWorkerSources", make: Callable[[], PyTree], what: str
    ) -> None:
        self._sources = sources
        self._make = make
        self._what = what
        self._values: list[PyTree] = []
        self.per_worker_number = sources.add(self)

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._what})"

    def __iter__(self) -> "Iterator[PyTree]":
        # Lazy: each worker creates its iterator when a closure first uses it.
        return PerWorkerIterator(
            self._sources, lambda: iter(self.own()), f"iter of {self._what}"
        )

    def own(self) -> PyTree:
        """This worker's value, created on first use."""
        if not self._values:
            self._values.append(self._make())
        return self._values[0]


class PerWorkerIterator(PerWorkerValues):
    """Each worker's iterator."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> PyTree:
        raise TypeError(
            f"next({self!r}): each worker has an iterator of its own. Pass this one to "
            "coordinator.schedule(fn, args=(iterator,)), and call next in fn."
        )


class PerWorkerSources:
    """The per-worker values of a script, with the same numbers in all tasks."""

    def __init__(self) -> None:
        self._number = 0
        # Iterators own threads and batches, so only the newest ones are kept.
        self._newest: deque[PerWorkerValues] = deque(maxlen=_KEPT_VALUES)
        self._all: weakref.WeakValueDictionary[int, PerWorkerValues] = (
            weakref.WeakValueDictionary()
        )

    def add(self, value: PerWorkerValues) -> int:
        """Add a value; return its number."""
        number = self._number
        self._number += 1
        self._newest.append(value)
        self._all[number] = value
        return number

    def own(self, number: int) -> PyTree:
        """This worker's value of that number."""
        value = self._all.get(number)
        if value is None:
            raise ClusterMismatchError(
                f"ClusterCoordinator: a closure needs the per-worker value {number}; "
                f"this task's script has created {self._number}, and keeps the newest "
                f"{_KEPT_VALUES} and those in use. Create the same per-worker datasets "
                "and iterators in every task, before closures that use them."
            )
        return value.own()


class RemoteValue:
    """The result of a scheduled function. `ClusterCoordinator.schedule` returns it.

    As an argument of another `schedule` it stands for the result. (TF:
    `tf.distribute.experimental.coordinator.RemoteValue`.)

    Example:
        >>> import replicax as rx
        >>> strategy = rx.ParameterServerStrategy()  # doctest: +SKIP
        >>> coordinator = rx.ClusterCoordinator(strategy)  # doctest: +SKIP
        >>> three = coordinator.schedule(sum, ([1, 2],))  # doctest: +SKIP
        >>> coordinator.schedule(pow, (three, 2)).fetch()  # doctest: +SKIP
        9
    """

    def __init__(
        self, fetch: Callable[["RemoteValue"], PyTree], id: str | None = None
    ) -> None:
        self.id = id  # None in tasks other than the chief.
        self.outcome: Outcome | None = None  # On the chief, once known.
        self.num_users = 0  # Unfinished closures that have this value as an argument.
        self._fetch = fetch

    def fetch(self) -> PyTree:
        """Wait for the result and return it, like `coordinator.fetch(self)`.

        Raises:
            Exception: The error that the function raised, if any.
            ClosureCancelledError: If another function's error has cancelled this one.
        """
        return self._fetch(self)

    def get(self) -> PyTree:
        """The same as `fetch`."""
        return self._fetch(self)


def dataset_maker(
    dataset_or_fn: PyTree, context: Callable[[], InputContext]
) -> Callable[[], PyTree]:
    """Return a function that returns a worker's dataset."""
    if not callable(dataset_or_fn):
        return lambda: dataset_or_fn
    if positional_count(dataset_or_fn, 0) == 1:
        return lambda: dataset_or_fn(context())
    return dataset_or_fn


class ClosureError(RuntimeError):
    """A closure has raised an error of a type that cannot be restored here."""


class ClosureCancelledError(ClosureError):
    """A closure was cancelled because an earlier closure has raised an error."""


def error_to_json(
    error: BaseException, function: str, worker: str, caller: str
) -> dict[str, str]:
    """Encode an error: its type, message and traceback.

    The first frames, which are in the file `caller`, are left out.
    """
    shown = traceback.TracebackException.from_exception(error)
    while shown.stack and shown.stack[0].filename == caller:
        del shown.stack[0]
    return {
        "type": type(error).__qualname__,
        "message": str(error),
        "traceback": f"In {function} on {worker}:\n{''.join(shown.format())}",
    }


def error_from_json(error: dict[str, str]) -> Exception:
    """Decode an error; its type is kept if Python or replicax defines the type."""
    decoded = _to_exception(error)
    if error["traceback"]:
        decoded.add_note(error["traceback"].rstrip())
    return decoded


def _to_exception(error: dict[str, str]) -> Exception:
    name, message = error["type"], error["message"]
    if name == ClosureCancelledError.__name__:
        return ClosureCancelledError(message)
    if name == "StopIteration":
        # A StopIteration would silently end an iterator, such as `map(fetch, values)`.
        return ClosureError(
            f"StopIteration: {message or 'an iterator is at its end'}. Let datasets of "
            "closures repeat, and decide by the number of steps when to stop."
        )
    kind = getattr(builtins, name, None) or getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # Such as UnicodeDecodeError, which needs five arguments.
            pass
    return ClosureError(f"{name}: {message}")


def error_of(kind: str, message: str) -> dict[str, str]:
    """The JSON form of an error without an exception."""
    return {"type": kind, "message": message, "traceback": ""}


def because_of(
    error: dict[str, str], message: str, cause: dict[str, str]
) -> dict[str, str]:
    """Add a cause to an error in JSON form; the message names the cause."""
    return error | {
        "message": f"{message}: {cause['type']}: {cause['message']}",
        "traceback": f"{error['traceback']}\n{cause['traceback']}".lstrip(),
    }
