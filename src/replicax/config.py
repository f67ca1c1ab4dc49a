"""The functions of `tf.config` that training scripts call."""

from replicax.cluster.tpu_system import experimental_connect_to_cluster
from replicax.engine.devices import (
    LogicalDevice,
    PhysicalDevice,
    list_logical_devices,
    list_physical_devices,
)

__all__ = [
    "LogicalDevice",
    "PhysicalDevice",
    "experimental_connect_to_cluster",
    "list_logical_devices",
    "list_physical_devices",
]
