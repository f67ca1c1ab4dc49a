"""Tasks that cannot take part end at once, and say why."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.ps.jobs import Job, all_done, make

from replicax.ps.credentials import new_token

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def waits(options, differs=None):
    """Make the strategy, one task of it with another token; wait for the test."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if f"{task['type']}:{task['index']}" == differs:
        path = Path(os.environ["STOP_FILE"]).with_name("token")
        path.write_text(new_token())
        path.chmod(0o600)
        del os.environ["REPLICAX_PS_TOKEN"]
        os.environ["REPLICAX_PS_TOKEN_FILE"] = str(path)
    go = Path(os.environ["STOP_FILE"]).with_name("go")
    if Path(os.environ["STOP_FILE"]).with_name("held").exists():
        print("is held", flush=True)
        while not go.exists():
            time.sleep(0.05)
    print(f"<{make(options)!r}>", flush=True)
    while not Path(os.environ["STOP_FILE"]).exists():
        time.sleep(0.05)


@pytest.mark.slow(but=["ps:1"])
@pytest.mark.parametrize("name", ["worker:1", "ps:1"])
def test_a_task_with_another_token_ends_at_once(tmp_path, name):
    with Job(tmp_path, waits, options={}, differs=name) as cluster:
        assert cluster.task(name).wait(timeout_seconds=45) == 1
        said = cluster.task(name).output
    path = tmp_path / "token"
    assert f"refuses {name}, whose token differs from the server's" in said
    assert f"from '{path}', which REPLICAX_PS_TOKEN_FILE names" in said
    assert path.read_text() not in said


@pytest.mark.slow
def test_a_worker_that_comes_when_the_job_is_done_ends_with_success(tmp_path):
    with Job(tmp_path, waits, options={}) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.task(name).wait_for("<ParameterServerStrategy", timeout_seconds=60)
        (tmp_path / "held").touch()
        cluster.kill("worker:1")
        cluster.restart("worker:1")
        cluster.task("worker:1").wait_for("is held", timeout_seconds=60)
        cluster.task("ps:1").stop()  # So server 0 waits a while.
        cluster.stop_file.touch()
        assert cluster.task("worker:0").wait(timeout_seconds=30) == 0
        time.sleep(4)  # Until the killed worker counts as dead.
        (tmp_path / "go").touch()
        assert cluster.task("worker:1").wait(timeout_seconds=5) == 0
        cluster.task("ps:1").resume()
        results = cluster.ended()
    all_done(results)
    assert "The job is done already" in results["worker:1"].output
