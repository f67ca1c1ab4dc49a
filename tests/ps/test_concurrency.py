"""The limit of workers that make asynchronous steps at a time, in simulated time."""

import heapq
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.concurrency import ConcurrencyLimit

PAUSE = 0.05


class Job:
    """Workers that make steps of `seconds(number of workers at it)` when they may."""

    def __init__(self, num_workers, seconds) -> None:
        self.limit = ConcurrencyLimit()
        self.seconds = seconds
        self.slowness = {}
        self.now = 0.0
        self.steps = Counter()
        self.busy = set()
        self.gone = set()
        self._order = itertools.count()
        self._due = []
        for i in range(num_workers):
            self.add(f"worker:{i}")

    def add(self, worker) -> None:
        heapq.heappush(self._due, (self.now, next(self._order), worker))

    def run(self, seconds) -> Counter:
        """Go on for so long; the steps that each worker makes in that time."""
        before, until = self.steps.copy(), self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, worker = heapq.heappop(self._due)
            if worker in self.gone:
                continue
            if worker in self.busy:
                self.busy.discard(worker)
                self.steps[worker] += 1
            wait = PAUSE
            if self.limit.claim(worker, self.now) is None:
                self.limit.begin(worker, 1, self.now)
                self.busy.add(worker)
                wait = self.seconds(len(self.busy)) * self.slowness.get(worker, 1)
            heapq.heappush(self._due, (self.now + wait, next(self._order), worker))
        self.now = until
        return self.steps - before

    def holder(self) -> str:
        """The one worker that is in the middle of a step."""
        (worker,) = self.busy
        return worker


def of_their_own(busy):
    return 0.1


def shared(busy):
    return 0.1 * busy


@pytest.mark.parametrize("num_workers", [1, 2, 7, 100])
def test_workers_with_cores_of_their_own_all_make_steps(num_workers) -> None:
    job = Job(num_workers, of_their_own)
    job.run(30)
    assert job.limit.most == num_workers
    steps = job.run(10)
    assert len(steps) == num_workers
    assert sum(steps.values()) > 9.5 / 0.1 * num_workers


@pytest.mark.parametrize("num_workers", [2, 4, 20])
def test_workers_that_share_cores_take_turns(num_workers) -> None:
    job = Job(num_workers, shared)
    job.run(60)
    assert job.limit.most == 1
    steps = job.run(400)
    # No fewer than all at once would make, but for the moments between two turns.
    assert sum(steps.values()) > 0.95 * 400 / 0.1
    assert min(steps.values()) > 0.6 * sum(steps.values()) / num_workers
    assert len(steps) == num_workers


def test_as_many_make_steps_as_servers_keep_up_with() -> None:
    job = Job(64, lambda busy: 0.1 * max(1, busy / 8))
    job.run(120)
    assert job.limit.most == 8
    assert sum(job.run(100).values()) > 0.9 * 100 * 8 / 0.1


def test_steps_beside_a_worker_that_compiles_do_not_count() -> None:
    job = Job(2, shared)
    limit = job.limit
    for i, name in enumerate(("a", "b")):
        assert limit.claim(name, float(i)) is None
        limit.begin(name, 1, float(i))
    for step in range(20):  # "b" compiles on the same cores.
        assert limit.claim("a", 2 + 0.2 * step) is None
        limit.begin("a", 1, 2 + 0.2 * step)
    assert limit.most == 1
    assert limit.claim("b", 6.0) is not None
    for step in range(20):
        assert limit.claim("a", 6 + 0.1 * step) is None
        limit.begin("a", 1, 6 + 0.1 * step)
    assert limit.most == 2


@pytest.mark.parametrize("fast", range(4))
def test_slow_workers_with_cores_of_their_own_are_no_reason_to_wait(fast) -> None:
    job = Job(4, of_their_own)
    job.slowness = {f"worker:{i}": 10 for i in range(4) if i != fast}
    job.run(60)
    assert job.limit.most == 4
    assert job.run(10).total() > 9.5 * (10 + 3)


@pytest.mark.parametrize("is_busy", [True, False])
def test_nobody_waits_for_a_worker_that_is_silent(is_busy) -> None:
    job = Job(3, shared)
    job.run(60)
    names = {f"worker:{i}" for i in range(3)}
    silent = job.holder() if is_busy else min(names - {job.holder()})
    job.gone.add(silent)
    job.busy.discard(silent)
    steps = job.run(60)  # The heartbeat does not miss it yet.
    assert steps.keys() == names - {silent}
    assert sum(steps.values()) > 0.9 * 60 / 0.1


