"""The simulation of parameter servers: what the board and groups say at the end."""

import dataclasses

import pytest

from ps_model import Cluster, Job, Times
from ps_simulation import simulate

TIMES = Times(step=0.001)
JOB = Job(workers=4, servers=2, bytes=20e6, step_seconds=0.1, cores=2)


def trained(job, seconds=60.0):
    cluster = Cluster(job, TIMES)
    cluster.start()
    cluster.world.run(seconds)
    return cluster


@pytest.mark.parametrize("one_machine", [False, True])
def test_every_step_is_given_once_and_every_push_is_applied_once(one_machine):
    job = dataclasses.replace(JOB, limit=203, one_machine=one_machine)
    cluster = trained(job)
    assert all(end.is_over for end in cluster.trained)
    (stream,) = cluster.board.state()["streams"]["newest"].values()
    tickets = stream["tickets"]
    assert (tickets["next"], tickets["finished"]) == (203, 203)
    assert (tickets["held"], tickets["lost"]) == ({}, {})
    made = {worker.name: worker.steps for worker in cluster.workers}
    assert sum(made.values()) == 203
    for server in cluster.servers:
        assert server.group.version == server.group.status()["applied"] == 203
        applied = {w: sum(n.values()) for w, n in server.group.staleness.items()}
        assert applied == made


@pytest.mark.parametrize(("overlap", "updates"), [(False, 3), (True, 7)])
def test_equal_workers_are_n_minus_1_or_overlapping_2n_minus_1_updates_stale(
    overlap, updates
):
    job = dataclasses.replace(JOB, jitter=0.0, overlap=overlap)
    assert simulate(job, TIMES).staleness == pytest.approx(updates, abs=0.2)
    alone = simulate(dataclasses.replace(job, workers=1), TIMES)
    assert alone.staleness == int(overlap)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_is_kept(bound):
    cluster = trained(dataclasses.replace(JOB, max_staleness=bound, limit=60))
    assert all(end.is_over for end in cluster.trained)
    assert max(cluster.staleness) <= bound
    assert cluster.staleness.total() == 60 * JOB.servers


def test_a_seed_gives_the_same_job_again():
    def seen(seed):
        cluster = trained(dataclasses.replace(JOB, limit=80, seed=seed))
        return cluster.calls, cluster.staleness, [end.value for end in cluster.trained]

    assert seen(1) == seen(1)
    assert seen(1) != seen(2)


def test_what_is_too_slow_is_the_busiest():
    slow_card = dataclasses.replace(JOB, workers=16, gigabits=0.5, cores=16)
    assert simulate(slow_card, TIMES).busiest == "a server's card"
    slow_update = dataclasses.replace(TIMES, update_byte=1e-8)
    found = simulate(dataclasses.replace(JOB, workers=16, cores=16), slow_update)
    assert found.busiest == "a server's updates"
    # 20 MB on two servers, 0.1 s each.
    assert 8 < found.updates < 10.2
    assert found.staleness == pytest.approx(15, abs=0.2)
