"""Ports what names the outputs of models, which a class of the script does not name.

Keras 2 calls the outputs of such a model `output_1`, `output_2`. Keras 3 takes losses,
metrics and labels by their place there.
"""

import re

import libcst as cst

from replicax_migrate.kinds import is_class_of, makers, own_methods
from replicax_migrate.origins import returned_by
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import MESSAGES, NAMES
from replicax_migrate.tree import (
    named,
    object_of,
    pairs_of,
    parts_of,
    text_of,
    value_of,
)

__all__ = ["outputs_of", "plan_outputs"]

_OUTPUT = re.compile(r"output_(\d+)")


def outputs_of(script: Script, call: cst.Call) -> Expression | None:
    """The outputs of the model whose method is called, as one display shows them."""
    model = object_of(call)
    made = script.flow.resolved(model)
    if isinstance(made, cst.Call) and script.called(made) in NAMES["models"]:
        return script.flow.resolved(value_of(made, 1, "outputs"))
    owners = [o for o in makers(script, model) if isinstance(o, cst.ClassDef)]
    return _returned(script, owners)


def _returned(script: Script, owners: list[cst.ClassDef]) -> Expression | None:
    """The first of the displays that the `call` of all models of some classes returns.

    None if they differ in the number of their elements, or are none.
    """
    calls = [m for each in owners for m in own_methods(script, each, "call")]
    values = [script.flow.resolved(v) for m in calls for v in returned_by(script, m)]
    sizes = {len(parts_of(each) or pairs_of(each)) for each in values}
    return values[0] if len(sizes) == 1 else None


def plan_outputs(script: Script) -> None:
    """Plan lists for dicts of `output_1` and others; report other uses of the names."""
    names = {text_of(named(call, "name")) for call in script.calls}
    if any(map(_OUTPUT.fullmatch, names)):
        return  # Layers of the script have these names.
    classes = [*script.nodes(cst.ClassDef)]
    owners = [each for each in classes if is_class_of(script, each, ("model",))]
    shown = _returned(script, owners)
    planned: set[cst.CSTNode] = set()
    for node in script.nodes(cst.Dict):
        places = [_OUTPUT.fullmatch(text_of(each.key)) for each in pairs_of(node)]
        if places and all(places) and owners:
            most = max(int(place[1]) for place in places if place)
            number = max(len(parts_of(shown)) or 1, most)
            _plan_dict(script, node, number)
            planned |= {each.key for each in pairs_of(node)}
    for node in script.nodes(cst.SimpleString) if owners else ():
        if node not in planned and re.search(r"^(val_)?output_\d+", text_of(node)):
            script.leave(node, MESSAGES["output_name"])


def _plan_dict(script: Script, node: cst.Dict, number: int) -> None:
    """Plan the values of a dict by their places; in an example they are a tuple."""
    is_part = isinstance(script.parent(node), cst.Element)

    def replacement(updated: cst.Dict) -> Expression:
        found = {text_of(each.key): each.value for each in pairs_of(updated)}
        keys = [f"output_{i + 1}" for i in range(number)]
        values = [found.get(key, cst.Name("None")) for key in keys]
        if number == 1:
            return values[0]
        made = [cst.Element(value) for value in values]
        brackets = {"lpar": [cst.LeftParen()], "rpar": [cst.RightParen()]}
        return cst.Tuple(made, **brackets) if is_part else cst.List(made)

    script.replacements[node] = replacement
