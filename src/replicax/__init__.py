"""replicax: tf.distribute's Strategy for Keras 3 on JAX.

The import selects Keras' JAX backend and does nothing else. Public names are loaded on
first use.
"""

import importlib
import os
import threading
from typing import TYPE_CHECKING

from replicax._private.backend import require_jax_backend, version_error
from replicax._version import __version__ as __version__

if TYPE_CHECKING:  # For editors, type checkers and the pages of the API.
    from replicax import (
        callbacks,
        cluster_resolver,
        config,
        estimator,
        experimental,
        feature_column,
        input,
        layers,
        layout_maps,
        losses,
        schedules,
        testing,
        tpu,
    )
    from replicax.checkpoint import (
        Checkpoint,
        CheckpointManager,
        RestoreStatus,
        latest_checkpoint,
    )
    from replicax.checkpoint.backup import BackupAndRestore
    from replicax.checkpoint.sidecar import SidecarEvaluator
    from replicax.cluster.spec import ClusterSpec
    from replicax.cluster.timeouts import Timeouts
    from replicax.engine.collectives import (
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReduceOp,
        ReductionToOneDevice,
    )
    from replicax.engine.communication import (
        CollectiveCommunication,
        CommunicationOptions,
    )
    from replicax.engine.devices import set_logical_devices
    from replicax.engine.gradients import (
        GradientTape,
        clip_by_global_norm,
        value_and_grad,
    )
    from replicax.engine.losses import compute_average_loss, scale_regularization_loss
    from replicax.engine.replica import ReplicaContext
    from replicax.engine.values import PerReplica
    from replicax.errors import (
        CheckpointError,
        ClusterConfigError,
        ClusterError,
        ClusterMismatchError,
        ContextError,
        DeviceError,
        DivergenceError,
        InputError,
        InternalError,
        RetraceError,
    )
    from replicax.input import AutoShardPolicy, FileDataset, InputContext
    from replicax.planning.analysis import plan
    from replicax.ps.coordinator import ClusterCoordinator
    from replicax.ps.payloads import (
        ClosureCancelledError,
        ClosureError,
        PerWorkerValues,
        RemoteValue,
    )
    from replicax.ps.strategy import ParameterServerStrategy
    from replicax.report.tensorboard import SummaryWriter
    from replicax.strategies.central_storage import CentralStorageStrategy
    from replicax.strategies.current import (
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from replicax.strategies.fully_sharded import FullyShardedStrategy
    from replicax.strategies.mirrored import MirroredStrategy
    from replicax.strategies.model_parallel import ModelParallelStrategy
    from replicax.strategies.multi_worker import MultiWorkerMirroredStrategy
    from replicax.strategies.one_device import OneDeviceStrategy
    from replicax.strategies.strategy import Strategy
    from replicax.strategies.tpu import TPUStrategy

require_jax_backend()  # Before anything imports Keras.

__all__ = [
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
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteValue",
    "ReplicaContext",
    "RestoreStatus",
    "RetraceError",
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

_MODULES = {
    "AutoShardPolicy": "input",
    "BackupAndRestore": "checkpoint.backup",
    "CentralStorageStrategy": "strategies.central_storage",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "CheckpointManager": "checkpoint",
    "ClosureCancelledError": "ps.payloads",
    "ClosureError": "ps.payloads",
    "ClusterConfigError": "errors",
    "ClusterCoordinator": "ps.coordinator",
    "ClusterError": "errors",
    "ClusterMismatchError": "errors",
    "ClusterSpec": "cluster.spec",
    "CollectiveCommunication": "engine.communication",
    "CommunicationOptions": "engine.communication",
    "ContextError": "errors",
    "CrossDeviceOps": "engine.collectives",
    "DeviceError": "errors",
    "DivergenceError": "errors",
    "FileDataset": "input",
    "FullyShardedStrategy": "strategies.fully_sharded",
    "GradientTape": "engine.gradients",
    "HierarchicalCopyAllReduce": "engine.collectives",
    "InputContext": "input",
    "InputError": "errors",
    "InternalError": "errors",
    "MirroredStrategy": "strategies.mirrored",
    "ModelParallelStrategy": "strategies.model_parallel",
    "MultiWorkerMirroredStrategy": "strategies.multi_worker",
    "NcclAllReduce": "engine.collectives",
    "OneDeviceStrategy": "strategies.one_device",
    "ParameterServerStrategy": "ps.strategy",
    "PerReplica": "engine.values",
    "PerWorkerValues": "ps.payloads",
    "ReduceOp": "engine.collectives",
    "ReductionToOneDevice": "engine.collectives",
    "RemoteValue": "ps.payloads",
    "ReplicaContext": "engine.replica",
    "RestoreStatus": "checkpoint",
    "RetraceError": "errors",
    "SidecarEvaluator": "checkpoint.sidecar",
    "Strategy": "strategies.strategy",
    "SummaryWriter": "report.tensorboard",
    "TPUStrategy": "strategies.tpu",
    "Timeouts": "cluster.timeouts",
    "callbacks": "callbacks",
    "cluster_resolver": "cluster_resolver",
    "compute_average_loss": "engine.losses",
    "config": "config",
    "estimator": "estimator",
    "experimental": "experimental",
    "feature_column": "feature_column",
    "get_replica_context": "strategies.current",
    "get_strategy": "strategies.current",
    "has_strategy": "strategies.current",
    "in_cross_replica_context": "strategies.current",
    "input": "input",
    "latest_checkpoint": "checkpoint",
    "layers": "layers",
    "layout_maps": "layout_maps",
    "losses": "losses",
    "plan": "planning.analysis",
    "scale_regularization_loss": "engine.losses",
    "schedules": "schedules",
    "set_logical_devices": "engine.devices",
    "testing": "testing",
    "tpu": "tpu",
    "clip_by_global_norm": "engine.gradients",
    "value_and_grad": "engine.gradients",
}
"""The module below `replicax` of each public name; a submodule is its own."""

# Imports in different orders by several threads would deadlock.
_loading = threading.RLock()
_is_used = False


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(_unknown(name))
    with _loading:
        _begin_task()
        try:
            module = importlib.import_module(f"replicax.{_MODULES[name]}")
        except ImportError as error:  # A private name of Keras that is gone.
            if not (error.name or "").startswith("keras."):
                raise
            raise version_error(str(error)) from error
    value = module if _MODULES[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _begin_task() -> None:
    """Connect the folders, and set up what the launcher of this process asks for."""
    global _is_used
    if _is_used:
        return
    _is_used = True
    from replicax.keras import providers

    providers.default_strategy = _default_strategy
    if "REPLICAX_REPORT_DIR" in os.environ:
        from replicax._util.interrupts import describe_interrupts

        describe_interrupts()
    if page := os.environ.get("REPLICAX_REPORT"):
        from replicax.report.callback import report_every_fit

        report_every_fit(page)


def _default_strategy() -> "Strategy":
    from replicax.strategies.current import get_strategy

    return get_strategy()


def _unknown(name: str) -> str:
    text = f"module 'replicax' has no attribute {name!r}"
    if name.startswith("_"):  # Python or an editor looks it up, not a user.
        return text
    if name == "distribute":
        return f"{text}: names of tf.distribute are here, as in rx.MirroredStrategy."
    import difflib

    close = difflib.get_close_matches(name, __all__)
    return f"{text}; close to it: {', '.join(close)}." if close else text
