"""Updates that killed servers lose: each server counts them by versions.

Two workers train asynchronously while servers are killed at random moments and go on
from their snapshots. The updates in a server's values and its lost ones are together
those that the workers made, but for those that were sent again.
"""

import random
import time

import pytest
from tests.ps.jobs import Job, all_done, check_none_twice, counted, snapshots_in

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("seed", "killed"),
    [
        (0, [0, 1]),
        *(pytest.param(n, [0, 0, 1, 1], marks=pytest.mark.slow) for n in (1, 2, 3)),
    ],
)
def test_applied_and_lost_updates_are_those_that_were_made(tmp_path, seed, killed):
    moments = random.Random(seed)
    options = snapshots_in(tmp_path, 25)
    with Job(tmp_path, counted, options=options) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 30)
        for server in moments.sample(killed, len(killed)):
            time.sleep(moments.uniform(0.0, 0.5))
            cluster.kill(f"ps:{server}")
            cluster.restart(f"ps:{server}")
            cluster.wait_for_progress("worker:0", "worker:1", steps=15)
        results = cluster.end()
    cluster.assert_nothing_is_left()
    found = all_done(results)
    assert found["accuracy"] > 0.9
    workers = results["worker:0"].output + results["worker:1"].output
    assert "ps:1 was restarted from a snapshot; " in workers
    made = sum(found["made"].values())
    assert made == found["finished"] == found["next"]
    check_none_twice(results)
    for server, status in enumerate(found["servers"]):
        # Of two workers one may send an update again that is lost and has a number
        # below one that the other has seen.
        extra = status["applied"] + status["lost"] - made
        assert 0 <= extra <= killed.count(server)
        output = results[f"ps:{server}"].output
        assert f"ps:{server} goes on from its snapshot" in output
        said = (
            f"ends with {status['applied']} updates in its values; {status['lost']} "
            "others were lost"
        )
        assert (said in output) == (status["lost"] > 0)
    assert any(status["lost"] for status in found["servers"])
