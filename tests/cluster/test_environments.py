"""Launchers' environments, as recorded or documented: the right cluster or error."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.cluster.recorded_environments import (
    KERAS,
    POOLS,
    ROWS,
    SKY,
    SM,
    hydra,
    named,
    openmpi,
    slurm,
    tf_config,
    torchrun,
    vertex,
)

import replicax as rx
from replicax.cluster.detection import ENVIRONMENTS, detect, local_devices, resolve
from replicax.cluster.environments.base import IncompleteError
from replicax.cluster.environments.cloud import SageMaker
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.tpu_system import require_single
from replicax.errors import ClusterConfigError

PREFIXES = (
    *("CLUSTER_SPEC", "COMPLETION", "GROUP_", "JAX_COORD", "JAX_NUM_PROC", "JAX_PROC"),
    *("JOB", "KERAS_DIST", "LOCAL_", "MASTER_", "MPI", "OMPI_", "PET_", "PMI"),
    *("RANK", "SKYPILOT_", "SLURM_", "SM_", "TF_CONFIG", "TORCH", "TPU_", "WORLD_"),
)
CALLER = "MultiWorkerMirroredStrategy"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # Slurm's resolver may set it.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", ROWS)
def test_the_detected_cluster(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[case]
    set_all(monkeypatch, row.variables)
    environment, place = detect(None, CALLER)
    assert environment is not None
    assert environment.name == row.name
    assert (place.index, place.count) == (row.index, row.count)
    assert place.coordinator == row.coordinator
    assert local_devices(place) == row.gpus
    if row.addresses is not None:
        resolver, _ = resolve(None, Timeouts(), CALLER)
        assert resolver.cluster_spec().as_dict() == {"worker": row.addresses}
        assert (resolver.task_type, resolver.task_id) == ("worker", row.index)
    # The launcher's name as an argument is the same.
    chosen, again = detect(row.name, CALLER)
    assert chosen is environment
    assert (again.index, again.count) == (row.index, row.count)
    # And both processes of a job on one machine are refused by none.
    with pytest.raises(ClusterConfigError, match="no sign of this launcher"):
        detect("keras" if row.name != "keras" else "slurm", CALLER)


def test_mpich_on_one_host_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, hydra(0, 1))
    _, place = detect(None, CALLER)
    assert place.coordinator == "localhost:61440"


def test_all_launchers_have_a_row() -> None:
    rows = {row.name for row in ROWS.values()}
    assert ENVIRONMENTS.keys() - rows == {"ray", "jax.distributed"}


ERRORS = {
    "torch, no address": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        r"torchrun: RANK='0', WORLD_SIZE='2', but MASTER_ADDR and MASTER_PORT are not "
        r"set\. Set MASTER_ADDR and MASTER_PORT in every process\. .*'alone'",
    ),
    "torch, index out of range": (
        {"RANK": "2", "WORLD_SIZE": "2"},
        "RANK must be a number from 0 to 1; got RANK='2', WORLD_SIZE='2'",
    ),
    "torch, a port that is none": (
        torchrun(1, 2, MASTER_PORT="x"),
        "MASTER_PORT must be a number from 1 to 65535",
    ),
    "MPICH, 2 hosts": (
        hydra(1, 2),
        "JAX_COORDINATOR_ADDRESS is not set.*mpiexec -genv JAX_COORDINATOR_ADDRESS",
    ),
    "PMIx without a number of processes": (
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-vm-1@1"},
        "JAX_PROCESS_ID and JAX_NUM_PROCESSES are not set",
    ),
    "Open MPI, an unknown runtime": (openmpi(1, 2), "JAX_COORDINATOR_ADDRESS is not"),
    "Keras, another number": (
        named(1, KERAS, 2, "a:1,b:1,c:1"),
        "KERAS_DISTRIBUTION_NUM_PROCESSES must be a number from 3 to 3",
    ),
    "Kubeflow, elastic": (
        {"PET_NODE_RANK": "0", "PET_NNODES": "1:2"},
        "PET_NNODES must be a number.*got PET_NODE_RANK='0', PET_NNODES='1:2'",
    ),
    "a batch script of Slurm without srun": (
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        r"SLURM_STEP_NODELIST is not set.*Start the script with srun\..*'alone'",
    ),
    "a batch script of Slurm on two nodes, without a number of tasks": (
        {"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"},
        "SLURM_STEP_NODELIST is not set",
    ),
    "JAX, a port that is none": (
        {
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "a b",
            "JAX_COORDINATOR_PORT": "x",
        },
        "JAX_COORDINATOR_PORT must be a port number; got 'x'",
    ),
    "torch, an address that is none": (
        torchrun(1, 2, MASTER_ADDR="a b"),
        "torchrun: the address of process 0 is 'a b:62268'.*MASTER_ADDR='a b'",
    ),
    "an Indexed Job": (
        {"JOB_COMPLETION_INDEX": "0"},
        "kubernetes: JOB_COMPLETION_INDEX='0', but JAX_NUM_PROCESSES is not set",
    ),
    "an Indexed Job without a service": (
        {"JOB_COMPLETION_INDEX": "0", "JAX_NUM_PROCESSES": "2", "HOSTNAME": "t-0"},
        "JAX_PROCESS_ID is not set.*headless service is unknown",
    ),
    "SageMaker, another host": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-3"},
        "this host must be one of the job's hosts.*'algo-3'",
    ),
    "SageMaker, no JSON": (
        {"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"},
        "SM_HOSTS must be JSON; got 'algo-1'",
    ),
    "Vertex AI, pools of other roles": (
        vertex({**POOLS, "workerpool2": ["p:1"]}, "workerpool2"),
        "of a replica in 'workerpool0' or 'workerpool1'",
    ),
    "Vertex AI, another document": (
        {"CLUSTER_SPEC": '{"cluster": {}}'},
        "CLUSTER_SPEC must have 'cluster' with 'workerpool0'",
    ),
    "SkyPilot, another number": (
        {**named(0, SKY, 1, "10.0.0.1")},
        "SKYPILOT_NUM_NODES must be a number from 1 to 1",
    ),
    "SkyPilot, no addresses": (
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"},
        "SKYPILOT_NODE_IPS is not set",
    ),
    "TF_CONFIG, malformed, and torchrun": (
        torchrun(1, 2, TF_CONFIG="{"),
        "TF_CONFIG: it is not valid JSON",
    ),
    "one task of Slurm, and torch's variables without an address": (
        {"SLURM_NTASKS": "1", "RANK": "0", "WORLD_SIZE": "2"},
        "MASTER_ADDR and MASTER_PORT are not set",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_right_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, message = ERRORS[case]
    set_all(monkeypatch, variables)
    with pytest.raises(ClusterConfigError, match=f"(?s){message}"):
        rx.MultiWorkerMirroredStrategy()
    for make in (rx.FullyShardedStrategy, rx.ModelParallelStrategy):
        with pytest.raises(ClusterConfigError, match=f"(?s){message}"):
            make()
    # On purpose it is one argument.
    alone = rx.MultiWorkerMirroredStrategy("alone")
    assert alone.num_workers == 1
    assert (alone.task_type, alone.task_id) == (None, None)


CONTRADICTIONS = {
    "torchrun in each task of Slurm": (
        torchrun(0, 1, 1, **slurm(1, 2)),
        ["torchrun says process 0 of 1 (RANK='0', WORLD_SIZE='1'",
         "slurm says process 1 of 2 (SLURM_PROCID='1', SLURM_NTASKS='2')",
         "cluster_resolver='torchrun' or 'slurm'", "cluster_resolver='alone'"],
    ),
    "TF_CONFIG and torchrun, numbers": (
        torchrun(1, 1, 4, TF_CONFIG=tf_config(1, "a:1", "b:1")),
        ["TF_CONFIG says process 1 of 2", "torchrun says process 1 of 4"],
    ),
    "one process of mpirun on each host of SageMaker": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1",
         "SM_HOSTS": json.dumps(SM), "SM_CURRENT_HOST": "algo-2"},
        ["openmpi says process 0 of 1", "sagemaker says process 1 of 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_launchers_that_contradict_each_other(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, messages = CONTRADICTIONS[case]
    set_all(monkeypatch, variables)
    with pytest.raises(ClusterConfigError) as caught:
        rx.MultiWorkerMirroredStrategy()
    assert str(caught.value).startswith(
        f"{CALLER}: two launchers contradict each other"
    )
    for message in messages:
        assert message in str(caught.value)
    assert rx.MultiWorkerMirroredStrategy("alone").num_workers == 1


def test_an_evaluator_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"type": "evaluator", "index": 0}
    config = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert rx.MultiWorkerMirroredStrategy().num_workers == 1


def test_the_file_of_sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps({"current_host": "algo-2", "hosts": SM}))
    monkeypatch.setattr(SageMaker, "resources", file)
    resolver, place = resolve(None, Timeouts(), CALLER)
    assert (place.index, place.count) == (1, 2)
    assert resolver.cluster_spec().job_tasks("worker")[1] == "algo-2:61440"


def test_bound_gpus_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, torchrun(1, 1))
    _, place = detect(None, CALLER)
    for visible, gpus in [("0,1", [1]), ("1", None), ("4,5,6,7", [1])]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local_devices(place) == gpus
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1")
    assert local_devices(place) is None


def test_names() -> None:
    with pytest.raises(ValueError, match=r"'alone' or the name of a launcher.*'slurm'"):
        rx.MultiWorkerMirroredStrategy("slurmm")
    with pytest.raises(ClusterConfigError, match=re.escape("RANK and WORLD_SIZE not")):
        rx.MultiWorkerMirroredStrategy("torchrun")
    with pytest.raises(TypeError, match="cluster_resolver must be"):
        rx.ParameterServerStrategy("slurm")  # pyright: ignore[reportArgumentType]
    assert issubclass(IncompleteError, ClusterConfigError)


def test_no_launcher_is_alone() -> None:
    assert detect(None, CALLER)[0] is None
    assert rx.MultiWorkerMirroredStrategy().num_workers == 1


def test_a_tpu_of_one_host_refuses_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, named(1, SKY, 2, "10.0.0.1\n10.0.0.2"))
    message = (
        r"TPUStrategy: the TPU slice has one host.*skypilot has started 2 processes "
        r"\(SKYPILOT_NODE_RANK='1'.*TPUClusterResolver\('local'\)"
    )
    with pytest.raises(ClusterConfigError, match=message):
        require_single("TPUStrategy")
    assert rx.cluster_resolver.TPUClusterResolver("local").is_local
    assert not rx.cluster_resolver.TPUClusterResolver("").is_local
    monkeypatch.delenv("SKYPILOT_NODE_IPS")
    with pytest.raises(ClusterConfigError, match="but SKYPILOT_NODE_IPS is not set"):
        require_single("TPUStrategy")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "")
    require_single("TPUStrategy")
