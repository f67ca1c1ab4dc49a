"""Rules for methods of strategies, iterators, checkpoints and Keras' objects."""

from dataclasses import replace

import libcst as cst

from replicax_migrate.compile_calls import compiled, fitted
from replicax_migrate.files import (
    MODELS,
    WEIGHTS,
    is_unbuilt_at,
    latest_checkpoint,
    newest_weights,
    plan_folder,
    report_path,
)
from replicax_migrate.kinds import is_class_of, is_kind, kind_of, makers, own_methods
from replicax_migrate.optimizer_calls import is_logs
from replicax_migrate.origins import definitions, with_bases
from replicax_migrate.rules import CallSite, Rule, by_keywords, with_keywords, written
from replicax_migrate.script import Expression, Script, Unported
from replicax_migrate.tables import (
    LEFT_METHODS,
    MESSAGES,
    NAMES,
    RENAMED_METHODS,
    WRITTEN_METHODS,
)
from replicax_migrate.tracing import class_of, foreign_bases, makes_spec
from replicax_migrate.tree import (
    is_name,
    is_named,
    is_of_super,
    keyword,
    last_name,
    method_of,
    methods_of,
    parts_of,
    renamed,
    root_of,
    text_of,
    without,
)

__all__ = ["plan_resets", "ported_method"]


def ported_method(site: CallSite) -> Expression:
    """Port a call of a method; the call itself where no rule is for it.

    Raises:
        Unported: If it must stay as it is.
    """
    name = site.method
    if not name or _is_of_module(site.script, site.node):
        return site.updated
    if name in NAMES["often_own_methods"] and site.script.functions(name):
        return site.updated
    if name in LEFT_METHODS:
        raise Unported(f".{name}: {LEFT_METHODS[name]}")
    if name in RENAMED_METHODS:
        return site.as_method(RENAMED_METHODS[name])
    rule = _METHODS.get(name)
    return rule(site) if rule else site.updated


def _is_of_module(script: Script, node: cst.Call) -> bool:
    """Whether a call is of a function of an imported module: `inspect.unwrap(f)`."""
    root = root_of(node.func)
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


def _of_optional(text: str) -> Rule:
    """Make the rule for a method of a result of `get_next_as_optional`."""

    def rule(site: CallSite) -> Expression:
        value = site.owner
        made = site.script.flow.value(value) if isinstance(value, cst.Name) else value
        is_optional = method_of(made) == "get_next_as_optional"
        if site.updated.args or not is_optional:
            return site.updated
        return site.make(text, x=site.receiver)

    return rule


def _experimental_run(site: CallSite) -> Expression:
    """Port `strategy.experimental_run(step, iterator)`, the oldest form of `run`."""
    step, iterator = site.ported(0, "fn"), site.ported(1, "input_iterator")
    if step is None:
        raise Unported("experimental_run without a function: use strategy.run")
    args = [cst.Arg(step)]
    if iterator is not None:
        args.append(keyword("args", site.make("(next({x}),)", x=iterator)))
    return site.as_method("run", args)


def _dataset_iterator(name: str) -> Rule:
    """Make the rule for `iter(strategy.name(...))`, which keeps its lines."""
    return lambda site: site.make("iter({x})", x=site.as_method(name))


def _run(site: CallSite) -> Expression:
    """Leave what runs in a session that the script does not make."""
    values = (v for each in definitions(site.script, site.owner) for v in each.values)
    is_made = any(isinstance(value, cst.Call) for value in values)
    if last_name(site.owner).strip("_") in {"sess", "session"} and not is_made:
        raise Unported(MESSAGES["session"])
    return site.updated


# Keras' objects.


def plan_resets(script: Script) -> None:
    """Plan `reset_state` for `reset_states` of metrics and layers of the script.

    Keras 3 calls no other; calls of it in the script are renamed, too.
    """
    known = {class_of(script, each) for each in script.functions("reset_state")}
    for function in script.functions("reset_states"):
        owner = class_of(script, function)
        if owner is None or owner in known:
            continue
        paths = [script.names.path(base) for base in foreign_bases(script, owner)]
        if any(path and path.startswith(NAMES["with_resets"]) for path in paths):
            script.replacements[function.name] = lambda _: cst.Name("reset_state")


def _save(site: CallSite) -> Expression:
    is_named = "model" in site.script.code(site.receiver).lower()
    if not (is_named or is_kind(site.script, site.owner, "model")):
        return site.with_args(with_keywords(site, "checkpoint"))
    return _written(site, MODELS, "save")


def _written(site: CallSite, endings: tuple[str, ...], table: str) -> Expression:
    """Port `model.save(...)`: drop `save_format=`, which the file's suffix decides."""
    if endings == WEIGHTS:
        _require_built(site)
    report_path(site.script, site.node, endings)
    plan_folder(site.script, site.node, site.updated)
    return site.with_args(with_keywords(site, table))


def _require_built(site: CallSite) -> None:
    if is_unbuilt_at(site.script, site.node):
        raise Unported(MESSAGES["unbuilt"])


