"""ClusterSpec: what it answers, and that it is a value."""

import pickle

import pytest

from replicax.cluster.spec import ClusterSpec

CLUSTER = {
    "ps": ["p:1"],
    "worker": ["b:1", "c:1"],
    "chief": ["a:1"],
    "evaluator": ["e:1"],
}


def test_jobs_and_tasks() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["ps", "worker", "chief", "evaluator"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "c:1"
    assert spec.job_tasks("worker") == ["b:1", "c:1"]
    assert spec.as_dict() == CLUSTER
    assert ClusterSpec(spec) == spec


def test_workers_are_the_chief_and_then_the_workers() -> None:
    assert ClusterSpec(CLUSTER).workers == (
        ("chief", 0, "a:1"),
        ("worker", 0, "b:1"),
        ("worker", 1, "c:1"),
    )
    assert [task.name for task in ClusterSpec(CLUSTER).workers][:2] == [
        "chief:0",
        "worker:0",
    ]
    assert ClusterSpec({"ps": ["p:1"]}).workers == ()


def test_tasks_by_index_may_have_gaps() -> None:
    spec = ClusterSpec({"worker": {12: "c:1", 0: "a:1"}})
    assert spec.task_indices("worker") == [0, 12]
    assert spec.as_dict() == {"worker": {0: "a:1", 12: "c:1"}}
    assert spec.job_tasks("worker") == ["a:1", *[None] * 11, "c:1"]
    assert spec.workers[1].name == "worker:12"
    assert ClusterSpec({"worker": {1: "b:1", 0: "a:1"}}) == ClusterSpec(
        {"worker": ["a:1", "b:1"]}
    )


def test_equality_hash_and_pickle() -> None:
    spec = ClusterSpec(CLUSTER)
    reordered = ClusterSpec(dict(reversed(CLUSTER.items())))
    assert spec == reordered
    assert hash(spec) == hash(reordered)
    assert spec.fingerprint == reordered.fingerprint
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert eval(repr(spec)) == spec
    assert spec != CLUSTER
    with pytest.raises(AttributeError):
        spec.jobs = []  # pyright: ignore[reportAttributeAccessIssue]
    spec.as_dict()["worker"].clear()
    assert spec.num_tasks("worker") == 2


@pytest.mark.parametrize(
    "other",
    [
        {**CLUSTER, "worker": ["c:1", "b:1"]},
        {**CLUSTER, "worker": ["b:1", "c:2"]},
        {k: v for k, v in CLUSTER.items() if k != "evaluator"},
    ],
)
def test_other_clusters_have_other_fingerprints(other: dict[str, list[str]]) -> None:
    assert ClusterSpec(other) != ClusterSpec(CLUSTER)
    assert ClusterSpec(other).fingerprint != ClusterSpec(CLUSTER).fingerprint


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    assert ClusterSpec({"worker": ["a:1", "b:1"]}).fingerprint == "ed0edb42d893"


def test_unknown_jobs_and_tasks() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(ValueError, match=r"job_name='boss', expected one of \['work"):
        spec.num_tasks("boss")
    with pytest.raises(ValueError, match=r"task_index=1, expected one of \[0\]"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        (["a:1"], "cluster is a list"),
        ({1: ["a:1"]}, "job 1 must be a name"),
        ({"worker": "a:1"}, "job 'worker' must .*; got 'a:1'"),
        ({"worker": [None]}, r"job 'worker' must .*; got \[None\]"),
        ({"worker": {"0": "a:1"}}, "from zero up; got {'0': 'a:1'}"),
        ({"worker": {-1: "a:1"}}, "from zero up; got {-1: 'a:1'}"),
    ],
)
def test_wrong_kinds(cluster: object, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        ClusterSpec(cluster)
