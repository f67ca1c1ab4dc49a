"""Reads `tables.toml`, which has the port of each name of TensorFlow.

A path is a name without `tensorflow.`; a target is the name that replaces it:
`find_target("math.abs")` is `"keras.ops.abs"`.
"""

import fnmatch
import functools
import importlib
import inspect
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """A row of the tables: the port of calls of one TensorFlow function.

    Attributes:
        target: The function to call instead, such as `"keras.ops.sum"`.
        parameters: Maps the parameters of the TensorFlow function, in order, to those
            of the target. `-` drops an argument; `!` refuses values other than None
            and False; `*` before a name passes the argument by keyword.
        defaults: Maps parameters of the target to code, which the port passes where
            the call has no such argument.
        forms: Maps parameters of the TensorFlow function to conversions in `rules`.
    """

    target: str
    parameters: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)


def _lists(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(text.split()) for key, text in table.items()}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Invert rows `value = names` to one entry for each name."""
    return {
        name: _with_last_part(value, name) if value.endswith(".*") else value
        for value, names in table.items()
        for name in names.split()
    }


def _with_last_part(target: str, name: str) -> str:
    """`keras.ops.abs` for `keras.ops.*` and `math.abs`."""
    return target.replace("*", name.rpartition(".")[2].removeprefix("reduce_"))


def _products(table: Mapping[str, str]) -> list[str]:
    modules, names = table["modules"].split(), table["names"].split()
    return [f"{module}.{name}" for module in modules for name in names]


def _arguments(table: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """Parse rows `position name = paths` to tuples of path, position and name."""
    rows = ((*key.split(), paths.split()) for key, paths in table.items())
    return [(path, int(index), name) for index, name, paths in rows for path in paths]


def _operators(rows: Iterable[str]) -> dict[str, Operator]:
    """Parse rows `paths | parameters | target | its parameters` to a dict of paths."""
    table: dict[str, Operator] = {}
    for row in rows:
        names, parameters, target, targets, *defaults = map(str.strip, row.split("|"))
        pairs = dict(zip(parameters.split(), targets.split(), strict=True))
        parameters_of = {k: text.partition(":")[0] for k, text in pairs.items()}
        defaults_of = dict(text.split("=") for text in defaults)
        forms = {k: v.partition(":")[2] for k, v in pairs.items() if ":" in v}
        for name in names.split():
            table[name] = Operator(
                target=_with_last_part(target, name),
                parameters=parameters_of,
                defaults=defaults_of,
                forms=forms,
            )
    return table


def _templates(rows: Iterable[str]) -> dict[str, tuple[list[str], str]]:
    """Parse rows `names | parameters | template` to a dict of names."""
    return {
        name: (parameters.split(), text.strip())
        for names, parameters, text in (row.split("|") for row in rows)
        for name in names.split()
    }


_FILE = resources.files("replicax_migrate").joinpath("tables.toml")
_DATA = tomllib.loads(_FILE.read_text("utf-8"))

# Comments in `tables.toml` describe the rows of each table.

ALIASES: dict[str, str] = _DATA["aliases"]
OLD_PREFIXES: dict[str, str] = _DATA["old_prefixes"]
EXACT = _by_name(_DATA["targets"])
"""Targets of single names, by path."""
PREFIXES: dict[str, str] = _DATA["prefixes"]
NOTES = _by_name(_DATA["notes"])
DROPPED = _by_name(_DATA["dropped"])
_STAYING = _by_name(_DATA["need_tensorflow"])
NEED_TENSORFLOW = frozenset(_STAYING)
"""Paths of parts of Keras 3 that need TensorFlow on every backend."""
_REASONS = {**_by_name(_DATA["reasons"]), **_STAYING}
_FOREIGN = _by_name(_DATA["foreign"])
"""Maps patterns of full names to the reason why their imports stay."""
DEVICE_OPERATORS = _operators(_DATA["operators"]["device"])
CALL_OPERATORS = _operators(_DATA["operators"]["calls"])
HOST_OPERATORS = _operators(_DATA["operators"]["host"])
TEMPLATES = _templates(_DATA["operators"]["templates"])
"""Maps paths to parameters and a template, with `{x}` for the parameter `x`."""
ARGUMENTS = _lists(_DATA["arguments"])
KEYWORDS = {
    table: {
        name: (row, "") if isinstance(row, str) else (str(row[0]), str(row[1]))
        for names, row in rows.items()
        for name in names.split()
    }
    for table, rows in _DATA["keywords"].items()
}
"""Maps a function or method and a keyword to an action and its reason."""
OLD_KEYWORDS: dict[str, str] = _DATA["old_keywords"]
OLD_ORDERS = {k: v.split() for k, v in _by_name(_DATA["old_orders"]).items()}
"""Maps paths to parameters in the order of TensorFlow 1."""
UNRESHAPED_METRICS: dict[str, str] = _DATA["unreshaped_metrics"]
IDENTIFIERS: dict[str, dict[str, str]] = _DATA["identifiers"]
NAMES = _lists(_DATA["names"])
MISSING_IN_STREAMS: dict[str, str] = _DATA["missing_in_streams"]
ORDERS = {k: v.split() for k, v in _by_name(_DATA["orders"]).items()}
"""Maps paths to parameters that Keras 3 has moved; `"-"` at unchanged positions."""
CALL_ORDERS = _lists(_DATA["call_orders"])
MESSAGES: dict[str, str] = _DATA["messages"]
CHANGED_DEFAULTS = _arguments(_DATA["changed_defaults"])
"""Arguments whose defaults Keras 3 changed, as tuples of path, position and name."""

READERS = _products(_DATA["readers"])
"""Paths of Keras' functions that read batches, with Grain if `format="grain"`."""
OPTIMIZERS = _products(_DATA["optimizers"])
"""Paths of the classes of optimizers."""
OVERRIDDEN = {kind: _by_name(table) for kind, table in _DATA["overridden"].items()}
RENAMED_METHODS: dict[str, str] = _DATA["methods"]["renamed"]
METHOD_TEMPLATES = _templates(_DATA["methods"]["templates"])
KINDS: dict[str, str] = _DATA["kinds"]
_FACTORIES = _by_name(_DATA["factories"])
_NOTHING = object()


