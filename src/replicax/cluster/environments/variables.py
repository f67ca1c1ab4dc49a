"""Launchers that set an index, a number of processes and an address."""

import os

import jax

from replicax._private.jax import distributed_state
from replicax.cluster.environments.base import (
    ClusterEnvironment,
    Membership,
    default_port,
)
from replicax.cluster.resolvers import TFConfigClusterResolver

__all__ = [
    "InitializedJax",
    "JaxVariables",
    "KerasDistribution",
    "KubeflowJaxJob",
    "KubeflowTrainJob",
    "TFConfig",
    "Torchrun",
]


class TFConfig(ClusterEnvironment):
    """`TF_CONFIG`, as `replicax run` and `replicax manifest` set it."""

    name = "TF_CONFIG"
    index = "TF_CONFIG"

    def detect(self) -> bool:
        """Whether the variable is set, and not blank."""
        return bool(os.environ.get(self.index, "").strip())

    def membership(self) -> Membership:
        """Parse the variable."""
        resolver = TFConfigClusterResolver()
        cluster = resolver.cluster_spec()
        names = [task.name for task in cluster.workers]
        num_tasks = sum(map(cluster.num_tasks, cluster.jobs))
        own = f"{resolver.task_type}:{resolver.task_id}"
        return Membership(
            index=names.index(own) if own in names else None,
            count=max(1, len(names)),
            resolver=resolver,
            num_tasks=num_tasks,
        )


class KerasDistribution(ClusterEnvironment):
    """The variables of `keras.distribution.initialize`.

    `KERAS_DISTRIBUTION_JOB_ADDRESSES` lists the addresses of all processes, or only the
    address of process 0.
    """

    name = "keras"
    index = "KERAS_DISTRIBUTION_PROCESS_ID"
    size = "KERAS_DISTRIBUTION_NUM_PROCESSES"
    host = "KERAS_DISTRIBUTION_JOB_ADDRESSES"

    def membership(self) -> Membership:
        """Read the variables."""
        addresses = os.environ.get(self.host, "").split(",")
        if len(addresses) == 1:
            return super().membership()
        if os.environ.get(self.size):
            self.number(self.size, len(addresses), len(addresses))
        self.require(self.index, count=len(addresses))
        index = self.number(self.index, 0, len(addresses) - 1)
        return self.workers(index, [address.strip() for address in addresses])


class JaxVariables(ClusterEnvironment):
    """JAX's own variables, which Kubeflow Trainer sets for the runtime of JAX."""

    name = "jax"
    index = "JAX_PROCESS_ID"
    size = "JAX_NUM_PROCESSES"
    host = "JAX_COORDINATOR_ADDRESS"


class Torchrun(ClusterEnvironment):
    """`torchrun`, `accelerate launch`, and others that set torch's variables.

    torchrun's agent listens on `MASTER_PORT` itself; the processes meet on a port that
    is derived from it.
    """

    name = "torchrun"
    index = "RANK"
    size = "WORLD_SIZE"
    host = "MASTER_ADDR"
    port = "MASTER_PORT"
    local = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),)

    def address(self, count: int) -> str:
        """Read the coordinator's address."""
        address = super().address(count)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return address
        host, _, port = address.rpartition(":")
        return f"{host}:{default_port(int(port))}"


class KubeflowTrainJob(ClusterEnvironment):
    """A pod of a Kubeflow TrainJob with the runtime of torch, without `torchrun`."""

    name = "kubeflow"
    index = "PET_NODE_RANK"
    size = "PET_NNODES"
    host = "PET_MASTER_ADDR"
    port = "PET_MASTER_PORT"


class KubeflowJaxJob(ClusterEnvironment):
    """A pod of a JAXJob of Kubeflow's Training Operator, version 1."""

    name = "jaxjob"
    index = "PROCESS_ID"
    size = "NUM_PROCESSES"
    host = "COORDINATOR_ADDRESS"
    port = "COORDINATOR_PORT"

    def detect(self) -> bool:
        """Whether all are set: other programs may use one of these names."""
        return all(map(os.environ.get, (self.index, self.size, self.host)))


class InitializedJax(ClusterEnvironment):
    """A process that has called `jax.distributed.initialize` itself."""

    name = "jax.distributed"

    def detect(self) -> bool:
        """Whether JAX is connected to its coordination service."""
        return jax.distributed.is_initialized()

    def membership(self) -> Membership:
        """Ask JAX, which knows the processes' indices, but not their addresses."""
        state = distributed_state()
        return Membership(index=state.process_id, count=state.num_processes)

    def described(self) -> str:
        """The call, for messages."""
        return "jax.distributed.initialize was called"
