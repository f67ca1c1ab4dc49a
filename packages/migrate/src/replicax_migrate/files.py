"""Adds the suffixes that Keras 3 requires to file names of models and weights.

`model.save("m")` becomes `model.save("m.keras")`. A name changes only if all its
possible endings are literals without other uses. Keras raises an error for others.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.kinds import is_kind
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import NAMES
from replicax_migrate.tree import (
    arg_value,
    dotted_name,
    is_name,
    kwarg_value,
    last_name,
    method_name,
    object_of,
    reachable,
    string_of,
)
from replicax_migrate.values import direct_values

__all__ = ["plan_files"]

_MODEL_SUFFIXES = (".keras", ".h5")
"""Suffixes of files of whole models."""
_WEIGHT_SUFFIXES = (".weights.h5",)
"""Suffixes of files of weights."""
_FileName: TypeAlias = tuple[Expression, tuple[str, ...]]
"""A file name in a call, and its possible suffixes; empty for a call that reads."""


def plan_files(script: Script) -> Edits:
    """Plan suffixes for literals that only name files of models and weights."""
    edits = Edits()
    names = list(_file_names(script))
    name_nodes = {node for name, _ in names for node in _endings(script, name)}
    groups = defaultdict[str, list[tuple[cst.SimpleString, tuple[str, ...]]]](list)
    for name, suffixes in names:
        if _has_no_other_use(script, name, name_nodes):
            for literal in _literals(_endings(script, name)):
                groups[string_of(literal)].append((literal, suffixes))
    literals = {literal for group in groups.values() for literal, _ in group}
    others = [string_of(n) for n in script.nodes(cst.SimpleString) if n not in literals]
    for text, group in groups.items():
        suffixes_of_writers = {suffixes for _, suffixes in group if suffixes}
        # Another literal such as `cp.index` may also name the file.
        has_other_names = any(other.startswith(text.rstrip("/")) for other in others)
        if len(suffixes_of_writers) != 1 or has_other_names:
            continue
        (suffixes,) = suffixes_of_writers
        if not text.endswith(suffixes):
            for literal in {literal for literal, _ in group}:
                _plan_suffix(script, edits, literal, suffixes[0])
    return edits


def _file_names(script: Script) -> Iterator[_FileName]:
    for call in script.calls:
        path, method = script.called_path(call), method_name(call)
        position, suffixes = 0, None
        if path == "keras.callbacks.ModelCheckpoint":
            is_weights = is_name(kwarg_value(call, "save_weights_only"), "True")
            suffixes = _WEIGHT_SUFFIXES if is_weights else _MODEL_SUFFIXES
        elif path == "keras.models.save_model":
            position, suffixes = 1, _MODEL_SUFFIXES
        elif path == "keras.models.load_model" or method == "load_weights":
            suffixes = ()
        elif method == "save_weights":
            suffixes = _WEIGHT_SUFFIXES
        elif (
            method == "save" and not path and is_kind(script, object_of(call), "model")
        ):
            suffixes = _MODEL_SUFFIXES
        name = arg_value(call, position, "filepath")
        if suffixes is not None and name is not None:
            yield name, suffixes


def _endings(script: Script, name: Expression) -> list[Expression]:
    """A file name, and the expressions with whose text it may end."""

    def direct_endings(node: Expression) -> list[Expression]:
        if not isinstance(node, cst.Call):
            return direct_values(script, node)
        if dotted_name(node.func) in NAMES["keeping_the_end"]:
            return [arg.value for arg in node.args[-1:]]
        values = direct_values(script, node)
        return [_ending_of_call(script, node, value) for value in values]

    return list(reachable([name], direct_endings))


def _ending_of_call(script: Script, call: cst.Call, value: Expression) -> Expression:
    """The argument with whose text the returned `value` ends; `value` if there is none.

    For `in_folder("m")` and `return os.path.join(folder, name)`, it is `"m"`.
    """
    ends = set(_endings(script, value))
    for function in script.functions(last_name(call.func)):
        for position, param in enumerate(function.params.params):
            definition = script.flow.definition_of(param.name)
            uses = script.flow.uses(definition) if definition is not None else []
            if not ends.isdisjoint(uses):
                return arg_value(call, position, param.name.value) or value
    return value


def _literals(nodes: list[Expression]) -> list[cst.SimpleString]:
    """The literals among nodes; empty if one of the nodes has an unknown text."""
    unknown = (cst.FormattedString, cst.BinaryOperation, cst.Subscript)
    if any(isinstance(node, unknown) for node in nodes):
        return []
    return [node for node in nodes if isinstance(node, cst.SimpleString)]


def _has_no_other_use(
    script: Script, name: Expression, name_nodes: set[Expression]
) -> bool:
    """Whether the variables in a file name have no uses outside of file names."""
    endings = _endings(script, name)
    definitions = [d for node in endings for d in script.flow.reaching(node)]
    uses = {use for definition in definitions for use in script.flow.uses(definition)}
    return all(use in name_nodes or _is_harmless(script, use) for use in uses)


def _is_harmless(script: Script, use: cst.CSTNode) -> bool:
    """Whether a use prints a file name, or reads its folder or last part."""
    call = script.call_of_arg(use)
    name = dotted_name(call.func) if call is not None else None
    return name in {"print", "os.path.basename", "os.path.dirname"}


def _plan_suffix(
    script: Script, edits: Edits, literal: cst.SimpleString, suffix: str
) -> None:
    stem = literal.raw_value.rstrip("/")
    if suffix in _WEIGHT_SUFFIXES:
        stem = stem.removesuffix(".h5")
    elif stem.endswith(".hdf5"):  # Keras 3 accepts the format only as `.h5`.
        stem, suffix = stem.removesuffix(".hdf5"), ".h5"
    text = f"{literal.prefix}{literal.quote}{stem}{suffix}{literal.quote}"
    script.note(literal, f"Keras 3 requires a name that ends with {suffix}: {text}")
    edits.replacements[literal] = lambda updated: cst.SimpleString(text)