def _load_weights(site: CallSite) -> Expression:
    script, path = site.script, site.given(0, "filepath")
    latest = latest_checkpoint(script, path) if path is not None else None
    if latest is not None and not newest_weights(script, latest):
        script.leave(site.node, MESSAGES["latest_checkpoint"])
    _require_built(site)
    report_path(script, site.node, (*WEIGHTS, *MODELS), is_read=True)
    return site.updated


def _build(site: CallSite) -> Expression:
    """Port `build` of a subclassed model, a no-op in Keras 3, to a call with zeros."""
    script = site.script
    made = makers(script, site.owner)
    is_subclass = any(isinstance(each, cst.ClassDef) for each in made)
    is_own = bool(own_methods(script, site.owner, "build"))
    if not is_subclass or is_own or not is_kind(script, site.owner, "model"):
        return site.updated
    shape = script.shown(site.node, 0, "input_shape")
    first, *sizes = [script.code(part) for part in parts_of(shape)] or ["", "None"]
    if "None" in sizes:
        raise Unported(MESSAGES["build"])
    numbers = ", ".join(["1" if first == "None" else first, *sizes])
    numbers += "" if sizes else ","
    return site.make(f"{{x}}(keras.ops.zeros(({numbers})))", x=site.receiver)


def _output_shape(site: CallSite) -> Expression:
    """Port `compute_output_shape` of a layer of the script that does not define it."""
    script, shape = site.script, site.ported(0, "input_shape")
    made = makers(script, site.owner)
    is_ours = bool(made) and all(isinstance(each, cst.ClassDef) for each in made)
    methods = own_methods(script, site.owner, site.method)
    if shape is None or methods or not is_ours:
        return site.updated
    text = "{x}.compute_output_spec(keras.KerasTensor({shape})).shape"
    return site.make(text, x=site.receiver, shape=shape)


def _add_weight(site: CallSite) -> Expression:
    """Name the arguments of `add_weight`, where the shape comes first in Keras 3."""
    names = ["name", "shape", "dtype", "initializer"]
    kept = [a for a in site.updated.args if not _is_usual(a)]
    site = replace(site, updated=site.with_args(without(site.updated.args, kept)))
    args = site.updated.args
    given = [a for a in args if a.keyword is None]
    is_old = site.method == "add_variable" or any(is_named(a, "shape") for a in args)
    texts = (cst.SimpleString, cst.FormattedString)
    if not is_old and not (given and isinstance(given[0].value, texts)):
        return site.updated
    return site.with_names(names).as_method("add_weight")


def _is_usual(arg: cst.Arg) -> bool:
    """Whether an argument says when variables are equal, as those of Keras 3 are."""
    usual = ("auto", "on_write")
    return is_named(arg, "synchronization") and text_of(arg.value) in usual


def _adapt(site: CallSite) -> Expression:
    made = site.script.flow.value(site.owner)
    if site.script.called(made).endswith(".Discretization"):
        raise Unported(MESSAGES["discretization"])
    return site.updated


def _constructor(site: CallSite) -> Expression:
    """Port `super().__init__(self)`, which Keras 3 refuses, to `super().__init__()`.

    The arguments of a loss or metric get their names, of which Keras 3 has another
    order, and so does the name of a layer.
    """
    args = site.updated.args
    if not is_of_super(site.updated):
        return site.updated
    if len(args) == 1 and is_name(args[0].value, "self"):
        return site.updated.with_changes(args=[])
    around = site.script.class_around(site.node)
    ours = (each for each in with_bases(site.script, around) if each is not around)
    if any("__init__" in methods_of(each) for each in ours):
        return site.updated  # It is the method of a class of the script.
    is_layer = around and is_class_of(site.script, around, ("layer", "model"))
    if is_layer and len(args) == 1 and isinstance(args[0].value, cst.SimpleString):
        # Keras 2 took it for `trainable`; what it says is a name.
        return site.with_args([renamed(args[0], "name")])
    paths = [site.script.names.path(b) for b in foreign_bases(site.script, around)]
    return site.in_order(paths[0]).updated if paths and paths[0] else site.updated


def _update_state(site: CallSite) -> Expression:
    """Port `self.compiled_metrics.update_state(...)` to `self.compute_metrics(...)`."""
    if not site.script.code(site.receiver).endswith("compiled_metrics"):
        return site.updated
    is_alone = isinstance(site.script.parent(site.node), cst.Expr)
    if not isinstance(site.receiver, cst.Attribute) or not is_alone:
        raise Unported(MESSAGES["compiled_metrics"])
    func = cst.Attribute(site.receiver.value, cst.Name("compute_metrics"))
    args = with_keywords(site, "update_state")
    x = cst.Arg(cst.Name("None"))
    if not args or args[0].keyword:
        x = renamed(x, "x")
    return site.updated.with_changes(func=func, args=[x, *args])


_UPDATES = {"assign": "set", "assign_add": "add", "assign_sub": "subtract"}


