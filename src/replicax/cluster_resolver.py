"""Cluster resolvers, in the shape of `tf.distribute.cluster_resolver`."""

from replicax.cluster.kubernetes import KubernetesClusterResolver
from replicax.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from replicax.cluster.slurm import SlurmClusterResolver
from replicax.cluster.tpu_slice import TPUClusterResolver

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
]