def test_a_worker_that_is_at_its_end_leaves_its_place() -> None:
    job = Job(2, shared)
    job.run(60)
    last = job.holder()
    job.gone.add(last)
    job.busy.discard(last)
    job.limit.leave(last)
    assert job.run(PAUSE + 0.2)
    job.limit.release(last)
    job.run(10)
    assert job.limit.claim(last, job.now) is None  # A new process, which compiles.


def test_one_more_worker_is_let_in_where_it_has_cores_of_its_own() -> None:
    job = Job(4, of_their_own)
    job.run(30)
    job.add("worker:4")
    job.run(30)
    assert job.limit.most == 5
    assert len(job.run(1)) == 5


def test_what_was_found_is_measured_again() -> None:
    job = Job(4, shared)
    job.run(60)
    assert job.limit.most == 1
    job.seconds = of_their_own  # Other programs of the machine have ended.
    job.run(300)
    assert job.limit.most == 4
    job.seconds = shared
    job.run(600)
    assert job.limit.most == 1


def test_a_single_slow_step_changes_nothing() -> None:
    job, slow = Job(2, of_their_own), itertools.count(1)
    job.seconds = lambda busy: 5.0 if next(slow) % 9 == 0 else 0.1
    job.run(300)
    assert job.limit.most == 2


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dies", "ends its epoch", "is new", "is released"]),
            st.integers(0, 5),
            st.floats(0.0, 5.0),
        ),
        max_size=12,
    ),
    st.floats(0.01, 3.0),
    st.booleans(),
)
def test_somebody_always_gets_on(events, seconds, is_shared) -> None:
    job = Job(6, lambda busy: seconds * (busy if is_shared else 1))
    job.run(20 * seconds)
    for what, number, wait in events:
        worker = f"worker:{number}"
        is_gone = worker in job.gone
        if what == "is new" and is_gone:
            job.gone.discard(worker)
            job.add(worker)
        elif what == "is released":
            job.limit.release(worker)
        elif not is_gone and len(job.gone) < 5:
            job.gone.add(worker)
            job.busy.discard(worker)
            if what == "ends its epoch":
                job.limit.leave(worker)
        job.run(wait)
    # A silent one is passed over after four steps of all together.
    assert job.run(5 + 30 * seconds)


@pytest.fixture
def ask():
    """Calls of a board by two workers, at a second of one's choice."""
    now, numbers = [0.0], itertools.count()
    names = ["worker:0", "worker:1"]
    board = Board(names, Timeouts(), now=lambda: now[0])
    for name in names:
        board.join(name, name)

    def ask(method, worker, seconds, stream="fit 0/epoch/0", **arguments):
        now[0] = seconds
        name, call = names[worker], next(numbers)
        return getattr(board, method)(
            stream=stream, worker=name, session=name, call=call, **arguments
        )

    ask.board = board
    return ask


def test_who_waits_for_its_turn_hears_that_others_get_on(ask) -> None:
    ask.board.open("fit 0/epoch/0")
    for worker in (0, 1):
        assert ask("claim", worker, 0.0)["indices"] == [worker]
    assert ask("claim", 0, 1.0, finished=[0])["indices"] == [2]
    reason = ask("claim", 1, 1.0, finished=[1])["wait"]
    assert reason == (
        "one of 2 workers makes steps at a time: more would make gradients older; "
        "2 steps are finished"
    )
    ask("claim", 0, 1.1, finished=[2])
    assert ask("claim", 1, 1.2)["wait"].endswith("3 steps are finished")
    ask.board.arrive("end of epoch", "worker:0", "worker:0")
    assert ask("claim", 1, 1.3)["indices"] == [4]


@pytest.mark.parametrize("settings", [{"max_staleness": 9}, {"num_parts": 2}])
def test_steps_with_a_bound_of_their_own_have_no_other(ask, settings) -> None:
    ask.board.open("fit 0/epoch/0", **settings)
    for second in range(3):
        for worker in (0, 1):
            given = ask("claim", worker, float(second))["indices"]
            ask("finish", worker, float(second), indices=given)
