"""Ports `initialize()` of iterators that strategies of TensorFlow 1 make."""

import libcst as cst

from replicax.migrate.script import Script
from replicax.migrate.tables import MESSAGES
from replicax.migrate.tree import method_of, object_of

__all__ = ["begins_iterator", "plan_iterators"]


def begins_iterator(script: Script, call: cst.Call) -> bool:
    """Whether a call is `initialize()` of an iterator that a strategy has just made."""
    in_loop = script.around(call, cst.For, cst.While) is not None
    return not in_loop and _initialized(script, call) is not None


def _initialized(script: Script, call: cst.Call) -> cst.Call | None:
    """The call of a strategy that makes the iterator which a call initializes."""
    made = script.flow.resolved(object_of(call))
    if not isinstance(made, cst.Call) or method_of(call) != "initialize":
        return None
    is_new = method_of(made) in {"make_dataset_iterator", "make_input_fn_iterator"}
    return made if is_new else None


def plan_iterators(script: Script) -> None:
    """Plan to make an iterator of a strategy anew where a loop initializes it."""
    for call in script.calls:
        made = _initialized(script, call)
        if made is None or begins_iterator(script, call):
            continue
        first, line = script.parent(made), script.parent(call)
        # In another function the assignment would bind a name of that one.
        is_here = script.function_of(made) is script.function_of(call)
        is_above = script.line(made) < script.line(call)
        is_name = isinstance(object_of(call), cst.Name)
        is_again = is_here and is_above and is_name
        if isinstance(first, cst.Assign) and isinstance(line, cst.Expr) and is_again:
            _plan_again(script, first, line)
        else:
            script.leave(call, MESSAGES["iterator_begins"])


def _plan_again(script: Script, first: cst.Assign, line: cst.Expr) -> None:
    """Plan to replace a line by the port of an assignment that is above it."""
    ported: list[cst.Assign] = []

    def hold(updated: cst.Assign) -> cst.Assign:
        ported[:] = [updated]
        return updated

    script.replacements[first] = hold
    script.replacements[line] = lambda updated: ported[0].deep_clone()
