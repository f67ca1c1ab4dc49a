"""Which strategy is recommended."""

import pytest

import replicax as rx
from replicax.cluster.config import TaskConfig, check_cluster
from replicax.cluster.spec import ClusterSpec
from replicax.commands.info import fitting_strategy


def tf_config(
    task: tuple[str, int] | None = ("worker", 0), **num_tasks: int
) -> TaskConfig:
    cluster = ClusterSpec(
        {job: [f"{job}{i}:2222" for i in range(n)] for job, n in num_tasks.items()}
    )
    return check_cluster(cluster, *(task or (None, None)))


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


@pytest.mark.parametrize("num_devices", [1, 4])
def test_tpu(num_devices: int) -> None:
    choice = fitting_strategy(["tpu"] * num_devices)
    assert choice.strategy == "TPUStrategy"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_several_workers(platform: str) -> None:
    choice = fitting_strategy([platform] * 2, tf_config(chief=1, worker=2))
    assert choice.strategy == "MultiWorkerMirroredStrategy"
    assert "3 workers" in choice.reason


def test_parameter_servers() -> None:
    choice = fitting_strategy(["cpu"], tf_config(worker=3, ps=2))
    assert choice.strategy == "ParameterServerStrategy"
    assert "parameter servers (2) for 3 workers" in choice.reason


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
    config: TaskConfig | None,
) -> None:
    assert fitting_strategy(["gpu"] * 2, config).strategy == "MirroredStrategy"


def test_several_accelerators_may_be_short_of_memory() -> None:
    (note,) = fitting_strategy(["gpu"] * 2).notes
    assert "CentralStorageStrategy keeps the variables and the optimizer state" in note
    assert "not in this version" not in note


def test_available_strategies_are_those_of_the_package() -> None:
    recommended = {
        "CentralStorageStrategy",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    }
    assert all(hasattr(rx, name) for name in recommended)
