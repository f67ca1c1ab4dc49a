"""What users may rely on: a change here is a change of the interface."""

import ast
import copy
import doctest
import inspect
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

import replicax as rx

PUBLIC_NAMES = [
    "AutoShardPolicy",
    "BackupAndRestore",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClosureCancelledError",
    "ClosureError",
    "ClusterConfigError",
    "ClusterCoordinator",
    "ClusterError",
    "ClusterMismatchError",
    "ClusterSpec",
    "CollectiveCommunication",
    "CommunicationOptions",
    "ContextError",
    "CrossDeviceOps",
    "DeviceError",
    "DivergenceError",
    "FileDataset",
    "FullyShardedStrategy",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputError",
    "InternalError",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OptaxOptimizer",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RestoreStatus",
    "SidecarEvaluator",
    "Strategy",
    "SummaryWriter",
    "TPUStrategy",
    "Timeouts",
    "callbacks",
    "clip_by_global_norm",
    "cluster_resolver",
    "compute_average_loss",
    "config",
    "distributed",
    "estimator",
    "experimental",
    "feature_column",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "input",
    "latest_checkpoint",
    "layers",
    "layout_maps",
    "losses",
    "plan",
    "scale_regularization_loss",
    "schedules",
    "set_logical_devices",
    "testing",
    "tpu",
    "value_and_grad",
]

EXPERIMENTAL_NAMES = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "coordinator",
    "partitioners",
]

METHODS = {
    rx.Strategy: [
        "check_replicas",
        "distribute_datasets_from_function",
        "experimental_distribute_dataset",
        "experimental_distribute_values_from_function",
        "experimental_local_results",
        "experimental_make_numpy_dataset",
        "experimental_run_v2",
        "gather",
        "group",
        "make_experimental_numpy_dataset",
        "num_replicas_in_sync",
        "reduce",
        "run",
        "scope",
    ],
    rx.ReplicaContext: [
        "all_gather",
        "all_reduce",
        "merge_call",
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
    ],
    rx.GradientTape: ["gradient", "watch"],
}


def test_names() -> None:
    assert rx.__all__ == PUBLIC_NAMES
    assert rx.__all__ == sorted(rx.__all__)
    for name in rx.__all__:
        assert hasattr(rx, name), name


