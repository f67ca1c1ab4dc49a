"""Tasks with another version of replicax are refused when they connect."""

import signal

import pytest

import replicax as rx
import replicax.testing
from replicax import _version

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

OTHER = "99.1.2"


def task(other, version=OTHER):
    """Join the job; the tasks in `other` report another version."""
    import json
    import os

    own = json.loads(os.environ["TF_CONFIG"])["task"]
    if f"{own['type']}:{own['index']}" in other:
        _version.__version__ = version
    strategy = rx.ParameterServerStrategy(
        timeouts=rx.Timeouts(startup=60, heartbeat=3, chief=100)
    )
    print("joined", flush=True)
    strategy.session.barrier("together")
    return strategy.session.name


def job(*other, num_workers=2):
    return rx.testing.Cluster(
        task,
        tasks={"worker": num_workers, "ps": 2},
        args=(other,),
        deadline_seconds=130,
    )


def both_versions(text, one, another):
    """Whether a text names both tasks and their versions."""
    first = f"{one} has replicax {OTHER}" in text
    return first and f"{another} has replicax {_version.__version__}" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker:0", "ps:1"])
def test_a_task_that_a_job_needs_ends_at_once(name):
    with job(name) as cluster:
        assert cluster.task(name).wait(timeout_seconds=60) == 1
        output = cluster.task(name).output
    assert both_versions(output, name, "ps:0")
    assert "Restart" not in output


@pytest.mark.slow
def test_another_worker_of_another_version_is_refused_alone():
    with job("worker:2", num_workers=3) as cluster:
        refused = cluster.task("worker:2")
        assert refused.wait(timeout_seconds=60) == 1
        assert both_versions(refused.output, "worker:2", "ps:0")
        # Servers wait for the refused worker until the start-up deadline.
        for name in ("worker:0", "worker:1", "ps:0", "ps:1"):
            cluster.task(name).wait(timeout_seconds=100)
        results = cluster.wait()
    assert results["worker:0"].exit_code == results["worker:1"].exit_code == 0
    assert both_versions(results["ps:0"].output, "worker:2", "ps:0")
    assert signal.SIGKILL not in {-r.exit_code for r in results.values()}
