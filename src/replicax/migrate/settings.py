"""Takes out objects that only set up TensorFlow's runtime."""

import libcst as cst

from replicax.migrate.flow import Definition
from replicax.migrate.names import dotted
from replicax.migrate.script import Script, walk

__all__ = ["plan_settings"]


def plan_settings(script: Script) -> None:
    """Take `tf.data.Options()`, `ConfigProto()` and `AUTOTUNE` out, once bound.

    Those that a use needs which is not ported stay, with all that sets them.
    """
    _drop_arguments(script)
    settings = {d for d in script.flow.definitions if _is_setting(script, d)}
    unused = set(settings)
    number = -1
    while number != len(unused):
        number = len(unused)
        unused = {
            definition
            for definition in unused
            for uses in [script.flow.uses(definition)]
            if all(
                _is_in_ported_call(script, use)
                or (_set_there(script, use) and script.flow.reaching(use) <= unused)
                for use in uses
            )
        }
    for definition in sorted(settings, key=lambda d: script.line(d.node)):
        uses = script.flow.uses(definition)
        assigned = [each for use in uses if (each := _set_there(script, use))]
        if definition in unused:
            _drop_statement(script, definition.values[0])
            for each in assigned:
                _drop_statement(script, each)
                _note_policy(script, each)
        elif isinstance(value := definition.values[0], cst.Call):
            script.leave(value, f"{script.code(value.func)} {_STAYING}")
            script.frozen |= {value, *assigned}


_STAYING = "stays: not all that it is given to is ported"
_SETTINGS = ("data.Options", "ConfigProto", "GPUOptions")
_NO_ARGUMENTS = {
    "estimator.RunConfig": ("session_config", "save_summary_steps", "protocol"),
}
"""Arguments that only TensorFlow's runtime has, by the call's path."""


def _drop_arguments(script: Script) -> None:
    for node in walk(script.module):
        if not isinstance(node, cst.Call):
            continue
        for arg in node.args:
            name = arg.keyword.value if arg.keyword else ""
            if name in _NO_ARGUMENTS.get(script.names.path(node.func) or "", ()):
                script.note(node, f"{name}= is taken out: JAX has no sessions")
                script.dropped_arguments.add(arg)
                script.frozen.add(arg)


def _is_setting(script: Script, definition: Definition) -> bool:
    if not script.frozen.isdisjoint(script.parents(definition.node)):
        return False  # In a function that goes or stays as a whole.
    if len(definition.values) != 1 or not isinstance(definition.node, cst.Name):
        return False
    value = definition.values[0]
    if isinstance(value, cst.Call):
        return script.names.path(value.func) in _SETTINGS
    path = script.names.path(value) or ""
    return path.startswith("data.") and path.endswith("AUTOTUNE")


def _is_in_ported_call(script: Script, use: cst.CSTNode) -> bool:
    arg = script.parent(use)
    call = script.parent(arg) if arg is not None else None
    if arg in script.dropped_arguments:
        return True
    return isinstance(arg, cst.Arg) and call in script.replacements


def _set_there(script: Script, use: cst.CSTNode) -> cst.Assign | None:
    """The assignment to an attribute of what is used: `options.a.b = c`."""
    node: cst.CSTNode | None = use
    while isinstance(parent := script.parent(node) if node else None, cst.Attribute):
        node = parent
    assign = script.parent(parent) if isinstance(parent, cst.AssignTarget) else None
    return assign if isinstance(assign, cst.Assign) and node is not use else None


def _note_policy(script: Script, node: cst.Assign) -> None:
    if "policy" not in (dotted(node.targets[0].target) or "").lower():
        return
    policy = (dotted(node.value) or script.code(node.value)).rpartition(".")[2]
    what = f"pass auto_shard_policy=rx.AutoShardPolicy.{policy}"
    script.note(
        node,
        f"dataset options are taken out; for several workers {what} to "
        "strategy.experimental_distribute_dataset",
    )


def _drop_statement(script: Script, node: cst.CSTNode) -> None:
    line = script.statement_of(node)
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        script.take_out(line)
