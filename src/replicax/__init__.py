# ruff: noqa: E402
"""replicax: tf.distribute's Strategy for Keras 3 on JAX."""

import os

import replicax._private.backend as _backend

_backend.require_jax_backend()  # Before anything imports Keras.

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
from replicax._util.interrupts import describe_interrupts
from replicax._version import __version__ as __version__
from replicax.checkpoint import (
    Checkpoint,
    CheckpointManager,
    RestoreStatus,
    latest_checkpoint,
)
from replicax.cluster.failure import REPORT_DIR
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.timeouts import Timeouts
from replicax.engine.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from replicax.engine.communication import CollectiveCommunication, CommunicationOptions
from replicax.engine.devices import set_logical_devices
from replicax.engine.gradients import GradientTape, value_and_grad
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
)
from replicax.input import AutoShardPolicy, FileDataset, InputContext
from replicax.keras import hooks
from replicax.keras.backup import BackupAndRestore
from replicax.keras.sidecar import SidecarEvaluator
from replicax.planning import plan
from replicax.ps.closure_errors import ClosureCancelledError, ClosureError
from replicax.ps.coordinator import ClusterCoordinator, RemoteValue
from replicax.ps.per_worker import PerWorkerValues
from replicax.ps.strategy import ParameterServerStrategy
from replicax.strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    ModelParallelStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    TPUStrategy,
)
from replicax.strategies.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.strategies.strategy import Strategy

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
    "SidecarEvaluator",
    "Strategy",
    "TPUStrategy",
    "Timeouts",
    "callbacks",
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

hooks.install()
if REPORT_DIR in os.environ:  # A launcher's task.
    describe_interrupts()
