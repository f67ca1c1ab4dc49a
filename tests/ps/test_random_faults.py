"""Jobs whose tasks are killed or stopped at random moments, from their start on.

A seed chooses the tasks, the faults and the moments. With `snapshot_every_updates=1`
every batch is counted once, whatever is lost.
"""

import itertools
import random
import signal
import time

import pytest
from tests.ps.jobs import LONG, SERVERS, TASKS, Job, all_done, check_counts, durable

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(280),
]

NUM_FAULTS = 4


def disturb(cluster, seed):
    """Cause the faults of a seed; the tasks that were killed, fault by fault."""
    choices = random.Random(seed)
    killed = []
    print(f"seed {seed}:")
    for _ in range(NUM_FAULTS):
        pause = choices.choice([0.0, choices.uniform(0, 1), choices.uniform(0, 8)])
        names = choices.sample(TASKS, choices.choice([1, 1, 2]))
        fault = choices.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
        stopped = choices.uniform(1, 6)
        print(f"  after {pause:.1f} s {fault} to {names}")
        time.sleep(pause)
        for name in names:
            cluster.task(name).signal(signal.Signals[fault])
        if fault == "SIGSTOP":
            time.sleep(stopped)
        for name in names:
            if fault == "SIGSTOP":
                cluster.task(name).resume()
            else:
                cluster.task(name).wait(timeout_seconds=30)
                cluster.restart(name)
        killed.append([] if fault == "SIGSTOP" else names)
    return killed


def is_worker(name):
    return name.startswith("worker")


@pytest.mark.parametrize("seed", range(10, 13))
def test_each_batch_is_counted_once(tmp_path, seed):
    with Job(tmp_path, options=durable(tmp_path), **LONG) as cluster:
        killed = disturb(cluster, seed)
        for name in ("worker:0", "worker:1"):
            cluster.wait_for_step(name, 40, 90)
        results = cluster.end()
    cluster.assert_nothing_is_left()
    all_done(results)
    # A worker that is killed with a server, or just before, does not repeat its push.
    most_lost = [
        sum(
            server in names and any(map(is_worker, [*names, *before]))
            for before, names in itertools.pairwise([[], *killed])
        )
        for server in SERVERS
    ]
    num_killed = sum(map(is_worker, itertools.chain(*killed)))
    found = check_counts(results, num_killed, most_lost)
    assert found["accuracy"] > 0.9
