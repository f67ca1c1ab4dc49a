"""Each private name of Keras, JAX, Flax and Grain that replicax uses exists.

Imports of private names fail when replicax is imported; the attributes are in the table
of owners below.
"""

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.nnx
import grain
import jax
import keras
import numpy as np
import pytest
from jax.interpreters import mlir

import replicax
import replicax_estimator
import replicax_migrate
from replicax._private.keras import UpdatesTogether
from replicax._private.trainer import CALLBACK_STATE, is_made_by_keras

ROWS = np.zeros((4, 2), "float32")
VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])


def module_of(name: str) -> Callable[[], Any]:
    return functools.partial(importlib.import_module, name)


@functools.cache
def model() -> Any:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    made.fit(ROWS, ROWS[:, :1], batch_size=2, verbose=0)
    return made


def variable() -> Any:
    return keras.Variable(np.zeros(2, "float32"))


def tracer() -> Any:
    tracers: list[Any] = []
    jax.make_jaxpr(tracers.append)(1.0)
    return tracers[0]


def optimizer() -> Any:
    return model().optimizer


def iterator() -> Any:
    trainer = importlib.import_module("keras.src.backend.jax.trainer")
    return trainer.JAXEpochIterator(x=ROWS, batch_size=2, steps_per_epoch=1)


def rows() -> Any:
    return iterator().data_adapter


def grain_rows() -> Any:
    name = "keras.src.trainers.data_adapters.grain_dataset_adapter"
    return importlib.import_module(name).GrainDatasetAdapter(grain_batches())


def grain_batches() -> Any:
    batches = grain.MapDataset.source(ROWS).batch(2)
    assert type(batches).__name__ == "BatchMapDataset"
    return batches


def random_map() -> Any:
    stream = grain.MapDataset.source(ROWS).to_iter_dataset()
    found = stream.random_map(lambda row, rng: row, seed=1)
    assert type(found).__name__ == "RandomMapIterDataset"
    return found


def py_dataset_rows() -> Any:
    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return (ROWS,)

    name = "keras.src.trainers.data_adapters.py_dataset_adapter"
    return importlib.import_module(name).PyDatasetAdapter(Data(workers=2))


@functools.cache
def trained_callbacks() -> list[Any]:
    """Keras' callbacks with their state after one `fit`."""
    made = [
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.ModelCheckpoint("never.keras", save_freq=100),
    ]
    history = model().fit(ROWS, ROWS[:, :1], callbacks=made, verbose=0)
    return [*made, history]


def model_checkpoint() -> Any:
    return trained_callbacks()[2]


OWNERS: dict[str, list[Callable[[], Any]]] = {
    # Keras' variables, layers, models and optimizers.
    "_value": [variable],
    "_dtype": [variable],
    "_layout": [variable],
    "_initializer": [variable],
    "_initialize": [variable],
    "_initialize_with_initializer": [variable],
    "_maybe_autocast": [variable],
    "_direct_assign": [variable],
    "_layers": [model],
    "_metrics": [model],
    "_seed_generators": [model],
    "_trainable_variables": [model, optimizer],
    "_non_trainable_variables": [model],
    "_flatten_layers": [model],
    "_loss_ids": [lambda: keras.layers.Dense(1)],
    "_post_build": [model],
    "_moments": [keras.layers.BatchNormalization],
    "_learning_rate": [optimizer],
    "_clip_gradients": [optimizer],
    "_use_weight_decay": [optimizer],
    "_is_excluded_from_weight_decay": [optimizer],
    # Its trainer, and the data of one call.
    "_initial_epoch": [model],
    "_compile_loss": [model],
    "_flat_losses": [lambda: model()._compile_loss],
    "_compile_metrics": [model],
    "_fn": [lambda: keras.metrics.MeanMetricWrapper(max)],
    "_fn_kwargs": [
        lambda: keras.metrics.MeanMetricWrapper(max),
        keras.losses.MeanSquaredError,
    ],
    "_symbolic_build": [model],
    "_flatten_metrics_in_order": [model],
    "_get_iterator": [rows],
    "_dataset": [grain_rows],
    # Its callbacks and modules.
    "_batches_seen_since_last_saving": [model_checkpoint],
    "_last_batch_seen": [model_checkpoint],
    "_executor": [keras.callbacks.CallbackList],
    "_to_backend_device": [module_of("keras.src.backend.jax.distribution_lib")],
    # JAX.
    "_src": [lambda: jax],
    "_trace": [tracer],
    "_backend_factories": [module_of("jax._src.xla_bridge")],
    "_platform_specific_lowerings": [lambda: mlir],
    "_lowerings": [lambda: mlir],
    # Flax.
    "_raw_value": [lambda: flax.nnx.Variable(0)],
    "_trace_state": [lambda: flax.nnx.Variable(0)],
    "_pytree__state": [flax.nnx.Module],
    # Grain.
    "_parents": [random_map],
    "_seed": [random_map],
    "_parent": [grain_batches],
    "_batch_fn": [grain_batches],
    "_batch_size": [grain_batches],
    "_get_parent_items_fn": [grain_batches],
    # Python.
    "_replace": [lambda: inspect.FullArgSpec(*[()] * 7)],
}
"""The owners of each name with an underscore that `_private` reads or replaces."""

