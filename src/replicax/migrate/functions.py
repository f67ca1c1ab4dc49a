"""`@tf.function`, and which functions a strategy compiles."""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.names import dotted, root_of
from replicax.migrate.script import Script, walk

__all__ = [
    "called_functions",
    "find_traced",
    "is_graph_decorator",
    "is_traced",
    "makes_spec",
]

_RUN = frozenset(
    [
        "run",
        "experimental_run_v2",
        "experimental_run",
        "call_for_each_replica",
        "schedule",
    ]
)
_METHODS = frozenset(["train_step", "test_step", "predict_step", "call"])
_DECORATORS = (
    "function",
    "contrib.eager.defun",
    "contrib.eager.function",
    "autograph.experimental.do_not_convert",
    "autograph.to_graph",
    "py_function",
)


def is_graph_decorator(script: Script, decorator: cst.Decorator) -> bool:
    """Whether a decorator is `@tf.function`, with or without arguments."""
    node = decorator.decorator
    func = node.func if isinstance(node, cst.Call) else node
    return script.names.path(func) in _DECORATORS


def is_traced(script: Script, node: cst.CSTNode) -> bool:
    """Whether an original node is in a function that a strategy compiles."""
    return any(parent in script.traced_functions for parent in script.parents(node))


def find_traced(script: Script) -> None:
    """Find the functions that strategies run, and those that these call.

    Also methods of models and layers that `fit` compiles, and model functions of
    estimators.
    """
    pending = [*_run_by_strategies(script), *_compiled_methods(script)]
    while pending:
        function = pending.pop()
        if function not in script.traced_functions:
            script.traced_functions.add(function)
            pending += called_functions(script, function)


def called_functions(script: Script, function: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The script's functions that another one calls by their name, or on `self`."""
    for node in walk(function):
        if isinstance(node, cst.Call):
            text = dotted(node.func) or ""
            if "." not in text or text.startswith("self."):
                yield from script.functions(text.rpartition(".")[2])


def _run_by_strategies(script: Script) -> Iterator[cst.CSTNode]:
    for node in walk(script.module):
        if not isinstance(node, cst.Call) or not node.args:
            continue
        func = node.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in _RUN:
            continue
        root = root_of(func.value)
        if root is not None and script.names.imported(root):
            continue  # `subprocess.run`, `app.run`.
        yield from _functions_of(script, node.args[0].value)


def _functions_of(script: Script, node: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Lambda):
        yield node
        yield from called_functions(script, node)
    elif isinstance(node, cst.Call) and script.names.path(node.func) == "function":
        if node.args:
            yield from _functions_of(script, node.args[0].value)
    elif text := dotted(node):
        yield from script.functions(text.rpartition(".")[2])


def _compiled_methods(script: Script) -> Iterator[cst.CSTNode]:
    for node in walk(script.module):
        if isinstance(node, cst.FunctionDef):
            in_class = isinstance(_class_of(script, node), cst.ClassDef)
            is_step = in_class and node.name.value in _METHODS
            if is_step or makes_spec(script, node):
                yield node


def _class_of(script: Script, node: cst.FunctionDef) -> cst.CSTNode | None:
    block = script.parent(node)
    return script.parent(block) if block else None


def makes_spec(script: Script, node: cst.CSTNode) -> bool:
    """Whether `EstimatorSpec` is called in a node, such as a model function."""
    return any(
        isinstance(call, cst.Call)
        and script.names.path(call.func) == "estimator.EstimatorSpec"
        for call in walk(node)
    )
