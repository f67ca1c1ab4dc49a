"""Ports `StringLookup` of a list of words, in input pipelines: a dictionary.

The layer of Keras needs TensorFlow. Words get the same indices: those of the list count
from 1, others get 0.
"""

import libcst as cst

from replicax.migrate.arguments import bound
from replicax.migrate.names import dotted
from replicax.migrate.script import Script, Unported

__all__ = ["plan_lookups"]

_PATHS = (
    "keras.layers.StringLookup",
    "keras.layers.experimental.preprocessing.StringLookup",
)
_PARAMETERS = ("max_tokens", "num_oov_indices", "mask_token", "oov_token", "vocabulary")
_USUAL = {"max_tokens": "None", "num_oov_indices": "1", "mask_token": "None"}
_LISTS = ("list", "sorted")


def plan_lookups(script: Script) -> None:
    """Plan the port of the layers that only functions of pipelines call."""
    for made in script.calls:
        if script.called(made) in _PATHS:
            try:
                _plan(script, made)
            except Unported:
                continue  # The layer's name is reported.


def _plan(script: Script, made: cst.Call) -> None:
    """Plan the port of one layer.

    Raises:
        Unported: If its words, or what it is used for, are not in sight.
    """
    given = bound(made.args, _PARAMETERS)
    words = given.pop("vocabulary", None)
    if words is None or not _is_list(script, words.value):
        raise Unported("its words are not in sight")
    if any(_USUAL.get(k) != script.code(arg.value) for k, arg in given.items()):
        raise Unported("it has other indices")
    assign = script.parent(made)
    target = assign.targets[0].target if isinstance(assign, cst.Assign) else None
    definition = script.flow.defined(target) if isinstance(target, cst.Name) else None
    uses = script.flow.uses(definition) if definition is not None else []
    calls = [_call(script, use) for use in uses if definition is not None]
    if not calls or any(script.flow.reaching(u) != {definition} for u in uses):
        raise Unported("its uses are not in sight")
    for use, call in zip(uses, calls, strict=True):
        _plan_call(script, script.code(use), call)
    script.frozen.add(made.func)
    script.replacements[made] = lambda updated: _dictionary(script, updated)


def _is_list(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is a list; a text would be a file's name."""
    value = script.flow.value(node) or node
    is_made = isinstance(value, cst.Call) and dotted(value.func) in _LISTS
    return is_made or isinstance(value, cst.List | cst.Tuple | cst.ListComp)


def _call(script: Script, use: cst.CSTNode) -> cst.Call:
    """The call of a layer in a function that runs in a pipeline."""
    call = script.parent(use)
    in_pipeline = any(each in script.host_functions for each in script.parents(use))
    is_named_so = script.code(use) == "word"  # As the argument in the port.
    if not isinstance(call, cst.Call) or not in_pipeline or is_named_so:
        raise Unported("it is used outside of a pipeline")
    if call.func is not use or len(call.args) != 1:
        raise Unported("it is not called with words alone")
    return call


def _plan_call(script: Script, name: str, call: cst.Call) -> None:
    """Plan `lookup(x)` as the indices of an array of words."""
    vectorize = script.code(script.expression("np.vectorize"))
    array = script.code(script.expression("np.asarray"))
    kind, text = script.string("int64").value, script.string("str").value
    function = f"{vectorize}(lambda word: {name}.get(word, 0), otypes=[{kind}])"

    def indices(updated: cst.Call) -> cst.BaseExpression:
        words = script.code(updated.args[0].value)
        return cst.parse_expression(f"{function}({array}({words}, {text}))")

    script.replacements[call] = indices


def _dictionary(script: Script, updated: cst.Call) -> cst.BaseExpression:
    """The indices by word."""
    words = bound(updated.args, _PARAMETERS)["vocabulary"]
    text = script.code(words.value)
    return cst.parse_expression(
        f"{{word: index for index, word in enumerate({text}, 1)}}"
    )
