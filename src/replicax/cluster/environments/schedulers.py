"""Schedulers whose clusters have resolvers of their own: Slurm, Kubernetes, TPUs."""

import os

from replicax._private.jax import is_tpu_vm
from replicax.cluster.environments.base import (
    ClusterEnvironment,
    IncompleteError,
    Membership,
    default_port,
)
from replicax.cluster.kubernetes import KubernetesClusterResolver
from replicax.cluster.resolvers import KnownCluster
from replicax.cluster.slurm import SlurmClusterResolver
from replicax.cluster.tpu_slice import TPUClusterResolver
from replicax.errors import ClusterConfigError

__all__ = ["JobSet", "Slurm", "TPUSlice"]


class Slurm(ClusterEnvironment):
    """A task that `srun` has started. The first port is derived from the job's id."""

    name = "slurm"
    index = "SLURM_PROCID"
    size = "SLURM_NTASKS"
    host = "SLURM_JOB_NUM_NODES"

    def membership(self) -> Membership:
        """Read the step's tasks and nodes."""
        step = "SLURM_STEP_NUM_TASKS"
        # A batch script and an interactive shell run outside of a step.
        names = [step] if os.environ.get(step) else [self.size, self.host]
        count = max((self.number(x, 1) for x in names if os.environ.get(x)), default=1)
        if count == 1:
            return Membership()
        self.require(
            "SLURM_STEP_NODELIST",
            count=count,
            remedy="This process is no task of a step. Start the script with srun.",
        )
        job = os.environ.get("SLURM_JOB_ID", "0")
        # A node's tasks have consecutive ports.
        port = default_port(int(job) % 3584 if job.isdigit() else 0)
        return _membership_of(SlurmClusterResolver(port_base=port))


class JobSet(ClusterEnvironment):
    """A pod of an Indexed Job or a JobSet; Kubernetes sets no number of pods."""

    name = "kubernetes"
    index = "JOB_COMPLETION_INDEX"
    size = "JAX_NUM_PROCESSES"

    def detect(self) -> bool:
        """Whether this is a pod of an Indexed Job."""
        return bool(os.environ.get(self.index))

    def membership(self) -> Membership:
        """Read the pod's variables; the manifest sets the number of pods."""
        self.require(
            self.size,
            remedy="Set it in the container's env to the Job's completions, or let "
            "`replicax manifest` write the JobSet; or call "
            "jax.distributed.initialize() first, which asks the API of Kubernetes.",
        )
        count = self.number(self.size, 1)
        if count == 1:
            return Membership()
        try:
            return _membership_of(KubernetesClusterResolver(count))
        except ClusterConfigError as error:
            raise IncompleteError(f"kubernetes: {error}", count) from error


class TPUSlice(ClusterEnvironment):
    """A host of a TPU slice, in the environment of GKE or of a TPU VM."""

    name = "tpu"
    index = "TPU_WORKER_ID"
    size = "TPU_WORKER_HOSTNAMES"

    def detect(self) -> bool:
        """Whether this machine is part of a TPU slice."""
        return bool(os.environ.get(self.size)) or is_tpu_vm()

    def membership(self) -> Membership:
        """Read the slice from the environment or the metadata server."""
        resolver = TPUClusterResolver(tpu="")
        index = resolver.task_id or 0
        return Membership(index=index, count=resolver.num_hosts, resolver=resolver)


def _membership_of(resolver: KnownCluster) -> Membership:
    count = len(resolver.cluster_spec().workers)
    return Membership(index=resolver.task_id, count=count, resolver=resolver)
