"""The tables are true: their targets exist, with the arguments that they name."""

import builtins
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from replicax_migrate import tables
from replicax_migrate.sources import METHOD_RULES, SOURCE_RULES
from replicax_migrate.tables import (
    ALIASES,
    CALL_OPERATORS,
    CHANGED_DEFAULTS,
    DEVICE_OPERATORS,
    DROPPED,
    EXACT,
    HOST_OPERATORS,
    KEYWORDS,
    MESSAGES,
    NAMES,
    NOTES,
    PREFIXES,
    TEMPLATES,
    Operator,
    exists,
    find_reason,
    find_target,
    is_dotted,
)

PAGE = Path(__file__).parents[3] / "docs" / "migrate.md"
OPERATORS = [
    *DEVICE_OPERATORS.items(),
    *CALL_OPERATORS.items(),
    *HOST_OPERATORS.items(),
]


def found(target: str) -> Any:
    root, *parts = target.split(".")
    value: Any = importlib.import_module(ALIASES.get(root, "builtins"))
    parts = parts if root in ALIASES else [root]
    if root == "absl":
        return importlib.import_module(target) if len(parts) == 1 else value
    for part in parts:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", sorted(EXACT))
def test_exact_targets_exist(path: str) -> None:
    target = EXACT[path]
    if is_dotted(target):
        assert found(target) is not None
    else:
        assert target[0] == '"' or hasattr(builtins, target) or target == "None"


@pytest.mark.parametrize("path", sorted(PREFIXES))
def test_prefixes_lead_to_what_exists(path: str) -> None:
    assert found(PREFIXES[path]) is not None


@pytest.mark.parametrize(("path", "operator"), OPERATORS)
def test_operators_exist_with_their_parameters(path: str, operator: Operator) -> None:
    function = found(operator.target)
    names = [p for p in operator.parameters.values() if p not in {"-", "!"}]
    try:
        signature = list(inspect.signature(function).parameters)
    except ValueError:  # Some of NumPy's have none.
        return
    if isinstance(function, importlib.import_module("numpy").ufunc):
        return
    bases = inspect.getmro(function) if inspect.isclass(function) else ()
    inits = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    # Layers pass some on to their bases.
    passed = (name for i in inits[:-1] for name in inspect.signature(i).parameters)
    accepted = {*signature, *passed}
    for name in [*names, *operator.defaults]:
        assert name.lstrip("*") in accepted, accepted
    # What is given by position stays there until an argument is dropped.
    targets = list(operator.parameters.values())
    positional = list(itertools.takewhile(lambda t: t[0] not in "-!*", targets))
    assert positional == signature[: len(positional)]


@pytest.mark.parametrize("path", sorted(TEMPLATES))
def test_written_calls_name_what_exists(path: str) -> None:
    parameters, text = TEMPLATES[path]
    assert set(re.findall(r"{(\w+)}", text)) <= {*parameters}
    for target in re.findall(r"\b(?:keras|os)(?:\.\w+)+", text):
        assert found(target) is not None


@pytest.mark.parametrize(("name", "table"), [("MESSAGES", MESSAGES), ("NAMES", NAMES)])
def test_rules_use_all_rows_and_no_others(name: str, table: dict[str, Any]) -> None:
    assert {*re.findall(rf"""{name}\[["'](\w+)["']\]""", code_of_rules())} == set(table)


def test_rules_use_all_tables_of_keywords() -> None:
    assert [name for name in KEYWORDS if f'"{name}"' not in code_of_rules()] == []


def code_of_rules() -> str:
    files = Path(tables.__file__).parent.glob("*.py")
    return "".join(path.read_text("utf-8") for path in files)


def test_notes_are_about_what_is_ported() -> None:
    for path in NOTES:
        assert find_target(path) or path in TEMPLATES, path


def test_what_is_dropped_has_no_target_or_says_why() -> None:
    assert all(why and not why.endswith(".") for why in DROPPED.values())


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("keras.layers.Dense", "keras.layers.Dense"),
        ("keras.layers.experimental.preprocessing.Rescaling", "keras.layers.Rescaling"),
        ("distribute.MirroredStrategy", "rx.MirroredStrategy"),
        ("distribute.ReduceOp.SUM", "rx.ReduceOp.SUM"),
        ("estimator.ModeKeys.TRAIN", "rx.estimator.ModeKeys.TRAIN"),
        ("optimizers.Adam", "keras.optimizers.Adam"),
        ("nn.relu", "keras.activations.relu"),
        ("float32", '"float32"'),
        ("keras.losses.Reduction.NONE", "None"),
        ("image.resize", None),
        ("keras.layers.Dens", None),
        ("distribute.cluster_resolver.GCEClusterResolver", None),
    ],
)
def test_targets(path: str, target: str | None) -> None:
    assert find_target(path) == target
    assert target is None or not is_dotted(target) or exists(target)


def test_reasons_say_what_to_use_instead() -> None:
    assert "keras.layers.RandomFlip" in find_reason("image.flip_left_right")
    assert find_reason("no.such") == "tf.no.such has no counterpart"


def test_the_page_has_all_dataset_operators() -> None:
    page = PAGE.read_text("utf-8")
    for name in [*METHOD_RULES, *(path.rpartition(".")[2] for path in SOURCE_RULES)]:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(("path", "position", "name"), CHANGED_DEFAULTS)
def test_arguments_of_the_tables_are_there(path: str, position: int, name: str) -> None:
    parameters = list(inspect.signature(found(path)).parameters)
    assert parameters[position] == name
