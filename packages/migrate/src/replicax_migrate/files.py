"""Ports file names of models and weights to the suffixes that Keras 3 requires.

A name gets the suffix where all its uses are in sight; other names are reported.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from replicax_migrate.kinds import is_kind, origins, own_methods
from replicax_migrate.origins import definitions, returned
from replicax_migrate.scopes import is_unbuilt
from replicax_migrate.script import Expression, Script
from replicax_migrate.tables import MESSAGES, NAMES
from replicax_migrate.tree import (
    dotted,
    is_name,
    last_name,
    method_of,
    named,
    object_of,
    parts_of,
    reached,
    root_of,
    text_of,
    value_of,
)

__all__ = [
    "MODELS",
    "WEIGHTS",
    "is_unbuilt_at",
    "is_weights_only",
    "latest_checkpoint",
    "newest_weights",
    "plan_files",
    "plan_folder",
    "report_path",
]


MODELS = (".keras", ".h5", ".hdf5")
"""Suffixes of files of whole models."""
_CHECKPOINTS = MODELS[:2]
"""Suffixes of files of whole models that `ModelCheckpoint` takes."""
WEIGHTS = (".weights.h5",)
"""Suffixes of files of weights alone."""


class _Site(NamedTuple):
    """A call that writes or reads a file.

    Attributes:
        path: The argument with the file's name.
        endings: The suffixes to choose from, if the call writes the file; else empty.
        is_trained: Whether the call loads a model that is trained further.
        is_sure: Whether Keras writes or reads the file, not perhaps another package.
    """

    path: Expression
    endings: tuple[str, ...]
    is_trained: bool = False
    is_sure: bool = True


def plan_files(script: Script) -> None:
    """Plan suffixes for literals that name only files of models and weights."""
    sites = list(_sites(script))
    known = {node for site in sites for node in _path_nodes(script, site.path)}
    groups: dict[str, list[tuple[_Site, cst.SimpleString]]] = {}
    for site in sites:
        for literal in _literals(script, site.path):
            groups.setdefault(text_of(literal), []).append((site, literal))
    here = {literal for group in groups.values() for _, literal in group}
    others = [text_of(n) for n in script.nodes(cst.SimpleString) if n not in here]
    for text, group in groups.items():
        written = {site.endings for site, _ in group if site.endings}
        ends = {endings[0] for endings in written}
        stem = text.rstrip("/")
        # Other literals may name the file too, such as `cp.index`; `export/1` is a
        # version for a model server.
        is_elsewhere = stem and any(other.startswith(stem) for other in others)
        is_version = stem.rpartition("/")[2].isdigit()
        is_sure = any(site.is_sure for site, _ in group)
        if len(ends) != 1 or is_elsewhere or is_version or not is_sure:
            continue
        (end,) = ends
        right = WEIGHTS if end in WEIGHTS else MODELS
        if _CHECKPOINTS in written:
            right = _CHECKPOINTS
        if any(site.is_trained for site, _ in group):
            right = MODELS[:1]
        is_alone = all(_is_for_files_alone(script, s.path, known) for s, _ in group)
        if not text.endswith(right) and is_alone:
            for literal in {literal for _, literal in group}:
                _plan_end(script, literal, end, right)


def _plan_end(
    script: Script, literal: cst.SimpleString, end: str, right: tuple[str, ...]
) -> None:
    stem = literal.raw_value.rstrip("/")
    if end in WEIGHTS or right == MODELS[:1]:
        stem = stem.removesuffix(".h5").removesuffix(".hdf5")
    elif stem.endswith(".hdf5"):  # The same format, by the suffix that Keras 3 takes.
        stem, end = stem.removesuffix(".hdf5"), ".h5"
    made = f"{literal.prefix}{literal.quote}{stem}{end}{literal.quote}"
    script.files[literal] = stem + end
    script.note(literal, f"Keras 3 wants a file name that ends with {end}: {stem}{end}")
    script.replacements[literal] = lambda updated: cst.SimpleString(made)


def _sites(script: Script) -> Iterator[_Site]:
    for call in script.calls:
        path, method = script.called(call), method_of(call)
        position, endings, is_sure = 0, None, True
        if path == "keras.callbacks.ModelCheckpoint":
            endings = WEIGHTS if is_weights_only(call) else _CHECKPOINTS
        elif path == "keras.models.save_model":
            position, endings = 1, MODELS
        elif path == "keras.models.load_model" or method == "load_weights":
            endings = ()
        elif method == "save_weights":
            endings = WEIGHTS
        elif method == "save" and not path:
            inner = object_of(call)
            if is_kind(script, inner, "model"):
                endings, is_sure = MODELS, not _is_foreign(script, inner)
        given = value_of(call, position, "filepath")
        if endings is not None and given is not None:
            yield _Site(given, endings, _is_trained_later(script, call), is_sure)


def _is_trained_later(script: Script, load: cst.Call) -> bool:
    """Whether a call of `load_model` gives a compiled model that is trained."""
    if not script.called(load).endswith("models.load_model"):
        return False
    trained = (c for c in script.calls if method_of(c) in NAMES["training_methods"])
    is_compiled = not is_name(named(load, "compile"), "False")
    return is_compiled and any(load in origins(script, object_of(c)) for c in trained)


def _is_foreign(script: Script, node: Expression) -> bool:
    """Whether an object comes from a function of a package other than TensorFlow."""
    made = script.flow.value(node)
    root = root_of(made.func) if isinstance(made, cst.Call) else None
    is_imported = root is not None and script.names.imported(root) is not None
    return is_imported and not script.called(made)


def is_weights_only(call: cst.Call) -> bool:
    """Whether a `ModelCheckpoint` saves weights alone."""
    return is_name(named(call, "save_weights_only"), "True")


def _literals(script: Script, node: Expression) -> list[cst.SimpleString]:
    """The literals that a path may end with; empty if one of them is not in sight.

    The default of an option is not rewritten.
    """
    nodes = _path_nodes(script, node)
    ends = _ends(script, node)
    found = [n for n in ends if isinstance(n, cst.SimpleString) and n.evaluated_value]
    is_option = any(isinstance(each, cst.Attribute) for each in nodes)
    return found if found == ends and not is_option else []


def _path_nodes(script: Script, node: Expression) -> list[Expression]:
    """A path, and the expressions that its last part resolves to."""
    return list(reached([node], lambda each: _last_parts(script, each)))


def _ends(script: Script, node: Expression) -> list[Expression]:
    """The expressions that a path ends with, as far as they resolve."""
    nodes = _path_nodes(script, node)
    return [each for each in nodes if not _last_parts(script, each)]


def _is_for_files_alone(
    script: Script, path: Expression, known: set[Expression]
) -> bool:
    """Whether the variables that a path ends with are used for known paths alone."""
    for node in _path_nodes(script, path):
        for definition in script.flow.reaching(node):
            for use in script.flow.uses(definition):
                if use not in known and not _is_shown(script, use):
                    return False
    return True


def _is_shown(script: Script, use: cst.CSTNode) -> bool:
    """Whether a path is only printed, or its folder or name is taken."""
    call = script.call_with(use)
    name = dotted(call.func) if call is not None else None
    return name in {"print", "os.path.basename", "os.path.dirname"}


def report_path(
    script: Script,
    node: cst.Call,
    endings: tuple[str, ...],
    position: int = 0,
    is_read: bool = False,
) -> None:
    """Report a file name whose suffix Keras 3 refuses, or that is not in sight.

    Args:
        script: The script.
        node: A call with a path.
        endings: What the path may end with.
        position: Which argument the path is, if it is not called `filepath`.
        is_read: Whether the file is read, so that its writer was reported.
    """
    path = value_of(node, position, "filepath")
    if path is None:
        return
    texts = [_text(script, each) for each in _ends(script, path)]
    ends = [text for text in texts if text is not None]
    is_keras = all(end.endswith(MODELS[0]) for end in ends)
    wanted = f"Keras 3 wants a file name that ends with {' or '.join(endings[:2])}"
    if len(ends) < len(texts):
        if not is_read:
            script.leave(node, f"{wanted}: see that `{script.code(path)}` does")
    elif is_read and not is_keras and _is_trained_later(script, node):
        script.leave(node, MESSAGES["hdf5"])
    elif not all(end.endswith(endings) for end in ends):
        script.leave(node, wanted)
    elif _default_of(script, path) is not None:
        script.note(node, f"{wanted}, also those that the command line gives")


def plan_folder(script: Script, node: cst.Call, updated: cst.Call) -> None:
    """Plan `os.makedirs` for a file's folder, which TensorFlow's formats created."""
    before, path = value_of(node, 0, "filepath"), value_of(updated, 0, "filepath")
    if before is None or path is None:
        return
    names = [n for n in _literals(script, before) if n in script.files]
    is_joined = any("join" in script.code(n) for n in _path_nodes(script, before))
    if not names or not (is_joined or any("/" in n.value for n in names)):
        return
    statement = script.statement_of(node)
    if not isinstance(statement, cst.SimpleStatementLine):
        script.leave(node, "Keras 3 does not make the folder of a file: make it before")
        return
    if isinstance(path, cst.SimpleString):
        folder = path.raw_value.rpartition("/")[0] or "/"
        text = f'os.makedirs("{folder}", exist_ok=True)'
    else:
        text = 'os.makedirs(os.path.dirname({path}) or ".", exist_ok=True)'
    values = {} if isinstance(path, cst.SimpleString) else {"path": path}
    line = script.code(script.template(text, **values))
    script.insert(statement, line)


def latest_checkpoint(script: Script, node: Expression) -> cst.Call | None:
    """The call of `tf.train.latest_checkpoint` that a value comes from, if it does."""
    value = script.flow.value(node) if isinstance(node, cst.Name) else node
    if isinstance(value, cst.Name):
        return latest_checkpoint(script, value)
    is_latest = script.called(value) == "train.latest_checkpoint"
    return value if is_latest and isinstance(value, cst.Call) else None


def newest_weights(script: Script, node: cst.Call) -> bool:
    """Whether a `tf.train.latest_checkpoint` finds weights that the script writes."""
    takers = map(script.call_with, script.results(node))
    is_read = any(method_of(taker) == "load_weights" for taker in takers)
    return is_read and any(site.endings == WEIGHTS for site in _sites(script))


def _text(script: Script, node: Expression) -> str | None:
    """The text of a literal, or what an f-string ends with; None if it is unknown."""
    if isinstance(node, cst.SimpleString) and node in script.files:
        return script.files[node]
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        return str(node.evaluated_value or "")
    last = node.parts[-1:] if isinstance(node, cst.FormattedString) else ()
    return next((p.value for p in last if isinstance(p, cst.FormattedStringText)), None)


def _last_parts(script: Script, node: Expression) -> list[Expression]:
    """The expressions that the text of a path may end with; none if it is unknown."""
    if isinstance(node, cst.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, cst.Call):
        return _last_parts_of_call(script, node)
    last: Expression | None = None
    if isinstance(node, cst.Name):
        last = script.flow.value(node)
    elif isinstance(node, cst.Attribute):
        last = _default_of(script, node)
    elif isinstance(node, cst.BinaryOperation):
        last = node.left if isinstance(node.operator, cst.Modulo) else node.right
    return [last] if last is not None else []


def _last_parts_of_call(script: Script, node: cst.Call) -> list[Expression]:
    """The expressions that a path may end with that a call makes, as `_last_parts`."""
    if method_of(node) == "format":
        return [object_of(node)]
    if dotted(node.func) in NAMES["keeping_the_end"]:
        return [arg.value for arg in node.args[-1:]]
    if method_of(node) == "join" and isinstance(object_of(node), cst.SimpleString):
        return parts_of(value_of(node, 0, "iterable"))[-1:]
    found = [_passed(script, node, each) for each in returned(script, node)]
    return [each for each in found if each is not None] if all(found) else []


def _passed(script: Script, call: cst.Call, value: Expression) -> Expression | None:
    """The argument of a call with the end of a path that the function returns."""
    nodes = _path_nodes(script, value)
    for function in script.functions(last_name(call.func)):
        for position, param in enumerate(function.params.params):
            made = script.flow.defined(param.name)
            uses = script.flow.uses(made) if made is not None else []
            is_end = any(use in nodes for use in uses)
            if is_end and all(use in nodes or _is_shown(script, use) for use in uses):
                return value_of(call, position, param.name.value)
    return None


def _default_of(script: Script, node: Expression) -> Expression | None:
    """The default of an option of the command line, such as `args.model`."""
    if not isinstance(node, cst.Attribute):
        return None
    if method_of(script.flow.value(node.value)) != "parse_args":
        return None
    options = {f"--{node.attr.value}", f"--{node.attr.value.replace('_', '-')}"}
    found = [
        default
        for call in script.calls
        if method_of(call) == "add_argument"
        and options & {text_of(arg.value) for arg in call.args}
        and (default := named(call, "default")) is not None
    ]
    return found[0] if len(found) == 1 else None


def is_unbuilt_at(script: Script, call: cst.Call) -> bool:
    """Whether a model has no variables yet where one of its methods is called."""
    model, function = object_of(call), script.function_of(call)
    made = origins(script, model)
    found = definitions(script, model)
    if any(script.function_of(each.node) is not function for each in found):
        return False  # The order of these functions' calls is not in sight.
    uses = [use for each in found for use in script.flow.uses(each)]
    for each in made:
        if not isinstance(each, cst.Call) or not is_unbuilt(script, each):
            return False
        is_own = bool(script.classes(last_name(each.func)))
        if is_own and not own_methods(script, each, "call"):
            return False  # It may be made of tensors.
        uses += script.uses_of(each)
    before = (
        use
        for use in uses
        if script.function_of(use) is not function
        or script.line(use) < script.line(call)
    )
    return not any(_may_build(script, use) for use in before)


def _may_build(script: Script, use: cst.CSTNode) -> bool:
    """Whether a use of a model may give it its variables."""
    parent, method = script.parent(use), method_of(script.method_call(use))
    is_passed_on = isinstance(parent, cst.Return | cst.Assign | cst.AssignTarget)
    return not is_passed_on and method not in NAMES["methods_without_building"]
