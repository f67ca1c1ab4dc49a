"""The cluster of a Kubernetes Job or JobSet."""

import pytest

from replicax.cluster.config import check_cluster
from replicax.cluster.kubernetes import KubernetesClusterResolver
from replicax.errors import ClusterConfigError

VARIABLES = (
    "HOSTNAME",
    "JOB_COMPLETION_INDEX",
    "JOBSET_NAME",
    "JOBSET_REPLICATED_JOB_NAME",
    "JOBSET_JOB_INDEX",
)


@pytest.fixture(autouse=True)
def no_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_pod(monkeypatch: pytest.MonkeyPatch, index: int = 1, **values: str) -> None:
    for name, value in {"JOB_COMPLETION_INDEX": str(index), **values}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("index", range(3))
def test_indexed_job(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pod(monkeypatch, index, HOSTNAME=f"my-train-{index}")
    resolver = KubernetesClusterResolver(3, service="pods")
    assert resolver.cluster_spec().as_dict() == {
        "worker": [f"my-train-{i}.pods:2222" for i in range(3)]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", index)
    assert resolver.master() == f"my-train-{index}.pods:2222"
    check_cluster(resolver.cluster_spec(), resolver.task_type, resolver.task_id)


def test_names_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pod(monkeypatch, HOSTNAME="node7.example.com")
    resolver = KubernetesClusterResolver(2, service="s", job_name="j", port=1)
    assert resolver.cluster_spec().as_dict() == {"worker": ["j-0.s:1", "j-1.s:1"]}


@pytest.mark.parametrize("service", [None, "net"])
def test_jobset(service: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pod(
        monkeypatch,
        JOBSET_NAME="js",
        JOBSET_REPLICATED_JOB_NAME="trainers",
        JOBSET_JOB_INDEX="0",
    )
    resolver = KubernetesClusterResolver(num_workers=2, service=service)
    domain = service or "js"
    assert resolver.cluster_spec().as_dict() == {
        "worker": [f"js-trainers-0-{i}.{domain}:2222" for i in range(2)]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("environment", "arguments", "problem"),
    [
        ({"JOB_COMPLETION_INDEX": ""}, {}, "JOB_COMPLETION_INDEX is not set"),
        ({"JOB_COMPLETION_INDEX": "x"}, {}, "JOB_COMPLETION_INDEX is 'x'"),
        (
            {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"},
            {},
            "INDEX is 2, but num_workers is 2",
        ),
        ({"HOSTNAME": ""}, {}, "HOSTNAME is not set; expected the Job's name and '-1'"),
        ({"HOSTNAME": "node7"}, {}, "HOSTNAME is 'node7'"),
        ({}, {"service": None}, "pass service=, the value of 'subdomain'"),
        ({"JOBSET_NAME": "js"}, {}, "REPLICATED_JOB_NAME is not set.*fieldRef from"),
        (
            {"JOBSET_NAME": "js", "JOBSET_JOB_INDEX": "1"},
            {},
            "JOBSET_JOB_INDEX is '1'; expected '0'",
        ),
    ],
)
def test_one_fault(
    environment: dict[str, str],
    arguments: dict,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_pod(monkeypatch, **{"HOSTNAME": "train-1", **environment})
    options = {"num_workers": 2, "service": "pods", **arguments}
    with pytest.raises(ClusterConfigError, match=problem):
        KubernetesClusterResolver(**options)
