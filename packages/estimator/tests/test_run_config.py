"""`RunConfig`: what a script reads of the cluster, and wrong values."""

import json

import pytest

from replicax.feature_column import numeric_column
from replicax_estimator import LinearRegressor, RunConfig

CLUSTER = {
    "chief": ["a:1"],
    "worker": ["b:1", "c:1"],
    "ps": ["d:1"],
    "evaluator": ["e:1"],
}


@pytest.mark.parametrize(
    ("job", "index", "number"),
    [
        ("chief", 0, 0),
        ("worker", 0, 1),
        ("worker", 1, 2),
        ("ps", 0, 3),
        ("evaluator", 0, None),
    ],
)
def test_a_task_among_those_of_a_cluster(
    job: str, index: int, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"cluster": CLUSTER, "task": {"type": job, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    config = RunConfig()
    assert (config.task_type, config.task_id) == (job, index)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 1)
    assert config.global_id_in_cluster == number


def test_a_single_process_is_one_worker() -> None:
    config = RunConfig()
    assert (config.num_worker_replicas, config.num_ps_replicas) == (1, 0)
    assert config.global_id_in_cluster == 0


def test_a_folder_without_a_name() -> None:
    with pytest.raises(ValueError, match="RunConfig: model_dir must name a folder"):
        RunConfig(model_dir="")
    with pytest.raises(ValueError, match="Estimator: model_dir must name a folder"):
        LinearRegressor([numeric_column("x")], model_dir="")
