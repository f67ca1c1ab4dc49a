"""Genuine tasks are never logged as strangers, whatever happens to the servers."""

import re
import time

import pytest
from tests.ps.jobs import Job, all_done, durable

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

ALARM = re.compile(r".*(?:no valid token|without a valid token|no token|wrong token).*")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["ps:0", "ps:1"])
def test_frozen_and_restarted_servers_accuse_nobody(tmp_path, server):
    options = durable(tmp_path, 25) | {"timeouts": {"step": 10}}
    with Job(tmp_path, options=options) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 10)
        # Longer than anybody waits for an answer: they connect again and again.
        frozen = cluster.task(server)
        frozen.stop()
        time.sleep(13)
        frozen.resume()
        cluster.wait_for_progress("worker:0", "worker:1", steps=10)
        cluster.kill(server)
        cluster.restart(server)
        cluster.wait_for_progress("worker:0", "worker:1", steps=10)
        time.sleep(12)  # Who is no guest is thrown out after ten seconds.
        results = cluster.end()
    all_done(results)
    for name in ("ps:0", "ps:1"):
        assert not ALARM.findall(results[name].output), name
