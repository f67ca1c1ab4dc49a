"""Rules for arguments whose values or defaults tf.keras has otherwise than Keras 3."""

from collections.abc import Iterator

import libcst as cst
from libcst import Call

from replicax.migrate.arguments import argument, is_named, keyword, without
from replicax.migrate.names import root_of
from replicax.migrate.script import Expression, Script
from replicax.migrate.targets import find_target, kind_of_target

__all__ = ["old_defaults", "with_float_rate", "with_old_reset"]

_OLD_RECURRENT = [
    f"keras.layers.{name}" for name in ("GRU", "GRUCell", "LSTM", "LSTMCell")
]
_HARD_SIGMOID = ("hard_sigmoid", "keras.activations.hard_sigmoid")
_OTHER_SLOPE = (
    "hard_sigmoid is 0.2 * x + 0.5 in tf.keras, x / 6 + 0.5 in Keras 3: write it as a "
    "function, keras.ops.clip(0.2 * x + 0.5, 0, 1)"
)


def with_float_rate(
    script: Script, node: Call, result: Expression, path: str
) -> Expression:
    """An optimizer whose learning rate is a float where the script has an integer.

    Keras 3 refuses integers.
    """
    target = find_target(path) or ""
    if not isinstance(result, cst.Call) or kind_of_target(target) != "optimizer":
        return result
    old = argument(node.args, 0, "learning_rate") or next(
        (arg for arg in node.args if is_named(arg, "lr")), None
    )
    new = argument(result.args, 0, "learning_rate")
    if old is None or new is None:
        return result
    if isinstance(old.value, cst.Integer):
        number: cst.BaseExpression = cst.Float(f"{old.value.evaluated_value}.0")
    elif _is_integer(script, old.value):
        number = cst.Call(cst.Name("float"), [cst.Arg(new.value)])
    else:
        return result
    args = [a.with_changes(value=number) if a is new else a for a in result.args]
    return result.with_changes(args=args)


def _is_integer(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a variable is an integer; a parameter's default may be a number, too."""
    if not isinstance(script.flow.value(node), cst.Integer):
        return False
    bound = [script.parent(each.node) for each in script.flow.reaching(node)]
    defaults = [p.default for p in bound if isinstance(p, cst.Param)]
    return all(d is None or isinstance(d, cst.Integer | cst.Float) for d in defaults)


def with_old_reset(script: Script, node: Call, updated: Call) -> Call:
    """A GRU of TensorFlow 1 as it was: it resets the state before it multiplies it."""
    is_said = any(is_named(arg, "reset_after") for arg in updated.args)
    if is_said or not _is_of_version_1(script, node):
        return updated
    extra = [keyword("reset_after", cst.Name("False"))]
    return updated.with_changes(args=without(updated.args, updated.args, extra))


def old_defaults(script: Script, node: cst.Call, path: str) -> Iterator[str]:
    """Why a layer of TensorFlow 1 or tf.keras would compute something else here."""
    for arg in node.args:
        value = arg.value
        is_text = isinstance(value, cst.SimpleString)
        text = value.evaluated_value if is_text else script.names.path(value)
        if text in _HARD_SIGMOID and path.startswith("keras.layers."):
            yield _OTHER_SLOPE
    if path in _HARD_SIGMOID:
        yield _OTHER_SLOPE
    if path in _OLD_RECURRENT and _is_of_version_1(script, node):
        given = argument(node.args, 2, "recurrent_activation")
        if given is None and not any(arg.star for arg in node.args):
            yield (
                "recurrent_activation is hard_sigmoid in TensorFlow 1, sigmoid in "
                "Keras 3: write recurrent_activation="
            )


def _is_of_version_1(script: Script, node: cst.Call) -> bool:
    """Whether a function is one of `tf.compat.v1`."""
    root = root_of(node.func)
    meant = script.flow.value(root) if root else None  # `keras = tf.compat.v1.keras`
    names = [script.names.imported(each) for each in (node.func, meant) if each]
    return any(name and ".compat.v1." in f"{name}." for name in names)
