"""The cluster of a Slurm job step."""

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster.slurm import (
    SlurmClusterResolver,
    expand_hostlist,
    expand_tasks_per_node,
)
from replicax.errors import ClusterConfigError


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of Slurm's at first, and CUDA_VISIBLE_DEVICES as before at last."""
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def set_step(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    nodes: str = "n[1-2],m5",
    tasks_per_node: str = "2(x2),1",
    **more: str,
) -> None:
    counts = expand_tasks_per_node(tasks_per_node)
    places = [(n, i) for n, count in enumerate(counts) for i in range(count)]
    values = {
        "PROCID": str(rank),
        "NTASKS": str(len(places)),
        "STEP_NUM_TASKS": str(len(places)),
        "STEP_NODELIST": nodes,
        "STEP_TASKS_PER_NODE": tasks_per_node,
        "NODEID": str(places[rank][0]),
        "LOCALID": str(places[rank][1]),
        **more,
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize("rank", range(5))
def test_all_tasks_see_the_same_cluster(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_step(monkeypatch, rank)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["n1:8888", "n1:8889", "n2:8888", "n2:8889", "m5:8888"]
    }
    assert resolver.get_task_info() == ("worker", rank)
    assert resolver.master() == resolver.cluster_spec().task_address("worker", rank)


@pytest.mark.parametrize(
    ("rank", "task"), [(0, ("chief", 0)), (1, ("ps", 0)), (4, ("worker", 2))]
)
def test_jobs_take_the_tasks_in_alphabetic_order(
    rank: int, task: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_step(monkeypatch, rank)
    resolver = SlurmClusterResolver({"worker": 3, "ps": 1, "chief": 1}, port_base=2222)
    assert resolver.get_task_info() == task
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["n1:2222"],
        "ps": ["n1:2223"],
        "worker": ["n2:2222", "n2:2223", "m5:2222"],
    }


def test_tasks_per_node_as_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    set_step(monkeypatch, 3, "n[1-2]", "2(x2)")
    monkeypatch.delenv("SLURM_STEP_TASKS_PER_NODE")
    resolver = SlurmClusterResolver(tasks_per_node=2)
    assert resolver.cluster_spec().num_tasks("worker") == 4
    assert resolver.master() == "n2:8889"


def test_one_task_needs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n7")
    assert SlurmClusterResolver().master() == "n7:8888"


def test_outside_slurm() -> None:
    with pytest.raises(
        ClusterConfigError, match=r"SLURM_PROCID and SLURM_NTASKS are not set.* srun\."
    ):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"STEP_NUM_TASKS": "6"}, r"run 5 tasks .*, but the step has 6"),
        ({"STEP_TASKS_PER_NODE": "2(x2)"}, "counts 2 nodes, but the step has 3"),
        ({"STEP_TASKS_PER_NODE": "2(x"}, r"malformed at '2\(x'"),
        ({"STEP_NODELIST": "n[1-2"}, r"'n\[1-2' is malformed"),
        ({"STEP_NODELIST": "n1,n1,n2"}, "run 3 tasks .*, but the step has 5"),
        ({"NODEID": "2"}, "on node 2, expected 0. .*srun --distribution=block"),
    ],
)
def test_variables_that_contradict_each_other(
    changed: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_step(monkeypatch, 0, **changed)
    with pytest.raises(ClusterConfigError, match=f"^SlurmClusterResolver: .*{problem}"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"jobs": {"worker": 4}}, "the step's 5 tasks"),
        ({"jobs": {"worker": 6, "ps": -1}}, "must be some of"),
        ({"jobs": {"boss": 5}}, "must be some of chief, worker"),
        ({"tasks_per_node": 2}, "run 6 tasks .*, but the step has 5"),
        ({"gpus_per_node": 2, "gpus_per_task": 2}, "2 tasks want 2 GPUs each"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: dict, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_step(monkeypatch, 0)
    with pytest.raises(ClusterConfigError, match=problem):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("rank", "environment", "arguments", "visible", "count"),
    [
        (0, {"SLURM_GPUS_ON_NODE": "4"}, {}, "0,1", 2),
        (1, {"SLURM_GPUS_ON_NODE": "4"}, {}, "2,3", 2),
        (1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, "6,7", 2),
        (1, {"SLURM_GPUS_ON_NODE": "4"}, {"gpus_per_task": 1}, "1", 1),
        (1, {}, {"gpus_per_node": 2}, "1", 1),
        (1, {"SLURM_GPUS_ON_NODE": "4"}, {"auto_set_gpu": False}, None, 2),
        # A node's only task, and GPUs that Slurm has bound: nothing to divide.
        (4, {"SLURM_GPUS_ON_NODE": "4"}, {}, None, 4),
        (1, {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}, {}, "0", 1),
        (1, {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, {}, "0,1", 2),
        (1, {"SLURM_GPU_BIND": "closest", "CUDA_VISIBLE_DEVICES": "3"}, {}, "3", 1),
        (1, {"SLURM_GPU_BIND": "none", "CUDA_VISIBLE_DEVICES": "0,1"}, {}, "1", 1),
    ],
)
def test_gpus(
    rank: int,
    environment: dict[str, str],
    arguments: dict,
    visible: str | None,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step(monkeypatch, rank)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolver = SlurmClusterResolver(**arguments)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert resolver.num_accelerators() == {"GPU": count}


def test_gpus_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_step(monkeypatch, 1, GPUS_ON_NODE="4")
    SlurmClusterResolver()
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 2}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "a[", "a]", "a[]", "a[1", "a[1-]", "a[2-1]", "a[x]", "a[1,]"),
        *("a[[1]]", "a[1][", "a b", "a[1-2-3]"),
    ],
)
def test_malformed_host_lists(text: str) -> None:
    with pytest.raises(ClusterConfigError, match=re.escape(repr(text))):
        expand_hostlist(text)


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A host list and, made independently, the hosts that it stands for."""
    parts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True))
        if draw(st.booleans()):
            parts.append(prefix)
            hosts.append(prefix)
            continue
        suffix = draw(st.sampled_from(["", "-ib", ".example.com"]))
        ranges = []
        for _ in range(draw(st.integers(1, 3))):
            first, length = draw(st.integers(0, 120)), draw(st.integers(1, 12))
            width = draw(st.integers(len(str(first)), 4))
            numbers = [f"{n:0{width}}" for n in range(first, first + length)]
            single = length == 1 and draw(st.booleans())
            ranges.append(numbers[0] if single else f"{numbers[0]}-{numbers[-1]}")
            hosts += [f"{prefix}{number}{suffix}" for number in numbers]
        parts.append(f"{prefix}[{','.join(ranges)}]{suffix}")
    return ",".join(parts), hosts


@given(host_lists())
def test_any_host_list(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand_hostlist(text) == hosts


@given(st.text(alphabet="a1[]-,x ") | st.text())
def test_any_text_is_a_host_list_or_an_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ClusterConfigError:
        return
    assert hosts
    assert all(hosts)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in runs)
    expected = [n for n, times in runs for _ in range(times)]
    assert expand_tasks_per_node(text) == expected


@given(st.text(alphabet="12(x), ") | st.text())
def test_any_text_is_counts_or_an_error(text: str) -> None:
    try:
        assert expand_tasks_per_node(text) is not None
    except ClusterConfigError:
        return


def test_hosts_agree_with_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own detection finds the same process and the same first host."""
    from jax._src.clusters.slurm_cluster import SlurmCluster

    set_step(monkeypatch, 3, "node[007-009]", "2(x3)", JOB_ID="1234")
    assert SlurmCluster.is_env_present()
    spec = SlurmClusterResolver().cluster_spec()
    address = SlurmCluster.get_coordinator_address(None, "8888")
    assert spec.workers[0].address == address
    assert len(spec.workers) == SlurmCluster.get_process_count()
