"""Ports `StringLookup` layers with a list of words, which host functions call.

The layer becomes a dictionary with the same indices: 1, 2, ... for the words of the
list, 0 for other words. `lookup(x)` becomes a lookup of each word in `x`.
"""

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.rules import bind_args
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import NAMES
from replicax_migrate.tree import is_name

__all__ = ["plan_lookups"]

_PARAMETERS = ["max_tokens", "num_oov_indices", "mask_token", "oov_token", "vocabulary"]
_SUPPORTED = {
    "max_tokens": ["None"],
    "mask_token": ["None"],
    "num_oov_indices": ["0", "1"],
}
"""Maps parameters to the code of the values that leave the indices as they are."""


def plan_lookups(script: Script) -> Edits:
    """Plan the port of `StringLookup` layers that only host functions call."""
    edits = Edits()
    for call in script.calls:
        if script.called_path(call) in NAMES["lookups"]:
            try:
                _plan_lookup(script, edits, call)
            except Unported:
                continue  # The rewriter reports the name of the layer.
    return edits


def _plan_lookup(script: Script, edits: Edits, layer: cst.Call) -> None:
    arguments = bind_args(layer.args, _PARAMETERS)
    words = arguments.pop("vocabulary", None)
    if words is None or not _is_list(script, words.value):
        raise Unported("its vocabulary is unknown")
    texts = {name: script.code(arg.value) for name, arg in arguments.items()}
    if any(text not in _SUPPORTED.get(name, ()) for name, text in texts.items()):
        raise Unported("it has other indices")
    # The number of indices for unknown words, `"0"` or `"1"`.
    num_unknown = texts.get("num_oov_indices", "1")
    is_named = isinstance(script.target_of(layer), cst.Name)
    calls = [_lookup_call(script, use) for use in script.uses_of(layer) if is_named]
    if not calls or any(script.flow.value(call.func) is not layer for call in calls):
        raise Unported("its uses are unknown")
    for call in calls:
        _plan_lookup_call(
            script, edits, call, "[word]" if num_unknown == "0" else ".get(word, 0)"
        )
    edits.unchanged.add(layer.func)
    start = "" if num_unknown == "0" else ", 1"
    edits.replacements[layer] = lambda updated: script.template(
        f"{{word: index for index, word in enumerate({{words}}{start})}}",
        words=bind_args(updated.args, _PARAMETERS)["vocabulary"].value,
    )


def _is_list(script: Script, node: Expression) -> bool:
    value = script.flow.resolve(node)
    is_call = isinstance(value, cst.Call) and is_name(value.func, "list", "sorted")
    return is_call or isinstance(value, cst.List | cst.Tuple | cst.ListComp)


def _lookup_call(script: Script, use: cst.CSTNode) -> cst.Call:
    """The call of the layer `use`; raise `Unported` unless NumPy can replace it."""
    call = script.call_of(use)
    if call is None or len(call.args) != 1:
        raise Unported("a call has not exactly one argument")
    # The port has a lambda with the parameter `word`.
    has_name_of_port = is_name(use, "word")
    words = _literal_words(script, call.args[0].value)
    if has_name_of_port or (words is None and not script.runs_on_host(use)):
        raise Unported("a call is outside of a pipeline")
    return call


def _literal_words(script: Script, node: Expression) -> cst.List | None:
    """The list in `["a"]` or `tf.constant(["a"])`; None for other expressions."""
    if isinstance(node, cst.Call) and script.called_path(node) == "constant":
        node = node.args[0].value if len(node.args) == 1 else node
    return node if isinstance(node, cst.List) else None


def _plan_lookup_call(script: Script, edits: Edits, call: cst.Call, item: str) -> None:
    """Plan to port `lookup(x)` to a lookup of each word of an array."""
    if literal := _literal_words(script, call.args[0].value):
        edits.replacements[call.args[0].value] = lambda updated: literal
    edits.replacements[call] = lambda updated: script.template(
        f'np.vectorize(lambda word: {{lookup}}{item}, otypes=["int64"])'
        '(np.asarray({words}, "str"))',
        lookup=updated.func,
        words=updated.args[0].value,
    )