def _assigned(site: CallSite) -> Expression:
    """Port `v[i].assign(x)` of a variable, whose elements are arrays in Keras 3."""
    of, args = site.receiver, site.updated.args
    whole = site.owner.value if isinstance(site.owner, cst.Subscript) else None
    is_part = whole is not None and kind_of(site.script, whole) == "variable"
    if not (isinstance(of, cst.Subscript) and is_part and args):
        return site.updated
    at = of.with_changes(value=site.make("{x}.value.at", x=of.value))
    text = f"{{v}}.assign({{at}}.{_UPDATES[site.method]}({{x}}))"
    return site.make(text, v=of.value, at=at, x=args[0].value)


def _apply_gradients(site: CallSite) -> Expression:
    function = site.script.function_of(site.node)
    is_counted = function is not None and makes_spec(site.script, function)
    if not is_counted and any(is_named(a, "global_step") for a in site.node.args):
        raise Unported("apply_gradients counts optimizer.iterations itself")
    return site.with_args(with_keywords(site, "apply_gradients"))


def _minimize(site: CallSite) -> Expression:
    code = site.script.code
    is_named = "opt" in code(site.receiver) or "optimizer" in code(site.node).lower()
    if not is_named:
        return site.updated
    raise Unported(MESSAGES["minimize"])


def _unscaled(site: CallSite) -> Expression:
    gradients = site.ported(0, "grads")
    if gradients is None:
        raise Unported("get_unscaled_gradients: `apply_gradients` of Keras 3 does it")
    site.note("gradients are unscaled by `apply_gradients`, after clipping")
    return gradients


def _variables(site: CallSite) -> Expression:
    """Refuse `optimizer.variables()`, which is a list in Keras 3."""
    if is_kind(site.script, site.owner, "optimizer"):
        raise Unported("variables of an optimizer is a list, in another order")
    return site.updated


def _reset(site: CallSite) -> Expression:
    """Port `reset_states` of a metric, a recurrent layer, or a model of such layers.

    That of a class of the script's own, which is none of Keras, stays.
    """
    script = site.script
    methods = own_methods(script, site.owner, "reset_states")
    owners = filter(None, (class_of(script, each) for each in methods))
    bases = [map(script.names.path, foreign_bases(script, each)) for each in owners]
    is_model = is_kind(script, site.owner, "model")
    if not all(map(any, bases)) or (methods and is_model):
        return site.updated
    if is_model:
        text = (
            "[layer.reset_state() for layer in {x}.layers "
            'if getattr(layer, "stateful", False)]'
        )
        return site.make(text, x=site.receiver)
    if site.updated.args:
        raise Unported("reset_state of Keras 3 takes no values: assign to each state")
    return site.as_method("reset_state")


def _rate(site: CallSite) -> Expression:
    """Port a call of a schedule, `optimizer.learning_rate(optimizer.iterations)`."""
    script, args = site.script, site.node.args
    if not is_kind(script, site.owner, "optimizer"):
        return site.updated
    now = f"{script.code(site.owner)}.iterations"
    if len(args) == 1 and script.code(args[0].value) == now:
        return site.updated.func
    raise Unported(MESSAGES["no_schedule"])


def _updated_logs(site: CallSite) -> Expression:
    """Port `logs.update(lr=rate)` to the key of Keras 3, `learning_rate`."""
    if not is_logs(site.script, site.owner):
        return site.updated
    return site.with_args(with_keywords(site, "logs"))


_METHODS: dict[str, Rule] = {
    **{name: written(text, *names) for name, (names, text) in WRITTEN_METHODS.items()},
    **dict.fromkeys(("restore", "write", "read"), by_keywords("checkpoint")),
    **dict.fromkeys(("train_on_batch", "test_on_batch"), by_keywords("train_on_batch")),
    **dict.fromkeys(("fit", "evaluate", "predict"), fitted),
    **{f"{name}_generator": fitted for name in ("fit", "evaluate", "predict")},
    "numpy": _numpy,
    "run": _run,
    "has_value": _of_optional("({x} is not None)"),
    "get_value": _of_optional("{x}"),
    "experimental_run": _experimental_run,
    "make_dataset_iterator": _dataset_iterator("experimental_distribute_dataset"),
    "make_input_fn_iterator": _dataset_iterator("distribute_datasets_from_function"),
    "compile": compiled,
    "save": _save,
    "save_weights": lambda site: _written(site, WEIGHTS, "save_weights"),
    "load_weights": _load_weights,
    "add_loss": by_keywords("add_loss"),
    "add_weight": _add_weight,
    "add_variable": _add_weight,
    "adapt": _adapt,
    "__init__": _constructor,
    "build": _build,
    "compute_output_shape": _output_shape,
    **dict.fromkeys(_UPDATES, _assigned),
    "update_state": _update_state,
    "apply_gradients": _apply_gradients,
    "minimize": _minimize,
    "get_unscaled_gradients": _unscaled,
    "reset_states": _reset,
    "update": _updated_logs,
    "variables": _variables,
    "lr": _rate,
    "learning_rate": _rate,
}
"""Rules by the name of the method."""
