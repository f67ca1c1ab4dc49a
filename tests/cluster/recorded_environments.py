"""Variables of processes, as launchers set them on one and two hosts.

Environments of Open MPI 4.1 and 5.0, MPICH 4.0, Slurm 22.05, torchrun of torch 2.13 and
accelerate 1.15 were recorded on one host; those of two hosts, and of services, are what
their documentation says.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple


def tf_config(index: int, *addresses: str) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def torchrun(rank: int, hosts: int, size: int = 2, **more: str) -> dict[str, str]:
    local = size // hosts
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(hosts),
        "MASTER_ADDR": "localhost" if hosts == 1 else "node-a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **more,
    }


def openmpi(rank: int, hosts: int, **more: str) -> dict[str, str]:
    local = 2 // hosts
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_RANK": str(rank),
        **more,
    }


def hydra(rank: int, hosts: int, **more: str) -> dict[str, str]:
    local = 2 // hosts
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "PMI_FD": "8",
        "MPI_LOCALRANKID": str(rank % local),
        "MPI_LOCALNRANKS": str(local),
        **more,
    }


def slurm(rank: int, hosts: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7168",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n1" if hosts == 1 else "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2" if hosts == 1 else "1(x2)",
        "SLURM_LOCALID": str(rank if hosts == 1 else 0),
        "SLURM_NODEID": str(0 if hosts == 1 else rank),
        **more,
    }


def jaxjob(index: int, count: int) -> dict[str, str]:
    """The variables of Kubeflow's JAXJob."""
    return {
        "COORDINATOR_ADDRESS": "t-worker-0",
        "COORDINATOR_PORT": "6666",
        "NUM_PROCESSES": str(count),
        "PROCESS_ID": str(index),
    }


def named(
    index: int, names: str, hosts: int, address: str = "", **more: str
) -> dict[str, str]:
    """Variables of an index and a number of processes, `names` by spaces."""
    rank, size, host = names.split(" ")
    return {rank: str(index), size: "2", host: address or f"node-{hosts}:1234", **more}


JAX = "JAX_PROCESS_ID JAX_NUM_PROCESSES JAX_COORDINATOR_ADDRESS"
KERAS = (
    "KERAS_DISTRIBUTION_PROCESS_ID KERAS_DISTRIBUTION_NUM_PROCESSES "
    "KERAS_DISTRIBUTION_JOB_ADDRESSES"
)
PET = "PET_NODE_RANK PET_NNODES PET_MASTER_ADDR"
SKY = "SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NODE_IPS"
SM = ["algo-1", "algo-2"]
POOLS = {"workerpool0": ["pool0-0:2222"], "workerpool1": ["pool1-0:2222"]}


def vertex(pools: Mapping[str, object], pool: str, index: int = 0) -> dict[str, str]:
    spec = {"cluster": pools, "environment": "cloud"}
    return {
        "CLUSTER_SPEC": json.dumps({**spec, "task": {"type": pool, "index": index}})
    }


class Row(NamedTuple):
    """Process `index` of two is started so; or process 0 of one."""

    name: str
    variables: dict[str, str]
    addresses: list[str] | None = None
    """Of all processes, if the launcher gives them."""
    coordinator: str = ""
    gpus: list[int] | None = None
    index: int = 1
    count: int = 2


