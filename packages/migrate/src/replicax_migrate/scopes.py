"""Ports what a script makes or runs outside of `strategy.scope()`.

TensorFlow makes an optimizer's variables when it is first used, in the scope by then,
and lets replicas read a `tf.Variable` from anywhere. Variables of Keras 3 belong to the
scope that they are made in. What `fit` compiles has the value of a variable that is no
model's, and was made in no scope, as a constant.
"""

from collections.abc import Iterator, Sequence

import libcst as cst

from replicax_migrate.functional import has_input_shape, is_symbolic, layers_of
from replicax_migrate.kinds import Origin, is_class_of, kind_of, origins
from replicax_migrate.origins import (
    definitions,
    ends_at_cycles,
    is_parameter,
    meanings,
)
from replicax_migrate.script import Expression, Replacement, Script, Statement
from replicax_migrate.tables import DEVICE_OPERATORS, MESSAGES, NAMES
from replicax_migrate.tracing import (
    class_of,
    foreign_bases,
    has_scope,
    is_traced,
    scopes,
    strategy_of,
)
from replicax_migrate.tree import (
    attr_of,
    find,
    in_with,
    is_name,
    last_name,
    method_of,
    methods_of,
    names_in,
    object_of,
    only_of,
    reached,
)

__all__ = ["is_unbuilt", "plan_models", "plan_scopes"]


def _wrap_in_scope(
    script: Script, lines: Sequence[cst.CSTNode], strategy: str | None = None
) -> None:
    """Plan to move lines into `with strategy.scope():`; None: the default strategy."""
    *others, last = lines
    for line in others:
        script.move(line)

    def replacement(updated: Statement) -> Replacement:
        default = f"{script.here('rx.get_strategy')}()"
        item = cst.parse_expression(f"{strategy or default}.scope()")
        inside = [*(script.moved[line] for line in others), updated]
        return in_with(cst.WithItem(item), inside)

    script.replacements[last] = replacement


# What steps use, and `compile`, outside of a scope.

_Nodes = Sequence[cst.CSTNode]
_OWNERS = ("layer", "model", "metric")
"""Kinds of objects whose variables are a model's."""
_PARTS = ("optimizer", "variable", *_OWNERS)
"""Kinds of objects that have variables."""


def plan_scopes(script: Script) -> None:
    """Plan scopes around what is made outside and used in steps, or report it."""
    blocks = list(scopes(script))
    inside = _ReachableCode(script, blocks)
    if has_scope(script):
        compiled = [c for c in script.calls if _compiles_outside(script, c, inside)]
        outside = _made_outside(script, _ReachableCode(script, [*blocks, *compiled]))
        moved = _ReachableCode(script, [*blocks, *map(script.statement_of, outside)])
        compiled = [c for c in script.calls if _compiles_outside(script, c, moved)]
        built = [c for c in script.calls if _builds_outside(script, c, moved)]
        for call in outside:
            _plan_scope(script, call, blocks)
        for call in [*compiled, *built]:
            _plan_scope(script, call, _blocks_of(script, call, blocks))
        for node in _built_outside(script, inside):
            if script.statement_of(node) not in script.replacements:
                script.leave(node, MESSAGES["outside_scope"])
    variables = {c for c in script.calls if kind_of(script, c) == "variable"}
    if variables and any(method_of(call) == "fit" for call in script.calls):
        for call in _constants(script, variables):
            if not has_scope(script):
                script.leave(call, MESSAGES["constant_variable"])
            elif not inside.has(call):
                _plan_scope(script, call, blocks)


