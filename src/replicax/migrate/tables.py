"""Reads the tables of names in `tables.toml`: what `tf.X` is here, or why it stays."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources

__all__ = [
    "ALIASES",
    "ATTRIBUTES",
    "DEVICE_OPERATORS",
    "DROPPED",
    "DTYPES",
    "EXACT",
    "FOREIGN",
    "HOST_OPERATORS",
    "LEFT_METHODS",
    "NEED_TENSORFLOW",
    "NOTES",
    "OLD_PREFIXES",
    "PREFIXES",
    "REASONS",
    "RENAMED_METHODS",
    "Operator",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What a function of TensorFlow is called elsewhere.

    Attributes:
        target: Its dotted name, such as `"keras.ops.sum"`.
        parameters: TF's parameters in their order, each with the target's, or `-`/`!`.
        defaults: Defaults of TF's that the target does not have, as source text.
    """

    target: str
    parameters: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)


def _texts(table: object) -> dict[str, str]:
    """A table whose values are texts."""
    assert isinstance(table, Mapping)
    return {str(key): str(value) for key, value in table.items()}


def _by_name(table: object) -> dict[str, str]:
    """A table of names by what they have in common, as one by name."""
    return {name: key for key, names in _texts(table).items() for name in names.split()}


def _operators(rows: Iterable[str]) -> dict[str, Operator]:
    """Operators by the names in rows `names | parameters | target | its parameters`."""
    table: dict[str, Operator] = {}
    for row in rows:
        names, parameters, target, targets, *defaults = map(str.strip, row.split("|"))
        pairs = zip(parameters.split(), targets.split(), strict=True)
        written = dict(text.split("=") for text in defaults)
        operator = Operator(target=target, parameters=dict(pairs), defaults=written)
        table |= dict.fromkeys(names.split(), operator)
    return table


_FILE = resources.files("replicax.migrate").joinpath("tables.toml")
_DATA = tomllib.loads(_FILE.read_text("utf-8"))

ALIASES = _texts(_DATA["aliases"])
"""The name under which a target begins, and the module that has it."""
OLD_PREFIXES = _texts(_DATA["old_prefixes"])
"""Where names stood before."""
DTYPES = frozenset(_DATA["dtypes"].split())
EXACT = _by_name(_DATA["targets"])
"""Names one by one."""
PREFIXES = _texts(_DATA["prefixes"])
"""Modules whose names all keep their last part; ported where the target has the name.

The longest that fits counts.
"""
NOTES = _by_name(_DATA["notes"])
"""What is ported and behaves differently."""
DROPPED = _by_name(_DATA["dropped"])
"""Calls that stand alone as a statement and are taken out, and why."""
_STAYING = _by_name(_DATA["need_tensorflow"])
NEED_TENSORFLOW = frozenset(_STAYING)
"""What Keras has on all backends, and makes with TensorFlow."""
REASONS = {**_by_name(_DATA["reasons"]), **_STAYING}
"""Why a name stays, by the longest path that fits, and what to do instead."""
FOREIGN = _texts(_DATA["foreign"])
"""Packages that stay, and why."""
DEVICE_OPERATORS = _operators(_DATA["operators"]["device"])
"""What runs on devices: path under `tensorflow` to an operation of Keras."""
HOST_OPERATORS = _operators(_DATA["operators"]["host"])
"""What runs in an input pipeline: path under `tensorflow` to a function of NumPy."""
ATTRIBUTES = {kind: _texts(table) for kind, table in _DATA["attributes"].items()}
"""Attributes of objects that stay, by kind and name, and what to do instead.

An optimizer's without a reason are other names of `learning_rate`.
"""
RENAMED_METHODS = _texts(_DATA["methods"]["renamed"])
LEFT_METHODS = _texts(_DATA["methods"]["left"])
"""Methods that stay, and what to do instead."""
