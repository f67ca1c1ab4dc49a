"""Meeting the other workers: who is missing, and what stands in the way."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

import replicax as rx
from replicax._util import waiting
from replicax._util.waiting import wait_for
from replicax.cluster.addresses import parse_address
from replicax.errors import ClusterConfigError
from replicax.testing import run

DEADLINE_S = 100.0


def my_address() -> str:
    config = json.loads(os.environ["TF_CONFIG"])
    return config["cluster"]["worker"][config["task"]["index"]]


def other_address(output: str, name: str) -> str:
    """The address that a message gives for a worker."""
    return output.partition(f"{name} (")[2].partition(")")[0]


def only_one_comes(who: int, startup_seconds: float) -> None:
    """Worker `who` waits in vain; worker 0 cannot have its port, worker 1 exits."""
    waiting.EVERY_SECONDS = 1.0
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if index == who:
        rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=startup_seconds))
    elif index == 0:
        with socket.create_server(("", parse_address(my_address()).port)):
            with pytest.raises(
                ClusterConfigError, match="its port cannot be used"
            ) as e:
                rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=DEADLINE_S))
            time.sleep(startup_seconds + 10)  # It accepts connections, but is silent.
        assert my_address() in str(e.value)
        assert "Another program, or another start of the same task" in str(e.value)


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("who", "startup_seconds"),
    [(0, 2.0), pytest.param(1, 5.0, marks=pytest.mark.slow)],
)
def test_a_worker_does_not_come(who: int, startup_seconds: float) -> None:
    results = run(
        only_one_comes,
        num_workers=2,
        args=(who, startup_seconds),
        deadline_seconds=DEADLINE_S,
        check=False,
    )
    absent = f"worker:{1 - who}"
    assert results[absent].exit_code == 0, results[absent].output
    result = results[f"worker:{who}"]
    assert result.exit_code == 138, result.output
    address = other_address(result.output, absent)
    assert address.startswith("localhost:")
    if who == 0:
        assert f"ClusterError: {absent} ({address}) did not come to worker:0 (" in (
            result.output
        )
        assert f"worker:0 has waited 1 s for {absent} ({address}); at most" in (
            result.output
        )
    else:
        message = f"ClusterError: worker:1: worker:0 ({address}) has not answered"
        assert message in result.output
    assert f"within {startup_seconds:.0f} s" in result.output
    assert "rx.Timeouts(startup=...)" in result.output
    assert "Exit code 138 (retryable)." in result.output
    assert result.report is not None
    assert result.report.kind == "start-up"
    assert f"{absent} ({address})" in result.report.message


def join_and_leave(words: list[str]) -> tuple[list[str], int]:
    """As little of a cluster as can be: no device, no program."""
    from replicax.cluster.config import check_cluster
    from replicax.cluster.joining import join
    from replicax.cluster.resolvers import TFConfigClusterResolver
    from replicax.cluster.timeouts import Timeouts

    resolver = TFConfigClusterResolver()
    config = check_cluster(
        resolver.cluster_spec(),
        resolver.task_type,
        resolver.task_id,
        allow_ps=False,
        source="TF_CONFIG",
    )
    assert config.process_id is not None
    workers = join(config.cluster, config.process_id, Timeouts(), "TF_CONFIG")
    # The same cluster a second time is the same; another one is refused.
    assert join(config.cluster, config.process_id, Timeouts(), "x") is workers
    with pytest.raises(ClusterConfigError, match="cannot join"):
        join(config.cluster, 1 - config.process_id, Timeouts(), "TF_CONFIG")
    mine = words[workers.index]
    told = [word for _ in range(3) for word in workers.exchange("words", mine)]
    return told, parse_address(workers.addresses[0]).port


def processes_on(port: int) -> list[int]:
    """The processes of which a word of the command line is `port`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # It has just ended.
            continue
        if str(port).encode() in words:
            found.append(int(folder.name))
    return found


@pytest.mark.multiprocess
@pytest.mark.timeout(280)
@pytest.mark.parametrize("num_clusters", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_clusters_leave_nothing_behind(num_clusters: int) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(num_clusters):
        results = run(
            join_and_leave,
            num_workers=2,
            args=(["mine", "yours"],),
            deadline_seconds=DEADLINE_S,
        )
        (told, port), other = results.returned.values()
        assert other == (told, port)
        assert told == ["mine", "yours"] * 3
        # The coordination service ends soon after worker 0.
        assert wait_for(lambda p=port: not processes_on(p) or None, 10, late=bool)
        with socket.create_server(("", port)):
            pass
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1
