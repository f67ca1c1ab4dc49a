"""`RunConfig`: the task that a script reads, and wrong values."""

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


@pytest.mark.parametrize(("job", "index"), [("chief", 0), ("worker", 1), ("ps", 0)])
def test_task_of_tf_config(
    job: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"cluster": CLUSTER, "task": {"type": job, "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    config = RunConfig()
    assert (config.task_type, config.task_id) == (job, index)
    assert config.cluster_spec.num_tasks("worker") == 2


def test_a_single_process_is_worker_0() -> None:
    config = RunConfig()
    assert (config.task_type, config.task_id) == ("worker", 0)
    assert config.is_chief


def test_replace_keeps_one_save_interval() -> None:
    config = RunConfig(save_checkpoints_steps=5).replace(save_checkpoints_secs=60.0)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (None, 60)
    config = config.replace(save_checkpoints_steps=7)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (7, None)


def test_an_empty_model_dir_is_an_error() -> None:
    with pytest.raises(ValueError, match="Estimator: model_dir must name a folder"):
        LinearRegressor([numeric_column("x")], model_dir="")
