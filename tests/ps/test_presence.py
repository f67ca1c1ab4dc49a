"""Sessions, deaths and returns, and when a job is done or has failed."""

import json

import msgspec
import pytest

from replicax.cluster.timeouts import Timeouts
from replicax.ps.call_log import Sessions
from replicax.ps.limits import RequestError
from replicax.ps.presence import Presence, Worker

CHIEF, OTHER = "worker:0", "worker:1"


def present(sessions: Sessions | None = None) -> Presence:
    timeouts = Timeouts(startup=200, heartbeat=10, chief=100)
    return Presence([CHIEF, OTHER], timeouts, sessions or Sessions(), now=0.0)


def test_a_silent_worker_is_dead_until_its_next_heartbeat():
    presence = present()
    presence.join(CHIEF, "a", 0.0)
    presence.join(OTHER, "b", 0.0)
    presence.record_heartbeat(CHIEF, "a", 8.0)
    assert presence.newly_dead(10.0) == []
    assert presence.newly_dead(10.1) == [OTHER]
    assert presence.newly_dead(10.2) == []  # Each death is returned once.
    assert presence.alive() == [CHIEF]
    presence.record_heartbeat(OTHER, "b", 11.0)
    assert presence.alive() == [CHIEF, OTHER]


def test_heartbeats_before_join_and_after_leave_are_refused():
    presence = present()
    with pytest.raises(RequestError, match=r"no worker 'worker:7'.*:0 and w"):
        presence.join("worker:7", "a", 0.0)
    with pytest.raises(RequestError, match="Join first"):
        presence.record_heartbeat(CHIEF, "a", 0.0)
    presence.join(CHIEF, "a", 0.0)
    assert presence.leave(CHIEF, "a", True, None, 1.0) is True
    assert presence.leave(CHIEF, "a", True, None, 2.0) is False
    with pytest.raises(RequestError, match="has left"):
        presence.record_heartbeat(CHIEF, "a", 3.0)


def test_the_job_is_done_when_the_chief_left_and_nobody_is_alive():
    presence = present()
    presence.join(CHIEF, "a", 0.0)
    presence.join(OTHER, "b", 0.0)
    presence.leave(CHIEF, "a", True, None, 1.0)
    assert not presence.is_done(1.0)
    presence.newly_dead(20.0)
    assert presence.is_done(20.0)
    assert presence.failure(1000.0) is None


def test_the_job_waits_for_workers_that_may_still_be_starting():
    presence = present()
    presence.join(CHIEF, "a", 0.0)
    presence.leave(CHIEF, "a", True, None, 1.0)
    assert not presence.is_done(200.0)
    assert presence.is_done(200.1)


def test_an_error_of_the_chief_fails_the_job_and_one_of_another_does_not():
    presence = present()
    presence.join(CHIEF, "a", 0.0)
    presence.join(OTHER, "b", 0.0)
    presence.leave(OTHER, "b", False, "ValueError: bad", 1.0)
    assert presence.failure(2.0) is None
    assert presence.workers[OTHER].error == "ValueError: bad"
    presence.leave(CHIEF, "a", False, "OSError: disk", 2.0)
    assert presence.failure(2.0) == "worker:0 (the chief) failed: OSError: disk"
    assert not presence.is_done(2.0)
    presence.join(CHIEF, "a2", 3.0)
    assert presence.failure(3.0) is None


def test_a_chief_that_stays_away_fails_the_job_after_the_grace_period():
    presence = present()
    presence.join(CHIEF, "a", 0.0)
    presence.join(OTHER, "b", 0.0)
    presence.record_heartbeat(OTHER, "b", 105.0)
    # It died at its deadline, 10, not when `newly_dead` was called.
    assert presence.newly_dead(105.0) == [CHIEF]
    assert presence.failure(110.0) is None
    assert "died and did not return for 100 s" in presence.failure(110.1)


def test_a_job_without_workers_fails():
    presence = present()
    assert presence.failure(200.0) is None
    assert "no worker has joined for 200 s" in presence.failure(200.1)
    presence.join(OTHER, "b", 0.0)
    assert "has not joined for 200 s" in presence.failure(200.1)
    presence.newly_dead(20.0)
    assert presence.failure(110.0) is None
    assert "no worker has been alive for 100 s" in presence.failure(110.1)


def test_a_restart_renews_all_deadlines():
    presence = present()
    presence.join(CHIEF, "a0", 0.0)
    presence.join(CHIEF, "a", 0.0)
    presence.join(OTHER, "b", 0.0)
    presence.record_heartbeat(OTHER, "b", 5.0)
    presence.newly_dead(12.0)
    saved = json.loads(json.dumps(msgspec.to_builtins(presence.workers)))
    again = present(presence.sessions)
    again.restart(msgspec.convert(saved, dict[str, Worker]), 1000.0)
    assert again.newly_dead(1009.0) == []
    assert again.alive() == [OTHER]
    assert again.failure(1099.0) is None
    assert "did not return" in again.failure(1101.0)
    with pytest.raises(RequestError, match="was replaced by"):
        again.record_heartbeat(CHIEF, "a0", 1001.0)
    again.record_heartbeat(CHIEF, "a", 1001.0)
    other = Presence(["w"], Timeouts(), Sessions(), now=0.0)
    with pytest.raises(ValueError, match=r"workers worker:0 and worker:1.*has w"):
        other.restart(again.workers, 0.0)