HNP = "OMPI_MCA_orte_hnp_uri"
ROWS = {
    "TF_CONFIG, 1 host": Row(
        "TF_CONFIG",
        {"TF_CONFIG": tf_config(1, "localhost:1", "localhost:2")},
        ["localhost:1", "localhost:2"],
    ),
    "TF_CONFIG, 2 hosts": Row(
        "TF_CONFIG", {"TF_CONFIG": tf_config(1, "a:1", "b:1")}, ["a:1", "b:1"]
    ),
    "torchrun, 1 host": Row(
        "torchrun", torchrun(1, 1), coordinator="localhost:62268", gpus=[1]
    ),
    "torchrun, 2 hosts": Row("torchrun", torchrun(1, 2), coordinator="node-a:62268"),
    "torch's variables by hand, 2 hosts": Row(
        "torchrun",
        named(1, "RANK WORLD_SIZE MASTER_ADDR", 2, "a", MASTER_PORT="29500"),
        coordinator="a:29500",
    ),
    "torchrun, another port": Row(
        "torchrun",
        torchrun(1, 2, JAX_COORDINATOR_PORT="7000"),
        coordinator="node-a:7000",
    ),
    "Open MPI 4, 1 host": Row(
        "openmpi",
        openmpi(1, 1, **{HNP: "2074083328.0;tcp://192.0.2.2:49131;tcp6://[fd00::2]:4"}),
        coordinator=f"localhost:{61440 + 2074083328 // 4096 % 4096}",
        gpus=[1],
    ),
    "Open MPI 4, 2 hosts": Row(
        "openmpi",
        openmpi(1, 2, **{HNP: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}),
        coordinator=f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}",
    ),
    "Open MPI 4, 2 hosts, IPv6": Row(
        "openmpi",
        openmpi(1, 2, **{HNP: "8192.0;tcp6://[fe80::2,2620:10d::2]:43370"}),
        coordinator="[fe80::2]:61442",
    ),
    "Open MPI 5, 1 host": Row(
        "openmpi",
        openmpi(1, 1, PMIX_NAMESPACE="prterun-vm-6173@1"),
        coordinator=f"localhost:{61440 + 6173 % 4096}",
        gpus=[1],
    ),
    "Open MPI 5, 2 hosts": Row(
        "openmpi",
        openmpi(1, 2, PMIX_NAMESPACE="prterun-node-7-10@1"),
        coordinator="node-7:61450",
    ),
    "Open MPI 5 in Slurm, whose variables are those of its daemon": Row(
        "openmpi",
        openmpi(1, 2, **slurm(0, 2, SLURM_NTASKS="3", PMIX_NAMESPACE="prterun-n-1@1")),
        coordinator="n:61441",
    ),
    "MPICH on 2 hosts of SageMaker, three processes": Row(
        "mpich",
        {
            "PMI_RANK": "2",
            "PMI_SIZE": "3",
            "MPI_LOCALRANKID": "0",
            "MPI_LOCALNRANKS": "2",
            "JAX_COORDINATOR_ADDRESS": "algo-1:7000",
            "SM_HOSTS": json.dumps(SM),
            "SM_CURRENT_HOST": "algo-2",
        },
        coordinator="algo-1:7000",
        gpus=[0],
        index=2,
        count=3,
    ),
    "MPICH, 2 hosts": Row(
        "mpich",
        hydra(1, 2, JAX_COORDINATOR_ADDRESS="node-a:7000"),
        coordinator="node-a:7000",
    ),
    "JAX's variables, 1 host": Row(
        "jax", named(1, JAX, 1, "localhost:1234"), coordinator="localhost:1234"
    ),
    "Kubeflow TrainJob, JAX, 2 hosts": Row(
        "jax",
        named(1, JAX, 2, "t-node-0-0.t:29500", JOB_COMPLETION_INDEX="1"),
        coordinator="t-node-0-0.t:29500",
    ),
    "Kubeflow TrainJob, torch, 2 hosts": Row(
        "kubeflow",
        named(1, PET, 2, "t-node-0-0.t", PET_MASTER_PORT="29400"),
        coordinator="t-node-0-0.t:29400",
    ),
    "Kubeflow JAXJob, 1 host": Row("jaxjob", jaxjob(0, 1), index=0, count=1),
    "Kubeflow JAXJob, 2 hosts": Row(
        "jaxjob", jaxjob(1, 2), coordinator="t-worker-0:6666"
    ),
    "Keras, 1 host": Row(
        "keras",
        named(1, KERAS, 1, "localhost:1, localhost:2"),
        ["localhost:1", "localhost:2"],
    ),
    "Keras, 2 hosts": Row(
        "keras", named(1, KERAS, 2, "10.0.0.1:1234"), coordinator="10.0.0.1:1234"
    ),
    "srun, 1 host": Row("slurm", slurm(1, 1), ["n1:61440", "n1:61441"]),
    "srun, 2 hosts": Row("slurm", slurm(1, 2), ["n1:61440", "n2:61440"]),
    "srun over PMI, 2 hosts": Row(
        "mpich",
        slurm(1, 2, **hydra(1, 2, JAX_COORDINATOR_ADDRESS="n1:7000")),
        coordinator="n1:7000",
    ),
    "srun and torchrun, a node each": Row(
        "torchrun",
        torchrun(1, 2, 4, **slurm(0, 2)),
        coordinator="node-a:62268",
        gpus=[1],
        count=4,
    ),
    "JobSet, 2 hosts": Row(
        "kubernetes",
        {
            "JOB_COMPLETION_INDEX": "1",
            "JOBSET_NAME": "t",
            "JOBSET_REPLICATED_JOB_NAME": "w",
            "JAX_NUM_PROCESSES": "2",
        },
        ["t-w-0-0.t:2222", "t-w-0-1.t:2222"],
    ),
    "JobSet of `replicax manifest`, 2 hosts": Row(
        "TF_CONFIG",
        {"JOB_COMPLETION_INDEX": "1", "TF_CONFIG": tf_config(1, "t-0.t:1", "t-1.t:1")},
        ["t-0.t:1", "t-1.t:1"],
    ),
    "SageMaker, 2 hosts": Row(
        "sagemaker",
        {"SM_HOSTS": json.dumps(SM), "SM_CURRENT_HOST": "algo-2"},
        ["algo-1:61440", "algo-2:61440"],
    ),
    "SageMaker with torchrun, 2 hosts": Row(
        "torchrun",
        torchrun(1, 2, SM_HOSTS=json.dumps(SM), SM_CURRENT_HOST="algo-2"),
        coordinator="node-a:62268",
    ),
    "Vertex AI, 2 hosts": Row(
        "vertex", vertex(POOLS, "workerpool1"), ["pool0-0:2222", "pool1-0:2222"]
    ),
    "SkyPilot, 2 hosts": Row(
        "skypilot",
        named(1, SKY, 2, "10.0.0.1\n10.0.0.2"),
        ["10.0.0.1:61440", "10.0.0.2:61440"],
    ),
    "TPU slice on GKE, 2 hosts": Row(
        "tpu",
        {"TPU_WORKER_HOSTNAMES": "h0,h1", "TPU_WORKER_ID": "1"},
        ["h0:8482", "h1:8482"],
    ),
    "one process of torchrun": Row("torchrun", torchrun(0, 1, 1), index=0, count=1),
    "a blank TF_CONFIG": Row(
        "torchrun", torchrun(1, 2, TF_CONFIG=" "), coordinator="node-a:62268"
    ),
    "one step of one task on two nodes of Slurm": Row(
        "slurm",
        {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "1"},
        index=0,
        count=1,
    ),
}
