"""replicax: tf.distribute's Strategy for Keras 3 on JAX."""

import replicax._backend  # noqa: F401  First: it settles Keras' backend.
from replicax import compat, losses, schedules
from replicax.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
)
from replicax.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.devices import set_logical_devices
from replicax.errors import ContextError, DeviceError, DivergenceError, InternalError
from replicax.gradients import value_and_grad
from replicax.input import InputContext
from replicax.keras import hooks
from replicax.losses import compute_average_loss, scale_regularization_loss
from replicax.replica import ReplicaContext
from replicax.strategies import MirroredStrategy, OneDeviceStrategy
from replicax.strategy import Strategy
from replicax.tape import GradientTape
from replicax.values import PerReplica

__version__ = "0.1.0"

__all__ = [
    "ContextError",
    "CrossDeviceOps",
    "DeviceError",
    "DivergenceError",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InternalError",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "Strategy",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "losses",
    "scale_regularization_loss",
    "schedules",
    "set_logical_devices",
    "value_and_grad",
]

compat.install()
hooks.install()
