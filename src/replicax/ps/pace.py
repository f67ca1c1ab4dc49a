"""How often tasks call the board: seldom enough for one server to answer them all.

A call costs server 0 half a millisecond (`benchmarks/ps_simulation.py`
measures it), so these rates, which are of all tasks together, take less than half of
one core. A small job never comes near them: it is as prompt as it can be.
"""

import math

__all__ = ["beat_seconds", "longest_pause", "tickets_at_once", "watch_seconds"]

_BEATS_PER_SECOND = 200
_WATCHES_PER_SECOND = 50
_POLLS_PER_SECOND = 500
_CLAIMS_PER_SECOND = 400
_WORKERS_PER_TICKET = 32
_MOST_TICKETS = 64


def beat_seconds(num_workers: int, heartbeat_seconds: float) -> float:
    """The time between two heartbeats of a worker.

    >>> beat_seconds(4, 30.0), beat_seconds(1000, 30.0)
    (1.0, 5.0)
    """
    seldom = max(1.0, num_workers / _BEATS_PER_SECOND)
    return min(seldom, heartbeat_seconds / 4)


def watch_seconds(num_servers: int) -> float:
    """The time between two looks of a server at whether the job is over.

    >>> watch_seconds(4), watch_seconds(64)
    (0.2, 1.28)
    """
    return max(0.2, num_servers / _WATCHES_PER_SECOND)


def longest_pause(num_callers: int) -> float:
    """The longest pause, in seconds, between two calls of one that waits.

    >>> longest_pause(4), longest_pause(1000)
    (0.1, 2.0)
    """
    return max(0.1, num_callers / _POLLS_PER_SECOND)


def tickets_at_once(
    num_workers: int, step_seconds: float, steps_left: int | None
) -> int:
    """How many tickets of an asynchronous stream a worker takes in one call.

    One in a small job, and near the end: nobody should hold steps for which others are
    free, or which are lost if it dies.

    Args:
        num_workers: Of the job.
        step_seconds: How long this worker's last steps took, each.
        steps_left: Of all workers together; None: nobody knows.

    >>> tickets_at_once(4, 0.1, None), tickets_at_once(1000, 0.1, None)
    (1, 25)
    >>> tickets_at_once(1000, 0.1, 3000)
    1
    """
    seldom = math.ceil(num_workers / (_CLAIMS_PER_SECOND * max(step_seconds, 1e-3)))
    fair = seldom if steps_left is None else steps_left // (2 * num_workers)
    most = min(int(num_workers / _WORKERS_PER_TICKET), _MOST_TICKETS)
    return max(1, min(seldom, fair, most))
