"""Ports `tf.TensorArray` that Python loops fill in order: to lists.

`ta = ta.write(i, x)` becomes `ta.append(x)`, `ta.stack()` becomes
`keras.ops.stack(ta)`. An array that is used in another way stays, and is reported.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import libcst as cst

from replicax.migrate.script import Expression, Script
from replicax.migrate.tree import find, method_of, object_of, parts_of, value_of

__all__ = ["plan_tensor_arrays"]

_READS = {
    "stack": "keras.ops.stack({x})",
    "concat": "keras.ops.concatenate({x}, axis=0)",
    "size": "len({x})",
}
"""Templates of methods without arguments that read an array."""
_Use: TypeAlias = tuple[cst.CSTNode, Callable[[Any], cst.CSTNode]]


def plan_tensor_arrays(script: Script) -> None:
    """Plan lists for all arrays that are written in order and read in known ways."""
    for call in script.calls:
        if script.called(call) == "TensorArray" and not script.runs_on_host(call):
            uses = list(_uses(script, call))
            if uses and all(uses):
                script.frozen |= {call.func, *call.args}
                script.replacements[call] = lambda updated: cst.List([])
                script.replacements |= dict(filter(None, uses))


def _uses(script: Script, made: cst.Call) -> Iterator[_Use | None]:
    """The nodes of each use of an array, with their ports; None for another use."""
    target, writes = script.target_of(made), 0
    name = target.value if isinstance(target, cst.Name) else None
    for node in find(script.function_of(made) or script.module, cst.Name):
        if node is target or node.value != name:
            continue
        call, around = script.method_call(node), script.parent(node)
        assign = script.parent(around) if around is not None else None
        if isinstance(assign, cst.Assign) and isinstance(around, cst.AssignTarget):
            writes += 1
            yield _write(script, assign, made) if writes == 1 else None
        elif call is None:
            yield None
        elif method_of(call) != "write":
            yield _read(script, call)


def _write(script: Script, assign: cst.Assign, made: cst.Call) -> _Use | None:
    """The port of `ta = ta.write(i, x)` in a loop that counts `i`: `ta.append(x)`."""
    call, line = assign.value, script.statement_of(assign)
    target, loop = assign.targets[0].target, script.parent(script.parent(line) or line)
    if not isinstance(loop, cst.For) or not isinstance(call, cst.Call):
        return None
    index = value_of(call, 0, "index")
    if method_of(call) != "write" or index is None or len(call.args) != 2:
        return None
    is_own = object_of(call).deep_equals(target)
    block = script.parent(script.statement_of(made))
    if not (is_own and script.parent(loop) is block and _counts(script, loop, index)):
        return None

    def port(updated: cst.Assign) -> cst.Expr:
        assert isinstance(updated.value, cst.Call)
        value = value_of(updated.value, 1, "value")
        assert value is not None
        made = script.template("{x}.append({y})", x=object_of(updated.value), y=value)
        return cst.Expr(made, semicolon=updated.semicolon)

    return assign, port


def _counts(script: Script, loop: cst.For, index: Expression) -> bool:
    """Whether a loop counts an index from 0, in each turn."""
    iterated, target = loop.iter, loop.target
    if not isinstance(iterated, cst.Call) or len(iterated.args) != 1:
        return False
    name = script.called(iterated) or script.code(iterated.func)
    if name == "enumerate" and parts_of(target):
        target = parts_of(target)[0]
    is_whole = next(find(loop.body, cst.Continue), None) is None
    return name in {"range", "enumerate"} and target.deep_equals(index) and is_whole


def _read(script: Script, call: cst.Call) -> _Use | None:
    """The port of a call that reads an array."""
    method = method_of(call)
    if method == "read" and len(call.args) == 1 and value_of(call, 0, "index"):
        return call, lambda updated: script.template(
            "{x}[{i}]", x=object_of(updated), i=updated.args[0].value
        )
    if method not in _READS or call.args:
        return None
    text = _READS[method]
    return call, lambda updated: script.template(text, x=object_of(updated))
