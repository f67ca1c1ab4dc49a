"""A worker's rows: pulls from several servers, pushes, and failures."""

import dataclasses
import socket
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.cluster.timeouts import Timeouts
from replicax.ps import rows as rows_module
from replicax.ps.connection import ConnectionLost
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.messages import PushRows
from replicax.ps.partition import VariableGroup
from replicax.ps.rows import RemoteTables, tables_of
from replicax.ps.service import Service
from replicax.ps.session import Session
from replicax.ps.store import VariableStore
from replicax.ps.table import TableSpec

pytest.importorskip("pyarrow")

CREDENTIALS = Credentials(token=new_token())
NUM_ROWS, DIM = 101, 4
UNIFORM = {"class_name": "RandomUniform", "config": {}}
ADAM = {
    "learning_rate": 0.1,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "amsgrad": False,
}


def group_of(class_name, config, name="group 0", **rule):
    described = {"class_name": class_name, "config": config}
    rule = {"kind": "optimizer", "config": described, **rule}
    return VariableGroup(name=name, rule=rule, shards=())


SGD_GROUP = group_of(
    "SGD", {"learning_rate": 0.5, "momentum": 0.0, "nesterov": False}, "group 1"
)


def table(name, *, num_rows=NUM_ROWS, dim=DIM, seed=3):
    return TableSpec(
        name=name, num_rows=num_rows, dim=dim, initializer=UNIFORM, seed=seed
    )


@dataclasses.dataclass
class Anchor:
    """What a strategy sees of a table: the variable that stands for it."""

    table_name: str


class Servers:
    """Two servers at fixed addresses, which may be lost and come back."""

    def __init__(self):
        self.addresses = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.addresses.append(f"127.0.0.1:{free.getsockname()[1]}")
        self.tables = [VariableStore(i, 2) for i in range(2)]
        self.services = [self._serve(i) for i in range(2)]

    def lose(self, server):
        state = self.tables[server].state()
        self.services[server].close()
        return state

    def bring_back(self, server, state):
        self.tables[server] = VariableStore(server, 2)
        self.tables[server].load_state(state)
        self.services[server] = self._serve(server)

    def versions(self, name="words"):
        return [tables.table(name).version for tables in self.tables]

    def close(self):
        for service in self.services:
            service.close()

    def _serve(self, server):
        service = Service(
            self.addresses[server], self.tables[server], None, CREDENTIALS
        )
        service.serve_in_thread()
        return service


@pytest.fixture
def servers():
    found = Servers()
    yield found
    found.close()


@pytest.fixture
def make_rows(servers):
    sessions = []

    def make(worker=0, timeouts=None, **options):
        session = Session(
            ["worker:0", "worker:1"],
            worker,
            servers.addresses,
            CREDENTIALS,
            timeouts or Timeouts(server=10.0),
        )
        for connection in session.connections:  # As `join` does.
            connection.retry_timeout_seconds = session.timeouts.server
        sessions.append(session)
        rows = RemoteTables(session, **options)
        rows.session = session
        return rows

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def rows(make_rows):
    """A source with one table, which is updated with the first group."""
    rows = make_rows()
    rows.create(table("words"))
    rows.connect(SGD_GROUP, [Anchor("words")])
    return rows


def everything(rows, name="words"):
    return rows.pull(name, np.arange(NUM_ROWS))


def step(rows, ids, value=1.0, name="words"):
    """What a program and the strategy do with one replica's rows."""
    rows.await_pushes(begun(rows, ids, value, name))


def begun(rows, ids, value, name="words"):
    """Run a step, and start its pushes."""
    ids = np.asarray(ids)

    def program():
        rows.pull(name, ids)
        rows.collect(name, ids, np.full((len(ids), DIM), value, np.float32))

    rows.run_program(program)
    return rows.push([name])


def test_a_push_has_a_longer_timeout_than_a_pull_in_a_program(make_rows, monkeypatch):
    """As over a slow network, where it may be large."""
    monkeypatch.setattr(rows_module, "_REPLY_SECONDS", 0.5)
    handle, handled = PushRows.handle, Counter()

    def handle_late(message, store, vectors):
        handled[store.server] += 1
        time.sleep(1.0)
        return handle(message, store, vectors)

    monkeypatch.setattr(PushRows, "handle", handle_late)
    rows = make_rows()
    rows.create(table("words"))
    rows.connect(SGD_GROUP, [Anchor("words")])
    step(rows, [1, 2, 3])
    assert handled == {0: 1, 1: 1}


def test_rows_are_pulled_from_their_servers(rows, servers):
    whole = everything(rows)
    assert whole.shape == (NUM_ROWS, DIM)
    np.testing.assert_array_equal(
        whole[1::2], servers.tables[1].table("words").rows(np.arange(1, NUM_ROWS, 2))
    )
    some = np.array([100, 3, 4])
    np.testing.assert_array_equal(rows.pull("words", some), whole[some])
    assert rows.pull("words", np.array([], np.int64)).shape == (0, DIM)


def test_all_replicas_gradients_make_one_update_of_each_server(rows, servers):
    before = everything(rows)

    def program():
        rows.collect("words", np.array([2, 4]), np.ones((2, DIM), np.float32))
        rows.collect("words", np.array([4, 8]), np.ones((2, DIM), np.float32))

    rows.run_program(program)
    rows.await_pushes(rows.push(["words"]))
    change = np.zeros((NUM_ROWS, DIM), np.float32)
    change[[2, 4, 8]] = [[0.5], [1.0], [0.5]]
    np.testing.assert_allclose(before - everything(rows), change, atol=1e-7)
    assert servers.versions() == [1, 1]  # The odd rows' server had an empty push.


