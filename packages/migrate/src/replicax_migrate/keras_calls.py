"""Rules for calls of Keras that changed between tf.keras and Keras 3.

`SGD(lr=1)` becomes `SGD(learning_rate=1.0)`. Arguments that Keras 3 refuses stay. The
port reports arguments to which Keras 3 gives another meaning without an error.
"""

from collections.abc import Iterator

import libcst as cst

from replicax_migrate.edits import Edits
from replicax_migrate.rules import CallSite, Rule, as_float, by_keywords, port_keywords
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    CHANGED_DEFAULTS,
    MESSAGES,
    NAMES,
    OLD_ORDERS,
    OPTIMIZERS,
    ORDERS,
    READERS,
)
from replicax_migrate.tree import (
    arg_value,
    find_arg,
    is_name,
    keyword,
    kwarg_value,
    method_name,
    string_of,
    with_new_value,
)

__all__ = ["RULES", "plan_arguments", "silent_changes"]


def _reader(site: CallSite) -> Expression:
    if kwarg_value(site.updated, "format") is not None:
        return site.call_target()
    site.note("Grain reads the data: pass `map` a function of one batch")
    grain = keyword("format", site.script.string("grain"))
    return site.call_target([*site.updated.args, grain])


def _tensorboard(site: CallSite) -> Expression:
    by_position = [arg for arg in site.updated.args if arg.keyword is None]
    if len(by_position) > 2 or any(arg.star for arg in by_position):
        raise Unported("rx.callbacks.TensorBoard: name its arguments")
    return site.call_target(port_keywords(site, "TensorBoard"))


def _optimizer(site: CallSite) -> Expression:
    args = port_keywords(site, "optimizer")
    before = arg_value(site.node, 0, "learning_rate") or kwarg_value(site.node, "lr")
    after = find_arg(args, 0, "learning_rate")
    if before is not None and after is not None:
        args = with_new_value(args, after, as_float(site, before, after.value))
    return site.call_target(args)


def plan_arguments(script: Script) -> Edits:
    """Plan to pass strategies the names of devices instead of device objects."""
    edits = Edits()
    for call in script.calls:
        if script.called_path(call) == "distribute.MirroredStrategy":
            devices = arg_value(call, 0, "devices")
            path = script.called_path(script.flow.resolve(devices))
            if path.endswith(("list_logical_devices", "list_physical_devices")):
                assert devices is not None
                edits.wrappers[devices] = "[device.name for device in {x}]"
    return edits


RULES: dict[str, Rule] = {
    **dict.fromkeys(ORDERS, CallSite.call_target),
    **{path: CallSite.call_target for path, old in OLD_ORDERS.items() if "-" in old},
    **dict.fromkeys(OPTIMIZERS, _optimizer),
    **dict.fromkeys(READERS, _reader),
    "keras.callbacks.LambdaCallback": by_keywords("LambdaCallback"),
    "keras.callbacks.ModelCheckpoint": by_keywords("ModelCheckpoint"),
    "keras.callbacks.ReduceLROnPlateau": by_keywords("ReduceLROnPlateau"),
    "keras.callbacks.TensorBoard": _tensorboard,
    "keras.models.save_model": by_keywords("save"),
    "keras.utils.to_categorical": by_keywords("to_categorical"),
}
"""Rules by the path of the function."""


def silent_changes(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """Why a ported call computes other numbers in Keras 3 without an error."""
    for layer, position, parameter in CHANGED_DEFAULTS:
        if path == layer and find_arg(node.args, position, parameter) is None:
            yield f"{parameter} has another default in Keras 2: write {parameter}="
    if _is_stateful(node) and any(
        method_name(call) in NAMES["methods_with_steps"] for call in script.calls
    ):
        yield MESSAGES["forgotten_states"]
    yield from _old_defaults(script, node, path)


def _is_stateful(node: cst.Call) -> bool:
    stateful = kwarg_value(node, "stateful")
    return stateful is not None and not is_name(stateful, "False")


_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]


def _old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """Why a layer's activations or defaults differ in Keras 3."""
    for arg in node.args if path.startswith("keras.layers.") else ():
        name = string_of(arg.value) or script.names.tf_path(arg.value)
        if name in NAMES["hard_sigmoids"]:
            yield MESSAGES["hard_sigmoid"]
    if path in NAMES["hard_sigmoids"]:
        yield MESSAGES["hard_sigmoid"]
    if path in _OLD_RECURRENT and script.is_of_version_1(node):
        if find_arg(node.args, 2, "recurrent_activation") is None:
            yield MESSAGES["recurrent_activation"]
        if "GRU" in path and kwarg_value(node, "reset_after") is None:
            yield "reset_after is False in TensorFlow 1: write reset_after="
