"""Stopping after the same step everywhere."""

import os
import signal
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster.stopping import StopRequest


def test_a_single_worker_stops_at_once() -> None:
    stop = StopRequest(alone=True)
    assert not stop.reached(1)
    stop.requested = True
    assert stop.reached(2)


def test_one_of_several_waits_for_the_agreement() -> None:
    stop = StopRequest(alone=False)
    stop.requested = True
    assert not stop.reached(1)
    assert stop.freeze() == 1
    threading.Timer(0.2, stop.agree, [3]).start()
    start = time.monotonic()
    assert not stop.reached(2)  # Held until then.
    assert time.monotonic() - start > 0.15
    assert stop.reached(3)
    assert stop.reached(4)


def test_freezing_again_does_not_hold() -> None:
    stop = StopRequest(alone=False)
    stop.reached(5)
    stop.freeze()
    stop.agree(6)
    assert stop.freeze() == 5
    assert stop.reached(6)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4))
def test_all_stop_after_the_same_step(lags: list[int]) -> None:
    """Workers in lockstep: each is in a step that the others have begun at most."""
    slowest = 10
    # Dispatched ahead, a worker can be several steps further than another.
    done = [slowest + lag for lag in lags]
    stops = [StopRequest(alone=False) for _ in lags]
    for stop, step in zip(stops, done, strict=True):
        assert not stop.reached(step)
    last = [stop.freeze() for stop in stops]
    assert last == done
    for stop in stops:
        stop.agree(max(last) + 1)
    ends = []
    for stop, step in zip(stops, done, strict=True):
        while not stop.reached(step):
            step += 1
        ends.append(step)
    assert ends == [max(done) + 1] * len(lags)


def test_sigterm_asks_once() -> None:
    stop = StopRequest(alone=True)
    before = signal.getsignal(signal.SIGTERM)
    with stop.on_sigterm():
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.requested:  # Python handles it between two instructions.
            time.sleep(0.01)
        assert stop.reached(1)
        assert signal.getsignal(signal.SIGTERM) is before  # A second one is served.
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_handlers_are_restored_unless_replaced() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def other(number: int, frame: object) -> None: ...

    try:
        with StopRequest(alone=True).on_sigterm():
            pass
        assert signal.getsignal(signal.SIGTERM) is before
        with StopRequest(alone=True).on_sigterm():
            signal.signal(signal.SIGTERM, other)
        assert signal.getsignal(signal.SIGTERM) is other
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def enter() -> None:
        with StopRequest(alone=True).on_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
