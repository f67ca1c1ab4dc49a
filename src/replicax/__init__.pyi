"""The public names of replicax, each with the module that has it."""

from . import callbacks as callbacks
from . import cluster_resolver as cluster_resolver
from . import config as config
from . import estimator as estimator
from . import experimental as experimental
from . import feature_column as feature_column
from . import input as input
from . import layers as layers
from . import layout_maps as layout_maps
from . import losses as losses
from . import schedules as schedules
from . import testing as testing
from . import tpu as tpu
from .checkpoint import (
    Checkpoint as Checkpoint,
)
from .checkpoint import (
    CheckpointManager as CheckpointManager,
)
from .checkpoint import (
    RestoreStatus as RestoreStatus,
)
from .checkpoint import (
    latest_checkpoint as latest_checkpoint,
)
from .checkpoint.backup import BackupAndRestore as BackupAndRestore
from .checkpoint.sidecar import SidecarEvaluator as SidecarEvaluator
from .cluster.spec import ClusterSpec as ClusterSpec
from .cluster.timeouts import Timeouts as Timeouts
from .engine.collectives import (
    CrossDeviceOps as CrossDeviceOps,
)
from .engine.collectives import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from .engine.collectives import (
    NcclAllReduce as NcclAllReduce,
)
from .engine.collectives import (
    ReduceOp as ReduceOp,
)
from .engine.collectives import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from .engine.communication import (
    CollectiveCommunication as CollectiveCommunication,
)
from .engine.communication import (
    CommunicationOptions as CommunicationOptions,
)
from .engine.devices import set_logical_devices as set_logical_devices
from .engine.gradients import (
    GradientTape as GradientTape,
)
from .engine.gradients import (
    clip_by_global_norm as clip_by_global_norm,
)
from .engine.gradients import (
    value_and_grad as value_and_grad,
)
from .engine.losses import (
    compute_average_loss as compute_average_loss,
)
from .engine.losses import (
    scale_regularization_loss as scale_regularization_loss,
)
from .engine.replica import ReplicaContext as ReplicaContext
from .engine.values import PerReplica as PerReplica
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ClusterConfigError as ClusterConfigError,
)
from .errors import (
    ClusterError as ClusterError,
)
from .errors import (
    ClusterMismatchError as ClusterMismatchError,
)
from .errors import (
    ContextError as ContextError,
)
from .errors import (
    DeviceError as DeviceError,
)
from .errors import (
    DivergenceError as DivergenceError,
)
from .errors import (
    InputError as InputError,
)
from .errors import (
    InternalError as InternalError,
)
from .input import (
    AutoShardPolicy as AutoShardPolicy,
)
from .input import (
    FileDataset as FileDataset,
)
from .input import (
    InputContext as InputContext,
)
from .jax_loops.optax import distributed as distributed
from .jax_loops.optax_optimizer import OptaxOptimizer as OptaxOptimizer
from .planning.analysis import plan as plan
from .ps.coordinator import ClusterCoordinator as ClusterCoordinator
from .ps.payloads import (
    ClosureCancelledError as ClosureCancelledError,
)
from .ps.payloads import (
    ClosureError as ClosureError,
)
from .ps.payloads import (
    PerWorkerValues as PerWorkerValues,
)
from .ps.payloads import (
    RemoteValue as RemoteValue,
)
from .ps.strategy import ParameterServerStrategy as ParameterServerStrategy
from .report.tensorboard import SummaryWriter as SummaryWriter
from .strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from .strategies.current import (
    get_replica_context as get_replica_context,
)
from .strategies.current import (
    get_strategy as get_strategy,
)
from .strategies.current import (
    has_strategy as has_strategy,
)
from .strategies.current import (
    in_cross_replica_context as in_cross_replica_context,
)
from .strategies.fully_sharded import FullyShardedStrategy as FullyShardedStrategy
from .strategies.mirrored import MirroredStrategy as MirroredStrategy
from .strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from .strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from .strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from .strategies.strategy import Strategy as Strategy
from .strategies.tpu import TPUStrategy as TPUStrategy

__version__: str
