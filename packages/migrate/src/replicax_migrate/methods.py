"""Rules for methods of strategies, iterators, checkpoints and objects of Keras.

`x.numpy()` becomes `keras.ops.convert_to_numpy(x)`. The method's name selects the rule.
"""

from dataclasses import replace

import libcst as cst

from replicax_migrate.compile_calls import port_compile, port_fit
from replicax_migrate.edits import Edits
from replicax_migrate.kinds import is_class_of, is_kind
from replicax_migrate.rules import (
    CallSite,
    Rule,
    by_keywords,
    by_template,
    port_keywords,
)
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    MESSAGES,
    METHOD_TEMPLATES,
    NAMES,
    RENAMED_METHODS,
)
from replicax_migrate.tracing import (
    calls_estimator_spec,
    class_of_method,
    external_bases,
)
from replicax_migrate.tree import (
    calls_super,
    first_name,
    has_keyword,
    is_name,
    join_args,
    method_name,
    methods_of,
    string_of,
    with_keyword,
)
from replicax_migrate.values import with_bases

__all__ = ["plan_resets", "port_method"]


def port_method(site: CallSite) -> Expression:
    """Port a call of a method; return the call itself for an unknown method.

    Raises:
        Unported: If the call must stay.
    """
    name = site.method
    if not name or _is_of_module(site.script, site.node):
        return site.updated
    if name in NAMES["often_own_methods"] and site.script.functions(name):
        return site.updated
    if name in RENAMED_METHODS:
        return site.as_method(RENAMED_METHODS[name])
    rule = _METHODS.get(name)
    return rule(site) if rule else site.updated


def _is_of_module(script: Script, node: cst.Call) -> bool:
    """Whether a call is a function of an imported module: `inspect.unwrap(f)`."""
    root = first_name(node.func)
    name = script.names.imported(root) if root else None
    return name is not None and "." not in name


# Tensors, iterators and strategies.


def _numpy(site: CallSite) -> Expression:
    if site.updated.args:
        return site.updated
    value = site.receiver
    if site.script.runs_on_host(site.node):
        return value
    if not isinstance(value, cst.GeneratorExp):
        value = value.with_changes(lpar=[], rpar=[])
    return site.make("keras.ops.convert_to_numpy({x})", x=value)


def _optional_rule(text: str) -> Rule:
    """Make a rule for a method of the result of `get_next_as_optional`."""

    def rule(site: CallSite) -> Expression:
        optional = site.script.flow.resolve(site.owner)
        if site.updated.args or method_name(optional) != "get_next_as_optional":
            return site.updated
        return site.make(text, x=site.receiver)

    return rule


# Keras' objects.


def plan_resets(script: Script) -> Edits:
    """Plan to rename definitions of `reset_states` in metrics and layers.

    Keras 3 does not call `reset_states`.
    """
    edits = Edits()
    owners = {class_of_method(script, f) for f in script.functions("reset_state")}
    for function in script.functions("reset_states"):
        owner = class_of_method(script, function)
        if owner not in owners and _has_reset_states(script, owner):
            edits.replacements[function.name] = lambda _: cst.Name("reset_state")
    return edits


def _has_reset_states(script: Script, owner: cst.ClassDef | None) -> bool:
    """Whether a class derives from a class of Keras with `reset_states`."""
    paths = [script.names.tf_path(base) for base in external_bases(script, owner)]
    return any(path and path.startswith(NAMES["with_resets"]) for path in paths)


def _save(site: CallSite) -> Expression:
    """Port `model.save(...)`: drop `save_format=`, since the suffix decides."""
    has_name = "model" in site.script.code(site.receiver).lower()
    is_model = has_name or is_kind(site.script, site.owner, "model")
    return site.with_args(port_keywords(site, "save" if is_model else "checkpoint"))


def _add_weight(site: CallSite) -> Expression:
    """Add keywords to the arguments of `add_weight`: in Keras 3, the shape is first."""
    names = ["name", "shape", "dtype", "initializer"]
    kept = [a for a in site.updated.args if not _is_default(a)]
    site = replace(site, updated=site.with_args(join_args(site.updated.args, kept)))
    args = site.updated.args
    positional = [a for a in args if a.keyword is None]
    is_old = site.method == "add_variable" or any(has_keyword(a, "shape") for a in args)
    texts = (cst.SimpleString, cst.FormattedString)
    if not is_old and not (positional and isinstance(positional[0].value, texts)):
        return site.updated
    return site.name_args(names).as_method("add_weight")