def is_dotted(target: str) -> bool:
    """Whether a target is a name in a module, such as `keras.ops.sum`."""
    return target.partition(".")[0] in ALIASES


def is_module(path: str) -> bool:
    """Whether a path is a module of TensorFlow with names in the tables."""
    names = itertools.chain(EXACT, PREFIXES, DEVICE_OPERATORS, _REASONS)
    return path in PREFIXES or any(name.startswith(f"{path}.") for name in names)


def is_module_of_keras(target: str) -> bool:
    """Whether a dotted target is a module of Keras 3."""
    is_in_keras = target.partition(".")[0] == "keras" and exists(target)
    return is_in_keras and inspect.ismodule(_resolved(target))


@functools.cache
def exists(target: str) -> bool:
    """Whether a dotted target such as `"keras.layers.Dense"` exists and is public."""
    return _resolved(target) is not _NOTHING


def _resolved(target: str) -> Any:
    """The value of a target; None for a field, `_NOTHING` for an unknown name."""
    root, *parts = target.split(".")
    value: Any = importlib.import_module(ALIASES[root])
    for i, part in enumerate(parts):
        if part not in getattr(value, "__all__", [part]):
            return _NOTHING
        if not hasattr(value, part):
            try:  # The part may be a submodule that Python has not imported.
                importlib.import_module(f"{value.__name__}.{part}")
            except (AttributeError, ImportError):
                fields = getattr(value, "__annotations__", ()) if i > 0 else ()
                return None if part == parts[-1] and part in fields else _NOTHING
        value = getattr(value, part)
    return value


@functools.cache
def kind_of_target(target: str) -> str | None:
    """The kind of object that a call of a target returns, such as `"model"`."""
    if target in _FACTORIES:
        return _FACTORIES[target]
    name = target.rpartition(".")[2]
    if target.startswith("keras.applications.") and name[0].isupper():
        return "model"
    value = _resolved(target) if target.startswith("keras.") else _NOTHING
    if not inspect.isclass(value):
        return None
    bases = ((kind, _resolved(base)) for kind, base in KINDS.items())
    return next((kind for kind, base in bases if issubclass(value, base)), None)


@functools.cache
def find_target(path: str | None) -> str | None:
    """The target of a path: a dotted name or a literal; None if it has no target.

    Example:
        >>> find_target("distribute.MirroredStrategy"), find_target("float32")
        ('rx.MirroredStrategy', '"float32"')
    """
    if path is None or path in NEED_TENSORFLOW:
        return None
    if path in EXACT:
        return EXACT[path]
    if path.removeprefix("dtypes.") in NAMES["dtypes"]:
        return f'"{path.removeprefix("dtypes.")}"'
    dtype, _, limit = path.removeprefix("dtypes.").rpartition(".")
    if dtype in NAMES["limited_dtypes"] and limit in {"max", "min"}:
        info = "finfo" if dtype.startswith("float") else "iinfo"
        return f'np.{info}("{dtype}").{limit}'
    if path in DEVICE_OPERATORS:
        return DEVICE_OPERATORS[path].target
    if path.startswith(("flags.FLAGS.", "app.flags.FLAGS.")):
        return f"absl.flags.{path[path.index('FLAGS') :]}"  # A flag of the script.
    return _by_prefix(path)


def _by_prefix(path: str) -> str | None:
    for prefix, rest in _prefixes(path):
        home = PREFIXES.get(prefix) or EXACT.get(prefix, "")
        target = ".".join(filter(None, [home, rest]))
        if is_dotted(home) and exists(target):
            return target
    return None


def is_known(path: str) -> bool:
    """Whether a path has a target, a template, or a row with a reason."""
    tables = (TEMPLATES, CALL_OPERATORS, DROPPED, _REASONS)
    return any(path in table for table in tables) or find_target(path) is not None


def find_reason(path: str) -> str:
    """Why a path has no target, and what to do instead."""
    if not path:
        return "the module `tensorflow` is a value here: port it by hand"
    for prefix, _ in _prefixes(path):
        if reason := _REASONS.get(prefix):
            is_predicate = reason.split()[0] in {"is", "has", "stays", "depends"}
            return f"tf.{path} {reason if is_predicate else f'stays: {reason}'}"
    return f"tf.{path} has no counterpart"


def foreign_problem(name: str) -> str:
    """Why an imported name needs TensorFlow, and stays; `""` for other names."""
    prefixes = [prefix for prefix, _ in _prefixes(name)][::-1]
    for pattern, why in _FOREIGN.items():
        if matches := fnmatch.filter(prefixes, pattern):
            return f"{matches[0]} {why}" if why else ""
    return ""


def _prefixes(path: str) -> Iterator[tuple[str, str]]:
    """Pairs of a prefix of a path and the rest of the path, longest prefix first."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        yield ".".join(parts[:n]), ".".join(parts[n:])
