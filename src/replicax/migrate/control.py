"""Branches and loops on tensors in compiled steps, of which AutoGraph made graphs."""

import libcst as cst

from replicax.migrate.functions import is_traced
from replicax.migrate.operators import DEVICE_OPERATORS
from replicax.migrate.script import Script, walk

__all__ = ["report_branches"]

_REASON = (
    "depends on a tensor, and AutoGraph is gone: use keras.ops.cond, keras.ops.where "
    "or keras.ops.while_loop"
)
_STATIC = ("keras.ops.shape", "keras.ops.size", "keras.ops.ndim", "keras.ops.is_tensor")
_IDENTITY = (cst.Is, cst.IsNot)


def report_branches(script: Script) -> None:
    """Report conditions that a step computes, as far as that can be seen."""
    for node in walk(script.module):
        if isinstance(node, (cst.If, cst.While, cst.IfExp, cst.Assert)) and is_traced(
            script, node
        ):
            function = script.function_of(node)
            names = _tensors(script, function) if function else set()
            if _is_tensor(script, node.test, names):
                script.leave(node.test, f"`{script.code(node.test)}` {_REASON}")


def _tensors(script: Script, function: cst.FunctionDef) -> set[str]:
    """Names that a function assigns nothing but tensors."""
    tensors: set[str] = set()
    others: set[str] = set()
    for node in walk(function.body):
        if not isinstance(node, cst.Assign):
            continue
        found = tensors if _is_tensor(script, node.value, tensors) else others
        found |= {
            target.target.value
            for target in node.targets
            if isinstance(target.target, cst.Name)
        }
    return tensors - others


def _is_tensor(script: Script, node: cst.BaseExpression, names: set[str]) -> bool:
    if isinstance(node, cst.Name):
        return node.value in names
    if isinstance(node, cst.Call):
        operator = DEVICE_OPERATORS.get(script.names.path(node.func) or "")
        return operator is not None and (
            operator.target.startswith(("keras.ops.", "keras.random."))
            and operator.target not in _STATIC
        )
    return any(_is_tensor(script, part, names) for part in _operands(node))


def _operands(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """What an expression computes with; nothing where it asks for identity."""
    if isinstance(node, (cst.BinaryOperation, cst.BooleanOperation)):
        return [node.left, node.right]
    if isinstance(node, cst.UnaryOperation):
        return [node.expression]
    if isinstance(node, cst.Subscript):
        return [node.value]
    if isinstance(node, cst.Comparison):
        if any(isinstance(c.operator, _IDENTITY) for c in node.comparisons):
            return []
        return [node.left, *(c.comparator for c in node.comparisons)]
    return []