NEW = {"_is_excluded_from_weight_decay": (3, 16)}
"""The first version of Keras that has a name, if older supported ones lack it."""

ARGUMENTS = {"_use_cached_eval_dataset": keras.Model.fit}
"""Keywords with an underscore, and the functions that pass them."""


def entered_scope() -> Any:
    with keras.StatelessScope() as scope:
        return scope


PUBLIC_LOOKING: dict[Callable[[], Any], tuple[str, ...]] = {
    module_of("keras.src.random.seed_generator"): ("python_random",),
    entered_scope: ("original_scope",),
    iterator: ("data_adapter", "steps_per_epoch", "steps_per_execution"),
    rows: ("get_jax_iterator", "num_batches"),
    py_dataset_rows: ("enqueuer", "py_dataset"),
    lambda: py_dataset_rows().enqueuer: ("is_running", "stop"),
}
"""Attributes without an underscore of private objects, which replicax uses."""


NAME = re.compile(r"_(?!replicax)[A-Za-z]\w*")
MODULES = [replicax, replicax_estimator, replicax_migrate]
FILES = [f for m in MODULES for f in Path(str(m.__file__)).parent.rglob("*.py")]
PRIVATE = [file for file in FILES if "_private" in file.parts]
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_fields"}


def attributes(file: Path) -> set[str]:
    """The names of attributes with an underscore."""
    return set(filter(NAME.fullmatch, _attributes(file)))


def _attributes(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="self")) if file in PRIVATE:
                continue
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield name
            case ast.Constant(value=str(name)) if file in PRIVATE:
                yield name


def defined(file: Path) -> Iterator[str]:
    """The names of functions, classes, values and attributes that a file defines."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                if isinstance(node.ctx, ast.Store):
                    yield name


def test_the_table_has_all_private_names() -> None:
    used = set[str]().union(*map(attributes, PRIVATE))
    assert used == set(OWNERS) | set(ARGUMENTS)


def test_private_names_are_used_in_one_folder() -> None:
    own = {name for file in FILES for name in defined(file)} | OF_PYTHON
    others = {str(f): attributes(f) - own for f in FILES if f not in PRIVATE}
    assert {file: names for file, names in others.items() if names} == {}


@pytest.mark.parametrize("name", OWNERS)
def test_private_names_exist(name: str) -> None:
    if NEW.get(name, VERSION) <= VERSION:
        for owner in OWNERS[name]:
            assert hasattr(owner(), name), f"{owner()!r} has no {name!r} any more"


def test_private_arguments_exist() -> None:
    for name, function in ARGUMENTS.items():
        assert f"{name}=" in inspect.getsource(inspect.unwrap(function))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(o, name) for o, names in PUBLIC_LOOKING.items() for name in names],
)
def test_private_objects_have_the_used_attributes(
    owner: Callable[[], Any], name: str
) -> None:
    assert hasattr(owner(), name)


def test_keras_updates_all_variables_by_one_method() -> None:
    updated: list[int] = []

    class Together(UpdatesTogether, keras.optimizers.Optimizer):
        def update_together(self, gradients: Any, variables: Any) -> None:
            updated.append(len(variables))

    weights = [keras.Variable(1.0), keras.Variable(2.0)]
    Together(0.1).apply([x.value for x in weights], weights)
    assert updated == [2]


def test_callbacks_have_the_state_that_backups_save() -> None:
    names = {type(callback).__name__: callback for callback in trained_callbacks()}
    assert set(names) == set(CALLBACK_STATE)
    for cls, state in CALLBACK_STATE.items():
        missing = [name for name in state if not hasattr(names[cls], name)]
        assert not missing, f"{cls} has no {missing} any more"


def test_keys_of_keras_global_attributes() -> None:
    state = importlib.import_module("keras.src.backend.common.global_state")
    with keras.StatelessScope() as scope:
        assert state.get_global_attribute("stateless_scope") is scope
    keras.Variable(0.0)
    assert isinstance(state.get_global_attribute("object_name_uids"), defaultdict)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_functions_of_keras_are_recognized(kind: str, steps_per_execution: int) -> None:
    trained = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trained.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    getattr(trained, f"make_{kind}_function")()
    function = getattr(trained, f"{kind}_function")
    assert is_made_by_keras(function)
    vars(function)["attribute"] = 1
    assert not is_made_by_keras(functools.wraps(function)(lambda *_: None))