def test_a_program_fetches_the_same_rows_once(rows):
    ids = np.array([1, 2])

    def program():
        first = rows.pull("words", ids)
        before = rows.session.num_bytes
        assert rows.pull("words", ids.copy()) is first
        assert rows.session.num_bytes == before
        rows.pull("words", np.array([1, 3]))
        assert rows.session.num_bytes > before
        return first

    first = rows.run_program(program)
    step(rows, ids)
    np.testing.assert_allclose(rows.run_program(program), first - 0.5, atol=1e-7)


def test_gradients_that_were_not_pushed_are_dropped(rows):
    before = everything(rows)
    rows.run_program(
        lambda: rows.collect("words", np.array([1]), np.ones((1, DIM), np.float32))
    )
    rows.run_program(lambda: None)
    rows.await_pushes(rows.push(["words"]))
    np.testing.assert_array_equal(everything(rows), before)


def test_only_tables_with_an_anchor_are_pushed(rows, servers):
    rows.create(table("topics", num_rows=10))
    assert tables_of([object(), Anchor("topics"), Anchor("topics")]) == ["topics"]
    step(rows, [1])
    assert servers.versions("topics") == [0, 0]


def test_the_first_error_of_a_callback_is_raised_after_the_program(rows, servers):
    ended = []

    def program():
        rows.fail(ValueError("first"))
        rows.fail(ValueError("second"))
        with pytest.raises(ValueError, match="first"):
            rows.pull("words", np.array([1]))  # So that the program ends soon.
        ended.append(True)

    with pytest.raises(ValueError, match="first"):
        rows.run_program(program)
    assert ended == [True]
    step(rows, [1])
    assert servers.versions() == [1, 1]


def test_complete_waits_for_callbacks(rows):
    def slow(x):
        time.sleep(0.2)
        rows.fail(ValueError("late"))
        return x

    program = jax.jit(
        lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x)
    )
    with pytest.raises(ValueError, match="late"):
        rows.run_program(lambda: program(jnp.float32(1)))


def test_all_servers_use_one_seed(make_rows):
    first, second = make_rows(), make_rows(1)
    threads = [
        threading.Thread(target=source.create, args=(table("words", seed=seed),))
        for seed, source in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    np.testing.assert_array_equal(everything(first), everything(second))
    candidates = []
    for seed in range(2):
        first.create(table(f"words {seed}", seed=seed))
        candidates.append(everything(first, f"words {seed}"))
    assert any((everything(first) == candidate).all() for candidate in candidates)


def test_rows_do_not_decay_if_their_anchor_is_excluded(make_rows):
    rows = make_rows()
    config = {**ADAM, "weight_decay": 0.5}
    changes = []
    for name, excluded in (("decays", []), ("stays", [0])):
        rows.create(table(name))
        group = group_of("AdamW", config, name, no_weight_decay=excluded)
        rows.connect(group, [Anchor(name)])
        before = everything(rows, name)
        step(rows, [1], value=0.0, name=name)
        changes.append(np.abs(everything(rows, name) - before).max())
    assert changes[0] > 0 == changes[1]


def test_gradients_may_be_sent_as_bfloat16(make_rows):
    sizes = []
    for i, compression in enumerate((None, "bfloat16")):
        rows = make_rows(i, compression=compression)
        rows.create(table("words"))
        rows.connect(SGD_GROUP, [Anchor("words")])
        before, sent = everything(rows), rows.session.num_bytes
        step(rows, np.arange(100), value=0.3)
        sizes.append(rows.session.num_bytes - sent)
        change = (before - everything(rows))[:100]
        np.testing.assert_allclose(change, 0.15, rtol=4e-3 if compression else 1e-5)
    assert sizes[0] - sizes[1] > 100 * DIM


def test_a_program_that_lost_a_server_is_retried(rows, servers, monkeypatch, caplog):
    monkeypatch.setattr(rows_module, "_RETRY_SECONDS", 0.3)
    expected = everything(rows)[1:3]
    runs, timers = [], []

    def program():
        runs.append(len(runs))
        if not timers:
            state = servers.lose(1)
            timer = threading.Timer(1.5, servers.bring_back, (1, state))
            timers.append(timer)
            timer.start()
        ids = np.array([1, 2])
        rows.collect("words", ids, np.ones((2, DIM), np.float32))
        try:
            return rows.pull("words", ids)
        except ConnectionLost as error:
            rows.fail(error)
            return None

    found = rows.run_program(program)
    timers[0].join()
    assert len(runs) > 1
    np.testing.assert_array_equal(found, expected)
    assert "The step is retried when the server is back" in caplog.text
    rows.await_pushes(rows.push(["words"]))
    # The gradients of the run that failed do not count.
    np.testing.assert_allclose(expected - everything(rows)[1:3], 0.5, atol=1e-6)


def test_a_server_that_stays_away_is_named(servers, make_rows, monkeypatch):
    monkeypatch.setattr(rows_module, "_RETRY_SECONDS", 0.3)
    rows = make_rows(timeouts=Timeouts(server=1.0))
    rows.create(table("words"))
    servers.lose(1)

    def program():
        try:
            rows.pull("words", np.array([1]))
        except ConnectionLost as error:
            rows.fail(error)

    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="ps:1") as lost:
        rows.run_program(program)
    assert lost.value.culprit == "ps:1"
    assert time.monotonic() - began < 10
