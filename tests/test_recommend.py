"""Which strategy is recommended, and how TF_CONFIG is read."""

import json

import pytest

import replicax as rx
from replicax import recommend
from replicax.recommend import TFConfig, fitting_strategy


def tf_config(
    task: tuple[str, int] | None = ("worker", 0), **num_tasks: int
) -> TFConfig:
    cluster = {
        job: [f"{job}{i}:2222" for i in range(n)] for job, n in num_tasks.items()
    }
    document: dict[str, object] = {"cluster": cluster}
    if task is not None:
        document["task"] = {"type": task[0], "index": task[1]}
    return TFConfig.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [
        (["cpu"], "OneDeviceStrategy"),
        (["gpu"], "OneDeviceStrategy"),
        (["cpu"] * 4, "MirroredStrategy"),
        (["gpu"] * 2, "MirroredStrategy"),
        (["gpu", "cpu", "cpu"], "OneDeviceStrategy"),
    ],
)
def test_one_machine(devices: list[str], strategy: str) -> None:
    choice = fitting_strategy(devices)
    assert choice.strategy == strategy
    assert choice.available
    assert choice.until_then is None


@pytest.mark.parametrize(
    ("num_devices", "until_then"), [(1, "OneDeviceStrategy"), (4, "MirroredStrategy")]
)
def test_tpu(num_devices: int, until_then: str) -> None:
    choice = fitting_strategy(["tpu"] * num_devices)
    assert choice.strategy == "TPUStrategy"
    assert not choice.available
    assert choice.until_then == until_then


def test_several_workers() -> None:
    choice = fitting_strategy(["gpu"] * 2, tf_config(chief=1, worker=2))
    assert choice.strategy == "MultiWorkerMirroredStrategy"
    assert not choice.available
    assert "3 workers" in choice.reason
    assert choice.until_then == "MirroredStrategy"


def test_several_workers_with_tpus_can_use_their_own_chips_until_then() -> None:
    choice = fitting_strategy(["tpu"] * 4, tf_config(worker=2))
    assert choice.until_then == "MirroredStrategy"


def test_parameter_servers() -> None:
    choice = fitting_strategy(["cpu"], tf_config(worker=3, ps=2))
    assert choice.strategy == "ParameterServerStrategy"
    assert not choice.available
    assert choice.until_then == "OneDeviceStrategy"


@pytest.mark.parametrize(
    "config",
    [
        None,
        tf_config(task=None),
        tf_config(worker=1),
        tf_config(task=("evaluator", 0), worker=4, ps=1),
    ],
    ids=["none", "empty", "one worker", "evaluator"],
)
def test_without_a_training_cluster_the_machine_decides(
    config: TFConfig | None,
) -> None:
    assert fitting_strategy(["gpu"] * 2, config).strategy == "MirroredStrategy"


def test_no_devices() -> None:
    with pytest.raises(ValueError, match=r"there must be a device; got devices=\[\]"):
        fitting_strategy([])


def test_available_strategies_are_those_of_the_package() -> None:
    recommended = {
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    }
    assert {name for name in recommended if hasattr(rx, name)} == recommend.AVAILABLE


def test_tf_config_as_understood() -> None:
    config = tf_config(task=("worker", 1), worker=2, ps=1)
    assert config.cluster == {
        "worker": ("worker0:2222", "worker1:2222"),
        "ps": ("ps0:2222",),
    }
    assert (config.task_type, config.task_index) == ("worker", 1)
    assert config.num_workers == 2


def test_tf_config_with_a_quoted_index() -> None:
    text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker",'
    assert TFConfig.from_json(text + ' "index": "1"}}').task_index == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{oops", "not valid JSON: .* at line 1, column 2; got '{oops'"),
        ("[1]", r"the value is not a JSON object; got '\[1\]'"),
        ('{"cluster": []}', "cluster is not a JSON object"),
        ('{"cluster": {"boss": ["a:1"]}}', "'boss' is no job; there are chief, worker"),
        ('{"cluster": {"worker": "a:1"}}', "job 'worker' is not a list of 'host:port'"),
        ('{"cluster": {"worker": [1]}}', "job 'worker' is not a list of 'host:port'"),
        (
            '{"cluster": {"worker": ["a:1"]}}',
            "the cluster has tasks but 'task' is missing",
        ),
        ('{"task": "worker"}', "task is not a JSON object"),
        ('{"task": {"type": "boss"}}', "the task's type is none of chief, worker"),
        ('{"task": {"type": ["worker"]}}', "the task's type is none of chief, worker"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            "the task is not in the cluster, which has 1 'worker' tasks",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}',
            "the task's index is not an integer",
        ),
    ],
)
def test_malformed_tf_config(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^TF_CONFIG: {problem}") as caught:
        TFConfig.from_json(text)
    assert "expected for example" in str(caught.value)


def test_a_long_tf_config_is_shown_cut() -> None:
    with pytest.raises(ValueError, match=r"got 'x{117}\.\.\.'"):
        TFConfig.from_json("x" * 10_000)
