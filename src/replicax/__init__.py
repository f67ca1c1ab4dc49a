"""replicax: tf.distribute's Strategy for Keras 3 on JAX."""

import os

import replicax._backend  # noqa: F401  First: it settles Keras' backend.
from replicax import (
    callbacks,
    cluster_resolver,
    compat,
    config,
    estimator,
    experimental,
    feature_column,
    huge_pages,
    input,
    layers,
    layout_maps,
    losses,
    schedules,
    testing,
    tpu,
    xla_options,
)
from replicax._version import __version__ as __version__
from replicax.checkpoint import (
    Checkpoint,
    CheckpointManager,
    RestoreStatus,
    latest_checkpoint,
)
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.tpu_slice import skip_libtpu_without_chips
from replicax.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from replicax.communication import CollectiveCommunication, CommunicationOptions
from replicax.coordinator import ClusterCoordinator, RemoteValue
from replicax.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.devices import set_logical_devices
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
from replicax.gradients import value_and_grad
from replicax.input import AutoShardPolicy, FileDataset, InputContext
from replicax.keras import hooks
from replicax.keras.backup import BackupAndRestore
from replicax.keras.sidecar import SidecarEvaluator
from replicax.losses import compute_average_loss, scale_regularization_loss
from replicax.per_worker import PerWorkerValues
from replicax.plan import plan
from replicax.ps.outcomes import ClosureCancelledError, ClosureError
from replicax.replica import ReplicaContext
from replicax.strategies import (
    CentralStorageStrategy,
    FullyShardedStrategy,
    MirroredStrategy,
    ModelParallelStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    TPUStrategy,
)
from replicax.strategy import Strategy
from replicax.tape import GradientTape
from replicax.values import PerReplica

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

compat.install()
hooks.install()
huge_pages.share_one_heap()
xla_options.keep_loops(os.environ)
skip_libtpu_without_chips(os.environ)