def test_dir_lists_the_public_names() -> None:
    assert set(rx.__all__) <= set(dir(rx))
    assert {"__version__", "__all__"} <= set(dir(rx))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"are here, as in rx\.MirroredStrategy"):
        _ = rx.distribute  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="close to it: MirroredStrategy"):
        _ = rx.MirrorStrategy  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = rx.xyzzy  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(rx, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'Mirrored'"):
        from replicax import Mirrored  # pyright: ignore[reportAttributeAccessIssue]  # noqa: F401


def test_all_names_are_imported_by_a_star_and_survive_pickling() -> None:
    names: dict[str, object] = {}
    exec("from replicax import *", names)
    assert set(rx.__all__) <= set(names)
    for name in rx.__all__:
        value = getattr(rx, name)
        if not isinstance(value, ModuleType):
            assert pickle.loads(pickle.dumps(value)) is value
            assert copy.deepcopy(value) is value


def test_names_under_experimental() -> None:
    assert rx.experimental.__all__ == EXPERIMENTAL_NAMES
    assert rx.experimental.CentralStorageStrategy is rx.CentralStorageStrategy


@pytest.mark.parametrize("cls", METHODS)
def test_methods(cls) -> None:
    own = [base for base in cls.__mro__ if base.__module__.startswith("replicax.")]
    names = {name for base in own for name in vars(base)}
    public = [name for name in sorted(names) if not name.startswith("_")]
    assert set(METHODS[cls]) <= set(public)
    for name in public:
        assert inspect.getdoc(getattr(cls, name)), f"{cls.__name__}.{name}"


def test_errors_are_builtin_errors_too() -> None:
    assert issubclass(rx.ContextError, RuntimeError)
    assert issubclass(rx.InternalError, RuntimeError)
    assert issubclass(rx.DeviceError, ValueError)
    assert issubclass(rx.DivergenceError, ValueError)
    assert issubclass(rx.CheckpointError, RuntimeError)
    assert issubclass(rx.ClusterConfigError, ValueError)
    assert issubclass(rx.ClusterMismatchError, rx.ClusterError)
    assert issubclass(rx.ClusterError, RuntimeError)
    assert issubclass(rx.InputError, ValueError)


def test_parameters_are_those_of_tensorflow() -> None:
    def parameters(fn: object) -> list[str]:
        return list(inspect.signature(fn).parameters)

    assert parameters(rx.Strategy.run)[:4] == ["self", "fn", "args", "kwargs"]
    assert parameters(rx.Strategy.reduce) == ["self", "reduce_op", "value", "axis"]
    assert parameters(rx.Strategy.gather) == ["self", "value", "axis"]
    assert parameters(rx.MirroredStrategy)[:2] == ["devices", "cross_device_ops"]
    assert parameters(rx.OneDeviceStrategy) == ["device"]
    assert parameters(rx.CentralStorageStrategy)[:2] == [
        "compute_devices",
        "parameter_device",
    ]
    assert parameters(rx.MultiWorkerMirroredStrategy)[:2] == [
        "cluster_resolver",
        "communication_options",
    ]
    assert parameters(rx.CheckpointManager)[:3] == [
        "checkpoint",
        "directory",
        "max_to_keep",
    ]
    assert parameters(rx.BackupAndRestore)[:2] == ["backup_dir", "save_freq"]
    assert parameters(rx.GradientTape) == ["persistent", "watch_accessed_variables"]
    assert parameters(rx.GradientTape.gradient) == [
        "self",
        "target",
        "sources",
        "output_gradients",
        "unconnected_gradients",
    ]
    assert parameters(rx.ReplicaContext.all_reduce)[1:] == [
        "reduce_op",
        "value",
        "options",
    ]
    assert parameters(rx.ReplicaContext.all_gather)[1:] == [
        "value",
        "axis",
        "drop_copies",
    ]
    assert parameters(rx.ReplicaContext.merge_call)[1:] == [
        "merge_fn",
        "args",
        "kwargs",
    ]


def test_no_two_classes_have_one_name() -> None:
    """A reader who searches for a class finds one; `_Step` and `Step` read alike."""
    where: dict[str, list[str]] = {}
    for path in sorted(Path(rx.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name.lstrip("_"), []).append(path.name)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


WITHOUT_EXAMPLE_THAT_RUNS = {
    # They need servers in other processes.
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "RemoteValue",
    # They need a machine with TPUs.
    "TPUStrategy",
    # It must come before everything else.
    "set_logical_devices",
    # pandas is no dependency.
    "estimator.pandas_input_fn",
}
"""Public functions and classes whose example does nothing when it runs as a test."""


def public_names() -> dict[str, Any]:
    """All public names by the modules that have them in `__all__`."""
    found: dict[str, Any] = {}

    def look(path: str, value: Any) -> None:
        found[path] = value
        if isinstance(value, ModuleType) and value.__name__.startswith("repl"):
            for name in value.__all__:
                look(f"{path}.{name}" if path else name, getattr(value, name))

    look("", rx)
    return found


def public_functions() -> dict[str, Any]:
    return {n: x for n, x in public_names().items() if inspect.isfunction(x)}


def public_classes() -> dict[str, type]:
    """Those that a user makes, is given or derives from: no errors, no protocols."""
    return {
        name: value
        for name, value in public_names().items()
        if inspect.isclass(value)
        and not issubclass(value, BaseException)
        and Protocol not in value.__bases__
    }


def examples(value: Any) -> list[doctest.Example]:
    # A class without a docstring would get its base's from `inspect.getdoc`.
    return doctest.DocTestParser().get_examples(value.__doc__ or "")


def does_something(example: doctest.Example) -> bool:
    is_import = example.source.startswith(("import ", "from "))
    return not is_import and not example.options.get(doctest.SKIP)


def test_functions_show_a_call() -> None:
    functions = public_functions()
    assert len(functions) > 60
    assert [name for name, fn in functions.items() if not examples(fn)] == []


def test_classes_show_their_use() -> None:
    classes = public_classes()
    assert len(classes) > 90
    assert [name for name, cls in classes.items() if not examples(cls)] == []


def test_examples_do_something() -> None:
    """Imports, and lines that are skipped, would pass whatever they show."""
    shown = {n: examples(x) for n, x in (public_functions() | public_classes()).items()}
    idle = {n for n, all in shown.items() if all and not any(map(does_something, all))}
    # An old name of the same object, under `experimental`, is no name of its own.
    names = public_names()
    known = {id(names[name]) for name in WITHOUT_EXAMPLE_THAT_RUNS}
    assert {name for name in idle if id(names[name]) not in known} == set()