class _ReachableCode:
    """Blocks, and the functions and classes that they name, through others too."""

    def __init__(self, script: Script, blocks: _Nodes) -> None:
        def step(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
            return (f for name in names_in(node) for f in _called(script, name))

        self.blocks = blocks
        self.parts = set(reached(blocks, step))
        self._script = script

    def has(self, node: cst.CSTNode) -> bool:
        """Whether a node is in one of the blocks, or in such a function."""
        return not self.parts.isdisjoint(self._script.parents(node))

    def is_around(self, node: cst.CSTNode) -> bool:
        """Whether a node is in one of the blocks."""
        return not {*self._script.parents(node)}.isdisjoint(self.blocks)


def _called(script: Script, name: str) -> list[cst.FunctionDef]:
    """The functions that calls of a name run: of a class, those that make its parts."""
    made = [
        method
        for owner in script.classes(name)
        for key, method in methods_of(owner).items()
        if key in {"__init__", "build"}
    ]
    return [*script.functions(name), *made]


def _compiles_outside(script: Script, call: cst.Call, code: _ReachableCode) -> bool:
    """Whether a call compiles, outside of all scopes, a model that is made in one.

    The `compile` of TensorFlow enters the model's scope by itself, and so does `build`.
    """
    return (
        method_of(call) in {"compile", "build"}
        and isinstance(script.parent(call), cst.Expr)
        and not code.has(call)
        and _is_model_of(script, object_of(call), code)
    )


def _builds_outside(script: Script, call: cst.Call, code: _ReachableCode) -> bool:
    """Whether a call of a model, or of a layer, that is made in a scope builds it.

    That is the first call, outside of all scopes and steps, before all training.
    """
    function, model = script.function_of(call), call.func
    if not isinstance(model, cst.Name) or is_traced(script, call) or code.has(call):
        return False
    bound = [each.node for each in script.flow.reaching(model)]
    if is_parameter(script, model) or not _is_model_of(script, model, code):
        return False
    if any(script.function_of(each) is not function for each in bound):
        return False  # Its calls are not in the order of the text.
    if not all(is_unbuilt(script, each) for each in origins(script, model)):
        return False
    before = [c for c in script.calls if script.function_of(c) is function]
    before = before[: before.index(call)]
    running = (*NAMES["running_methods"], *NAMES["methods_with_steps"], "build")
    return not any(
        method_of(each) in running or is_name(each.func, model.value) for each in before
    ) and not any(is_symbolic(script, arg.value) for arg in call.args)


def is_unbuilt(script: Script, made: Origin) -> bool:
    """Whether a model or layer that a call makes has no variables before its call."""
    if not isinstance(made, cst.Call):
        return False
    if script.called(made) in NAMES["sequential"]:
        return not has_input_shape(script, layers_of(script, made))
    kind = kind_of(script, made)
    is_own = bool(script.classes(last_name(made.func)))
    return kind == "layer" or (kind == "model" and is_own)


@ends_at_cycles(False)
def _is_model_of(script: Script, model: Expression, code: _ReachableCode) -> bool:
    """Whether a model was made in a scope, here or where a caller passes it."""
    made = origins(script, model)
    if all(isinstance(each, cst.Call) and code.has(each) for each in made):
        return True
    found = definitions(script, model)
    return bool(found) and all(
        code.is_around(each.node)
        or (each.values and all(_is_model_of(script, v, code) for v in each.values))
        for each in found
    )


def _made_outside(script: Script, code: _ReachableCode) -> list[cst.Call]:
    """The calls that make what steps or scopes use, in no scope.

    Args:
        script: The script.
        code: The blocks of scopes, and what will be in one.
    """
    made = {
        call
        for call in script.calls
        if kind_of(script, call) in _PARTS
        and not is_traced(script, call)
        and not code.has(call)
        and not _has_owner(script, call)
    }
    used: set[cst.Call] = set()
    for part in {*script.traced_functions, *code.parts} if made else ():
        is_step = part in script.traced_functions
        for node in find(part, cst.Name, cst.Attribute, cst.Subscript):
            found = made.intersection(origins(script, node))
            kinds = {"optimizer", "model"} if _is_part(script, node) else {"optimizer"}
            used |= {c for c in found if is_step or kind_of(script, c) in kinds}
    return [call for call in script.calls if call in used]


def _is_part(script: Script, node: cst.CSTNode) -> bool:
    """Whether an object is called, compiled or in a list, as parts of a model are."""
    is_called = script.call_of(node) is not None
    is_compiled = method_of(script.method_call(node)) == "compile"
    return is_called or is_compiled or isinstance(script.parent(node), cst.Element)


def _built_outside(script: Script, code: _ReachableCode) -> Iterator[cst.CSTNode]:
    """What makes the layers that blocks of scopes use, and that are built before."""
    found: set[cst.CSTNode] = set()
    for block in code.blocks:
        for node in find(block, cst.Name):
            for definition in script.flow.reaching(node):
                outside = [v for v in definition.values if not code.has(v)]
                found.update(v for v in outside if _is_built(script, v, code))
    yield from sorted(found, key=script.line)


def _is_built(script: Script, made: Expression, code: _ReachableCode) -> bool:
    """Whether a layer has its variables before the scopes: or an output of one."""
    if kind_of(script, made) != "layer":
        layer = made.func if isinstance(made, cst.Call) else None
        is_output = layer is not None and kind_of(script, layer) in {"layer", "model"}
        return is_output and is_symbolic(script, made)
    return any(
        script.call_of(use) or method_of(script.method_call(use)) in NAMES["building"]
        for use in script.uses_of(made)
        if not code.has(use)
    )


def _blocks_of(script: Script, call: cst.Call, blocks: _Nodes) -> _Nodes:
    """The scopes that a model is made in that a call compiles or builds, or all."""
    model = object_of(call) if isinstance(call.func, cst.Attribute) else call.func
    made = {each.node for each in definitions(script, model)}
    around = {parent for node in made for parent in script.parents(node)}
    return [block for block in blocks if block in around] or blocks


def _is_instead(script: Script, node: cst.CSTNode, block: cst.CSTNode) -> bool:
    """Whether a node is in the branch of an `if` that runs if the block's does not."""
    own, around = {*script.parents(node)}, {*script.parents(block)}
    choices = (each for each in own & around if isinstance(each, cst.If))
    return any((each.body in own) != (each.body in around) for each in choices)


def _plan_scope(script: Script, call: cst.Call, blocks: _Nodes) -> None:
    """Plan scopes of the script's strategy around what makes an object, or report."""
    if all(_is_instead(script, call, block) for block in blocks):
        return
    places = _places(script, call, blocks, 3)
    if places is None:
        script.leave(call, MESSAGES["outside_scope"])
    for statement, strategy in places or ():
        if statement not in script.replacements:
            _wrap_in_scope(script, [statement], strategy)


def _places(
    script: Script, node: cst.CSTNode, blocks: _Nodes, depth: int
) -> list[tuple[cst.CSTNode, str]] | None:
    """The statements to put in a scope: that of a node, or of the calls around it.

    Returns:
        The statements, each with its strategy; None where one has none.
    """
    statement = script.statement_of(node)
    strategy = _strategy_before(script, statement, blocks)
    # The layers of a functional model are built by then.
    is_functional = script.called(node) in {"keras.Model", "keras.models.Model"}
    if strategy and only_of(statement) and not is_functional:
        return [(statement, strategy)]
    function = script.function_of(node)
    calls = [c for c in script.calls if function in _called(script, last_name(c.func))]
    found = [_places(script, c, blocks, depth - 1) for c in calls if depth]
    if not found or None in found:
        return None
    return [place for each in found for place in each or ()]


def _strategy_before(
    script: Script, statement: cst.CSTNode, blocks: _Nodes
) -> str | None:
    """The script's strategy, if it has one that is there in a statement."""
    names = set()
    for block in blocks:
        strategy = strategy_of(script, block)
        if not _is_there(script, strategy, block, statement):
            return None
        names.add(script.code(strategy))
    return names.pop() if len(names) == 1 else None


def _is_there(
    script: Script, strategy: Expression, block: cst.CSTNode, statement: cst.CSTNode
) -> bool:
    """Whether the strategy of a scope's block is made where a statement runs."""
    if isinstance(strategy, cst.Attribute) and is_name(strategy.value, "self"):
        return script.class_around(block) is script.class_around(statement)
    function = script.function_of(statement)
    params = function.params.params if function is not None else ()
    if any(param.name.deep_equals(strategy) for param in params):
        return True
    found = [d.node for d in script.flow.reaching(strategy)]
    if not found or not isinstance(strategy, cst.Name):
        return False
    around = {*script.parents(statement)}
    if any(isinstance(script.parent(each), cst.Param) for each in found):
        return len(found) == 1 and script.statement_of(found[0]) in around
    homes = {script.function_of(each) for each in found}
    if homes == {None} and function is not None:
        return True  # Of the module, which runs before its functions do.
    made = [script.statement_of(each) for each in found]
    if len(made) > 1:  # The block needs one of them: they are in branches.
        made = [_branch(script, each, around) for each in made]
    return homes <= {None, *around} and all(
        script.parent(each) in around and script.line(each) < script.line(statement)
        for each in made
    )


def _branch(script: Script, node: cst.CSTNode, around: set[cst.CSTNode]) -> cst.CSTNode:
    """The statement that a node is in, of the blocks around another statement."""
    parents = (each for each in script.parents(node) if script.parent(each) in around)
    return node if script.parent(node) in around else next(parents, node)


def _constants(script: Script, variables: set[cst.Call]) -> list[cst.Call]:
    """Variables that no model has, that are written, and that a loss reads.

    A loss is any function that no strategy runs, and no layer or callback has.
    """
    written: set[cst.Call] = set()
    read: set[cst.Call] = set()
    for node in script.nodes(cst.Name, cst.Attribute):
        found = variables.intersection(meanings(script, node))
        if found and _is_written(script, node):
            written |= found
        elif found and _is_read_in_loss(script, node):
            read |= found
    return [
        call
        for call in script.calls
        if call in written & read and not _has_owner(script, call)
    ]


def _is_written(script: Script, node: Expression) -> bool:
    """Whether an expression is assigned to, or is given to a class that may do so."""
    call = script.call_with(node)
    if call is None:
        return attr_of(script.parent(node)) in NAMES["assign_methods"]
    if script.called(call) in NAMES["backend_writes"]:
        return call.args[0].value is node
    owners = script.classes(call.func.value) if isinstance(call.func, cst.Name) else ()
    return any(
        method_of(each) in NAMES["assign_methods"]
        or script.called(each) in NAMES["backend_writes"]
        for owner in owners
        for each in find(owner, cst.Call)
    )


def _is_read_in_loss(script: Script, node: Expression) -> bool:
    """Whether an expression is an operand in a function that `fit` compiles."""
    function = script.around(node, cst.FunctionDef, cst.Lambda)
    if function is None or is_traced(script, node):
        return False
    owner = script.class_around(node)
    if is_class_of(script, owner, (*_OWNERS, "callback")):
        return False
    if script.called(script.call_with(node)) in DEVICE_OPERATORS:
        return True
    operations = (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison)
    return isinstance(script.parent(node), operations)


def _has_owner(script: Script, call: cst.Call) -> bool:
    """Whether a layer, model or metric has an object, which makes it a model's."""
    is_own = isinstance(script.target_of(call), cst.Attribute)
    return is_own and is_class_of(script, script.class_around(call), _OWNERS)


# Scripts without a strategy.

_FITS = {"fit", "fit_generator"}
_STEPS = {
    "train_step": _FITS,
    "test_step": {*_FITS, "evaluate", "evaluate_generator"},
    "predict_step": {"predict", "predict_generator"},
}
"""Steps of a model, and the methods that call them."""


def plan_models(script: Script) -> None:
    """Plan a scope around models with a step of their own and `compile`, or report."""
    if has_scope(script):
        return
    methods = {method_of(call) for call in script.calls}
    for name, callers in _STEPS.items():
        for function in script.functions(name) if methods & callers else ():
            owner = class_of(script, function)
            is_open = not all(map(script.names.path, foreign_bases(script, owner)))
            is_model = is_open or is_class_of(script, owner, ("model",))
            if owner is None or not is_model:
                continue
            lines = _compiled_lines(script, owner)
            if lines is None:
                script.leave(function.name, MESSAGES["no_strategy"].format(name))
            elif lines[0] not in script.replacements:
                _wrap_in_scope(script, lines)


def _compiled_lines(
    script: Script, owner: cst.ClassDef
) -> Sequence[cst.CSTNode] | None:
    """The lines from a class's only instantiation to `compile`; None if unclear."""
    made = [c for c in script.calls if is_name(c.func, owner.name.value)]
    bound = script.parent(made[0]) if len(made) == 1 else None
    if not isinstance(bound, cst.Assign) or len(bound.targets) != 1:
        return None
    compiles = f"{script.code(bound.targets[0].target)}.compile"
    compiled = [c for c in script.calls if script.code(c.func) == compiles]
    if len(compiled) > 1:  # The name stands for other models, too.
        values = ((c, script.flow.resolved(object_of(c))) for c in compiled)
        compiled = [c for c, value in values if value is made[0]]
    first = script.statement_of(bound)
    block = script.parent(first)
    lines = block.body if isinstance(block, cst.IndentedBlock | cst.Module) else ()
    last = script.statement_of(compiled[0]) if len(compiled) == 1 else None
    if last not in lines or first not in lines:
        return None
    found = lines[lines.index(first) : lines.index(last) + 1]
    is_plain = all(isinstance(line, cst.SimpleStatementLine) for line in found)
    return found if found and is_plain else None
