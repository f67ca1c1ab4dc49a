"""Finds calls of Keras that would fail when ported, or compute something else."""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.files import MODELS
from replicax.migrate.functional import has_input_shape, layers_of
from replicax.migrate.kinds import is_class_of
from replicax.migrate.optimizer_calls import config_problem
from replicax.migrate.script import Script
from replicax.migrate.tables import (
    CHANGED_DEFAULTS,
    MESSAGES,
    NAMES,
)
from replicax.migrate.tree import (
    argument,
    find,
    is_name,
    last_name,
    method_of,
    named,
    text_of,
    value_of,
)

__all__ = ["problems"]


def problems(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a ported call would fail, or silently compute something else."""
    name = path.removeprefix("keras.")
    if name == "models.load_model" and named(node, "safe_mode") is None:
        yield from _not_loaded(script, node)
    for changed, position, parameter in CHANGED_DEFAULTS:
        if path == changed and argument(node.args, position, parameter) is None:
            yield f"{parameter} has another default in Keras 2: write {parameter}="
    if _is_stateful(node) and any(
        method_of(each) in NAMES["methods_with_steps"] for each in script.calls
    ):
        yield MESSAGES["forgotten_states"]
    if name in {"optimizers.get", "optimizers.deserialize"} and (
        problem := config_problem(script, node)
    ):
        yield problem
    if name.endswith("SidecarEvaluator") and _saves_other_files(script):
        yield MESSAGES["sidecar"]
    if path == "keras.layers.Bidirectional":
        yield from _unregistered_cells(script, node)
    if path in NAMES["sequential"] and _applies_once(script, node):
        yield MESSAGES["applied_once"]
    yield from _old_defaults(script, node, path)


def _unregistered_cells(script: Script, node: cst.Call) -> Iterator[str]:
    made = (call.func for call in find(node, cst.Call))
    for name in (each.value for each in made if isinstance(each, cst.Name)):
        if any(not owner.decorators for owner in script.classes(name)):
            yield MESSAGES["unregistered"].format(name)


def _applies_once(script: Script, node: cst.Call) -> bool:
    """Whether Keras 2 applies a layer once that a `Sequential` has several times.

    It does so where the first layer has no shape of its inputs.
    """
    layers = layers_of(script, node)
    if has_input_shape(script, layers):
        return False
    seen = [script.flow.reaching(layer) for layer in layers]
    made = [found for found in seen if found]
    is_in_loop = any(_is_added_again(script, layer) for layer in layers)
    return is_in_loop or len(set(made)) < len(made)


def _is_added_again(script: Script, layer: cst.BaseExpression) -> bool:
    """Whether a loop adds a layer that is made outside of the loop."""
    loop = script.around(layer, cst.For, cst.While)
    made = [each.node for each in script.flow.reaching(layer)]
    return (
        loop is not None
        and bool(made)
        and all(loop not in script.parents(each) for each in made)
    )


def _not_loaded(script: Script, node: cst.Call) -> Iterator[str]:
    if "keras.layers.Lambda" in map(script.called, script.calls):
        yield MESSAGES["lambda_layer"]
    if own := _unregistered(script, node):
        yield MESSAGES["own_classes"].format(own)


def _saves_other_files(script: Script) -> bool:
    """Whether a script saves files of Keras alone, for which no evaluator waits."""
    called = set(map(script.called, script.calls))
    saves = "keras.callbacks.ModelCheckpoint" in called
    return saves and "train.Checkpoint" not in called


def _is_stateful(node: cst.Call) -> bool:
    stateful = named(node, "stateful")
    return stateful is not None and not is_name(stateful, "False")


def _unregistered(script: Script, load: cst.Call) -> str:
    """A class of the script that a loaded model may need; `""` if there is none.

    Files of HDF5 need it in Keras 2, too. A SavedModel does without.
    """
    path = value_of(load, 0, "filepath")
    name = text_of(script.flow.resolved(path)) if path else ""
    if not name or name.endswith(MODELS) or named(load, "custom_objects") is not None:
        return ""
    made = {last_name(each.func) for each in script.calls}
    for each in script.nodes(cst.ClassDef):
        is_own = is_class_of(script, each, ("layer", "model")) and not each.decorators
        if is_own and each.name.value in made:
            return each.name.value
    return ""


_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]
_HARD_SIGMOID = ("hard_sigmoid", "keras.activations.hard_sigmoid")


def _old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """The reasons why a layer with TensorFlow's defaults differs in Keras 3."""
    for arg in node.args if path.startswith("keras.layers.") else ():
        if (text_of(arg.value) or script.names.path(arg.value)) in _HARD_SIGMOID:
            yield MESSAGES["hard_sigmoid"]
    if path in _HARD_SIGMOID:
        yield MESSAGES["hard_sigmoid"]
    if path in _OLD_RECURRENT and script.is_of_version_1(node):
        if argument(node.args, 2, "recurrent_activation") is None:
            yield MESSAGES["recurrent_activation"]
        if "GRU" in path and named(node, "reset_after") is None:
            yield "reset_after is False in TensorFlow 1: write reset_after="
