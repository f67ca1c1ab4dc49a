"""Meeting the other workers: who is missing, and what stands in the way."""

import json
import os
import socket
from pathlib import Path

import pytest

import replicax as rx
from replicax._util import waiting
from replicax._util.waiting import wait_for
from replicax.cluster.addresses import parse_address
from replicax.errors import ClusterConfigError
from replicax.testing import run

DEADLINE_S = 100.0


def worker_0_waits_in_vain() -> None:
    waiting.EVERY_SECONDS = 1.0
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=2.0))


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_a_missing_worker_is_named_and_the_start_may_be_tried_again() -> None:
    results = run(
        worker_0_waits_in_vain,
        num_workers=2,
        deadline_seconds=DEADLINE_S,
        check=False,
    )
    assert results["worker:1"].exit_code == 0, results["worker:1"].output
    result = results["worker:0"]
    assert result.exit_code == 138, result.output
    address = result.output.partition("worker:1 (")[2].partition(")")[0]
    assert address.startswith("localhost:")
    for text in (
        f"ClusterError: worker:1 ({address}) did not come to worker:0 (",
        f"worker:0 has waited 1 s for worker:1 ({address}); at most",
        "within 2 s",
        "rx.Timeouts(startup=...)",
        "Exit code 138 (retryable).",
    ):
        assert text in result.output
    assert result.report is not None
    assert result.report.kind == "start-up"
    assert f"worker:1 ({address})" in result.report.message


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
