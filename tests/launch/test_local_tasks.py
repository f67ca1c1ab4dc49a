"""Ports, cores, GPUs and TF_CONFIG of the tasks of a local cluster."""

import json
import os
import socket
from pathlib import Path

import pytest

from replicax._util.gpus import visible_gpus
from replicax.launch.local_tasks import (
    check_tasks,
    divide_cores,
    divide_gpus,
    free_ports,
    task_names,
    tf_configs,
)


@pytest.mark.parametrize(
    ("num_tasks", "message"),
    [
        ({"wroker": 1}, "no job 'wroker'; the jobs are chief, worker, ps, evaluator"),
        ({"worker": -1}, "number of worker tasks must be 0 or more; got -1"),
        ({"worker": "2"}, "number of worker tasks must be 0 or more; got '2'"),
        ({"chief": 2}, "one chief at most; got 2"),
        ({"worker": 0}, "no tasks"),
        ({}, "no tasks"),
    ],
)
def test_invalid_numbers_of_tasks(num_tasks: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^here: .*{message}"):
        check_tasks(num_tasks, "here")


def test_every_task_has_its_tf_config() -> None:
    num_tasks = check_tasks({"evaluator": 1, "ps": 1, "worker": 2, "chief": 1}, "here")
    configs = tf_configs(num_tasks)
    names = ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    assert list(configs) == task_names(num_tasks) == names
    parsed = {name: json.loads(text) for name, text in configs.items()}
    cluster = parsed["chief:0"]["cluster"]
    assert all(config["cluster"] == cluster for config in parsed.values())
    assert {job: len(tasks) for job, tasks in cluster.items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    addresses = [address for tasks in cluster.values() for address in tasks]
    assert len(set(addresses)) == 4
    assert parsed["worker:1"]["task"] == {"type": "worker", "index": 1}
    assert parsed["evaluator:0"]["task"] == {"type": "evaluator", "index": 0}


def test_ports_are_free_and_below_the_ephemeral_ones() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if limits.exists():
        assert max(ports) < int(limits.read_text().split()[0])


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports(2)
    monkeypatch.setattr(
        "replicax.launch.local_tasks._candidate_ports", lambda: iter([taken, free, 0])
    )
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(1) == [free]


def test_too_few_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "replicax.launch.local_tasks._candidate_ports", lambda: iter(free_ports_before)
    )
    free_ports_before: list[int] = []
    with pytest.raises(RuntimeError, match=r"0 free TCP ports .* 2 are needed"):
        free_ports(2)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cannot pin here")
def test_tasks_have_distinct_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 11})
    assert divide_cores(["a", "b"], 2) == {"a": [2, 3], "b": [5, 7]}
    with pytest.raises(ValueError, match=r"3 workers with 2 cores each need 6 .* 5\."):
        divide_cores(["a", "b", "c"], 2)


def test_a_system_that_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(RuntimeError, match="cannot pin processes to cores"):
        divide_cores(["a"], 1)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """The folder in which the driver of NVIDIA has four GPUs."""
    for number in range(4):
        (tmp_path / f"0000:{number}1:00.0").mkdir()
    monkeypatch.setattr("replicax._util.gpus._DRIVER", tmp_path)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2, 0", ["2", "0"]),
        ("1,-1,2", ["1"]),
        ("1,7,2", ["1"]),
        ("", []),
        ("-1", []),
        ("GPU-8932f937,GPU-11ab", ["GPU-8932f937", "GPU-11ab"]),
    ],
)
@pytest.mark.usefixtures("driver")
def test_visible_gpus(visible: str | None, seen: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment) == seen


@pytest.mark.parametrize(
    ("tasks", "environment", "gpus"),
    [
        ({"worker": 2}, {}, ["0,1", "2,3"]),
        ({"chief": 1, "worker": 1, "ps": 2}, {}, ["0,1", "2,3"]),
        ({"worker": 2}, {"CUDA_VISIBLE_DEVICES": "3,1,0"}, ["3", "1"]),
        ({"worker": 2}, {"JAX_PLATFORMS": "cuda,cpu"}, ["0,1", "2,3"]),
        # One task takes all, and several that are more than the GPUs share them.
        ({"worker": 1, "ps": 1, "evaluator": 1}, {}, []),
        ({"worker": 5}, {}, []),
        ({"worker": 2}, {"JAX_PLATFORMS": "cpu"}, []),
        ({"worker": 2}, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
@pytest.mark.usefixtures("driver")
def test_tasks_that_train_divide_the_gpus(
    tasks: dict[str, int], environment: dict[str, str], gpus: list[str]
) -> None:
    found = divide_gpus(tasks, environment)
    names = [n for n in task_names(tasks) if n.startswith(("chief", "worker"))]
    own = [found[n] for n in names if n in found]
    assert own == [{"CUDA_VISIBLE_DEVICES": each} for each in gpus]
    assert "ps:0" not in found


@pytest.mark.parametrize(
    ("workers", "variables"),
    [(2, {"JAX_PLATFORMS": "cpu"}), (3, {"CUDA_VISIBLE_DEVICES": "3"})],
)
@pytest.mark.usefixtures("driver")
def test_the_evaluator_gets_the_remaining_gpus(workers: int, variables: dict) -> None:
    found = divide_gpus({"worker": workers, "evaluator": 1}, {})
    assert found["evaluator:0"] == variables
