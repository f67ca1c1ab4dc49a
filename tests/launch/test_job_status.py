"""How far the tasks of a job with parameter servers are, as the launcher sees it."""

import contextlib

from replicax.launch.job_status import JobStatus
from replicax.ps.credentials import Credentials, new_token


def worker(steps):
    return {"state": "alive", "silent_seconds": 0.1, "steps": 0, "info": steps}


def status_of(applied, steps):
    server = {
        "applied": applied,
        "lost": 0,
        "bytes_in": 0,
        "bytes_out": 0,
        "staleness": {},
    }
    workers = {name: worker({"pid": 1, "steps": n}) for name, n in steps.items()}
    board = {"streams": {}, "totals": {}, "workers": workers}
    return {"server": server, "board": board}


def test_a_coordinators_chief_gets_on_with_the_updates_of_the_others():
    with contextlib.closing(JobStatus([], Credentials(token=new_token()))) as status:
        assert status.progress_of_chief("chief:0") == -1
        for applied in (5, 9):
            steps = {"chief:0": 0, "worker:0": applied, "worker:1": 0}
            status.note_end(0, status_of(applied, steps))
            assert status.progress_of_chief("chief:0") == applied
            assert status.progress("worker:1") == -1, "nothing of its own"
        status.note_end(0, status_of(12, {"chief:0": 3}))
        assert status.progress_of_chief("chief:0") == 3
