"""Files of models and weights: Keras 3 knows them by how their names end."""

import libcst as cst

from replicax.migrate.arguments import argument
from replicax.migrate.names import dotted
from replicax.migrate.script import Script, walk

__all__ = ["MODELS", "WEIGHTS", "is_latest_checkpoint", "report_path"]

MODELS = (".keras", ".h5", ".hdf5")
"""How names of whole models end."""
WEIGHTS = (".weights.h5",)
"""How names of weights alone end."""


def report_path(
    script: Script,
    node: cst.Call,
    endings: tuple[str, ...],
    position: int = 0,
    is_read: bool = False,
) -> None:
    """Report a file name that Keras 3 refuses; note one that cannot be seen.

    Args:
        script: The script.
        node: A call with a path.
        endings: What the path may end with.
        position: Which argument the path is, if it is not called `filepath`.
        is_read: Whether the file is read, so that its writer was noted.
    """
    path = argument(node.args, position, "filepath")
    if path is None:
        return
    end = _end(script, path.value)
    wanted = f"Keras 3 wants a file name that ends with {' or '.join(endings[:2])}"
    if end is None:
        if not is_read:
            script.note(node, f"{wanted}: see that `{script.code(path.value)}` does")
    elif not end.endswith(endings):
        script.leave(node, wanted)


def is_latest_checkpoint(script: Script, node: cst.BaseExpression) -> bool:
    """Whether a value is what `tf.train.latest_checkpoint` has found."""
    if isinstance(node, cst.Name):
        values = _assigned(script, node)
        return len(values) == 1 and is_latest_checkpoint(script, values[0])
    return (
        isinstance(node, cst.Call)
        and script.names.path(node.func) == "train.latest_checkpoint"
    )


def _end(script: Script, node: cst.BaseExpression) -> str | None:
    """What a path ends with; None if that cannot be seen."""
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        return str(node.evaluated_value or "")
    if isinstance(node, cst.FormattedString):
        last = node.parts[-1] if node.parts else None
        return last.value if isinstance(last, cst.FormattedStringText) else None
    inner = _last_part(script, node)
    return _end(script, inner) if inner is not None else None


def _last_part(script: Script, node: cst.BaseExpression) -> cst.BaseExpression | None:
    if isinstance(node, cst.Name):
        values = _assigned(script, node)
        return values[0] if len(values) == 1 else None
    if isinstance(node, cst.BinaryOperation):
        return node.left if isinstance(node.operator, cst.Modulo) else node.right
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value == "format":
            return node.func.value
        if dotted(node.func) == "os.path.join" and node.args:
            return node.args[-1].value
    return None


def _assigned(script: Script, name: cst.Name) -> list[cst.BaseExpression]:
    """All that is assigned to a variable, if nothing else binds it."""
    key = script.names.key(name)
    if key is None:
        return []
    values = []
    for node in walk(script.module):
        targets = node.targets if isinstance(node, cst.Assign) else ()
        for target in targets:
            if isinstance(target.target, cst.Name) and (
                target.target.value == name.value
                and script.names.key(target.target) == key
            ):
                assert isinstance(node, cst.Assign)
                values.append(node.value)
    return values if len(values) == script.names.num_bindings(name) else []
