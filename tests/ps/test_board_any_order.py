"""A board in any order of calls, deaths and restarts: each step is accounted for."""

import json
import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.ps.boards import NAMES, Client, Clock, ask, restarted, streams_of

from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.call_log import Sessions
from replicax.ps.limits import RequestError

TIMEOUTS = Timeouts(startup=1e9, heartbeat=10, chief=1e9)


class AnyOrder(RuleBasedStateMachine):
    """Workers join, work, stop, die and come back; calls are repeated at random."""

    workers = st.sampled_from(range(3))

    @initialize(bound=st.none() | st.integers(0, 3))
    def start(self, bound):
        self.clock = Clock()
        self.wal: dict[tuple[str, ...], str] = {}
        self.options = {"now": self.clock, "append": self.append}
        self.board = Board(NAMES, TIMEOUTS, Sessions(self.append), **self.options)
        self.sessions = 0
        self.clients: dict[int, Client] = {}
        self.given: Counter[int] = Counter()
        self.finished: set[int] = set()
        self.held: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.saved = json.dumps(self.board.state())
        self.epoch, self.bound = 0, bound
        self.open()

    @property
    def stream(self):
        return f"fit 0/epoch/{self.epoch}"

    def open(self):
        wanted = {"limit": 3, "max_staleness": self.bound}
        ask(self.board, "open", stream=self.stream, **wanted)

    def append(self, key, value):
        self.wal.pop(tuple(key), None)  # The newest entry is the last.
        self.wal[tuple(key)] = json.dumps(value)

    def twice(self, client, name, **arguments):
        """A call whose first answer was lost."""
        answer = client(name, **arguments)
        assert client(name, call=client.call, **arguments) == answer
        return answer

    def twice_or_once(self, lost, client, name, **arguments):
        if lost:
            return self.twice(client, name, **arguments)
        return client(name, **arguments)

    @rule(worker=workers)
    def join(self, worker):
        self.sessions += 1
        old = self.clients.get(worker)
        client = Client(self.board, NAMES[worker], f"s{self.sessions}")
        client("join")
        self.clients[worker] = client
        self.held[worker] = []
        if old:
            with pytest.raises(RequestError, match="was replaced by"):
                old("beat")

    @rule()
    def next_epoch(self):
        stream = streams_of(self.board)[self.stream]
        if stream["next"] < 3 or stream["held"]:
            return
        self.given.clear()
        self.finished.clear()
        self.held = {0: [], 1: [], 2: []}
        self.epoch += 1
        self.open()

    @rule(worker=workers, count=st.integers(1, 3), lost=st.booleans())
    def claim(self, worker, count, lost):
        if worker not in self.clients:
            return
        client = self.clients[worker]
        dead = NAMES[worker] not in ask(self.board, "alive")
        answer = self.twice_or_once(
            lost, client, "claim", stream=self.stream, count=count
        )
        if dead:
            self.held[worker] = []
        if "indices" in answer:
            self.given.update(answer["indices"])
            self.held[worker] += answer["indices"]
        elif "wait" in answer:
            stream = streams_of(self.board)[self.stream]
            assert stream["held"] > 0 or stream["waiting"][0] != NAMES[worker]

    @rule(worker=workers, lost=st.booleans())
    def finish(self, worker, lost):
        if worker not in self.clients or not self.held[worker]:
            return
        index = self.held[worker].pop(0)
        dead = NAMES[worker] not in ask(self.board, "alive")
        answer = self.twice_or_once(
            lost, self.clients[worker], "finish", stream=self.stream, indices=[index]
        )
        assert answer == []  # Dead or not, it had the step.
        self.finished.add(index)
        if dead:
            self.held[worker] = []

    @rule(seconds=st.sampled_from([1, 6, 11]), awake=st.sets(workers))
    def time_passes(self, seconds, awake):
        self.clock.seconds += seconds
        for worker in awake & set(self.clients):
            gone = NAMES[worker] not in ask(self.board, "alive")
            self.clients[worker]("beat")
            if gone:
                self.held[worker] = []

    @rule()
    def restart_of_the_server(self):
        # Dead workers lose their leases before the state is saved.
        alive = ask(self.board, "alive")
        for worker in self.held:
            if NAMES[worker] not in alive:
                self.held[worker] = []
        self.saved = json.dumps(self.board.state())
        self.restart()

    @rule()
    def restart_from_an_older_snapshot(self):
        alive = ask(self.board, "alive")
        for worker in self.held:
            if NAMES[worker] not in alive:
                self.held[worker] = []
        self.restart()
        for client in self.clients.values():
            client("join")  # Workers do this when they see a new incarnation.

    def restart(self):
        wal = {key: json.loads(value) for key, value in self.wal.items()}
        saved = json.loads(self.saved)
        self.board = restarted(NAMES, TIMEOUTS, saved, wal, **self.options)
        for client in self.clients.values():
            client.board = self.board

    @invariant()
    def every_step_is_accounted_for(self):
        if not hasattr(self, "board"):
            return
        stream = streams_of(self.board)[self.stream]
        assert set(self.given.values()) <= {1}
        assert stream["finished"] == len(self.finished)
        lost = set(map(int, stream["lost"]))
        assert stream["finished"] + stream["held"] + len(lost) == stream["next"]
        assert not lost & self.finished


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=40)


def together(workers, work):
    """Runs `work(client)` of every client in its own thread; raises what they do."""
    errors = []

    def run(client):
        try:
            work(client)
        except Exception as error:  # noqa: BLE001 - raised below.
            errors.append(error)

    threads = [threading.Thread(target=run, args=(c,), daemon=True) for c in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_threads_hammer_the_board():
    board = Board(NAMES, Timeouts(startup=60, heartbeat=60, chief=60))
    given: Counter[int] = Counter()
    results: Counter[str] = Counter()

    def steps(client, stream):
        finished = []
        while True:
            answer = client("claim", stream=stream, finished=finished)
            finished = answer.get("indices", [])
            given.update(finished)
            if answer.get("is_over") and not streams_of(board)[stream]["held"]:
                return

    def work(client):
        client("join")
        client("open", stream="a/0", limit=300, max_staleness=2)
        steps(client, "a/0")
        for number in range(50):
            name = f"{client.worker} {number}"
            client("schedule", id=name, payload=number, function="f")
        while (about := client("pending"))["queued"] or about["running"]:
            taken = client("take", functions=["f"])
            if taken and client("result", id=taken["id"], value=1):
                results[taken["id"]] += 1
        while client("arrive", barrier="end"):
            pass
        json.dumps(board.state())

    together([Client(board, name, name) for name in NAMES], work)
    assert given == Counter(range(300))
    assert len(results) == 150
    assert set(results.values()) == {1}
    assert streams_of(board)["a/0"]["finished"] == 300