def _is_default(arg: cst.Arg) -> bool:
    """Whether an argument is `synchronization=` with the default of Keras 3."""
    defaults = ("auto", "on_write")
    return has_keyword(arg, "synchronization") and string_of(arg.value) in defaults


def _constructor(site: CallSite) -> Expression:
    """Port `super().__init__(self)`, which Keras 3 refuses, to `super().__init__()`.

    Add keywords to positional arguments of losses and metrics, and to a layer's name.
    """
    args = site.updated.args
    if not calls_super(site.updated):
        return site.updated
    if len(args) == 1 and is_name(args[0].value, "self"):
        return site.updated.with_changes(args=[])
    owner = site.script.class_around(site.node)
    bases = (base for base in with_bases(site.script, owner) if base is not owner)
    if any("__init__" in methods_of(base) for base in bases):
        return site.updated  # `super().__init__` is a method of the script.
    is_layer = owner and is_class_of(site.script, owner, ("layer", "model"))
    if is_layer and len(args) == 1 and isinstance(args[0].value, cst.SimpleString):
        # Scripts pass a name here; Keras 2 accepted it as the value of `trainable`.
        return site.with_args([with_keyword(args[0], "name")])
    paths = [site.script.names.tf_path(b) for b in external_bases(site.script, owner)]
    return (
        site.name_moved_args(paths[0]).updated if paths and paths[0] else site.updated
    )


def _update_state(site: CallSite) -> Expression:
    """Port `self.compiled_metrics.update_state(...)` to `self.compute_metrics(...)`."""
    if not site.script.code(site.receiver).endswith("compiled_metrics"):
        return site.updated
    is_alone = isinstance(site.script.parent(site.node), cst.Expr)
    if not isinstance(site.receiver, cst.Attribute) or not is_alone:
        raise Unported(MESSAGES["compiled_metrics"])
    func = cst.Attribute(site.receiver.value, cst.Name("compute_metrics"))
    args = port_keywords(site, "update_state")
    x = cst.Arg(cst.Name("None"))
    if not args or args[0].keyword:
        x = with_keyword(x, "x")
    return site.updated.with_changes(func=func, args=[x, *args])


def _apply_gradients(site: CallSite) -> Expression:
    function = site.script.function_of(site.node)
    in_model_fn = function is not None and calls_estimator_spec(site.script, function)
    if not in_model_fn and any(has_keyword(a, "global_step") for a in site.node.args):
        raise Unported("apply_gradients increments optimizer.iterations: use it")
    return site.with_args(port_keywords(site, "apply_gradients"))


def _reset(site: CallSite) -> Expression:
    """Port `reset_states` of Keras' objects, unless other classes define the method."""
    script = site.script
    owners = [class_of_method(script, f) for f in script.functions("reset_states")]
    if not all(_has_reset_states(script, owner) for owner in owners):
        return site.updated
    return site.as_method("reset_state")


_METHODS: dict[str, Rule] = {
    **{
        name: by_template(text, *names)
        for name, (names, text) in METHOD_TEMPLATES.items()
    },
    **dict.fromkeys(("restore", "write", "read"), by_keywords("checkpoint")),
    **dict.fromkeys(("fit", "evaluate", "predict"), port_fit),
    **{f"{name}_generator": port_fit for name in ("fit", "evaluate", "predict")},
    "numpy": _numpy,
    "has_value": _optional_rule("({x} is not None)"),
    "get_value": _optional_rule("{x}"),
    "compile": port_compile,
    "save": _save,
    "save_weights": by_keywords("save_weights"),
    "add_loss": by_keywords("add_loss"),
    "add_weight": _add_weight,
    "add_variable": _add_weight,
    "__init__": _constructor,
    "update_state": _update_state,
    "apply_gradients": _apply_gradients,
    "reset_states": _reset,
}
"""Rules by name of the method."""
