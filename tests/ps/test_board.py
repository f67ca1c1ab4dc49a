"""The board as clients see it: everything goes in and comes out as JSON."""

import copy
import json

import pytest
from tests.ps.boards import (
    NAMES,
    STREAM,
    TIMEOUTS,
    Client,
    Clock,
    ask,
    restarted,
    streams_of,
)

from replicax.ps.board import Board
from replicax.ps.call_log import Sessions
from replicax.ps.limits import RequestError


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def board(clock):
    return Board(NAMES, TIMEOUTS, now=clock)


@pytest.fixture
def clients(board):
    clients = [Client(board, name, f"{name}-1") for name in NAMES]
    for client in clients:
        client("join")
    return clients


def test_actions_are_all_public_methods_but_those_for_snapshots():
    public = {name for name in vars(Board) if not name.startswith("_")}
    assert public - {"ANSWERS", "state", "load_state"} == Board.ANSWERS.keys()


def test_join_answers_with_the_heartbeat_timeout(board):
    answer = ask(board, "join", worker=NAMES[1], session="s")
    assert answer == {
        "starts": 1,
        "before": [],
        "heartbeat_seconds": 10,
        "failed": None,
        "is_over": False,
    }


def test_a_dead_worker_loses_its_leases_and_may_return(board, clients, clock, caplog):
    a, b, _ = clients
    ask(board, "open", stream=STREAM, limit=3)
    a("claim", stream=STREAM)
    clock.seconds = 8
    b("beat")
    clock.seconds = 15
    assert ask(board, "alive") == ["worker:1"]
    assert b("claim", stream=STREAM, count=2) == {"indices": [1, 2]}
    assert streams_of(board)[STREAM]["lost"] == {"0": "worker:0"}
    assert b("finish", stream=STREAM, indices=[0]) == [0]
    assert "worker:1 trained on steps [0], as other workers did" in caplog.text
    # The first worker was only silent, and has done its step.
    assert a("finish", stream=STREAM, indices=[0]) == []
    assert streams_of(board)[STREAM]["lost"] == {}
    assert a("claim", stream=STREAM) == {"is_over": True, "length": 3}
    assert ask(board, "alive") == ["worker:0", "worker:1"]


def test_a_restarted_worker_replaces_its_earlier_session(board, clients):
    ask(board, "open", stream=STREAM, limit=2)
    assert clients[1]("claim", stream=STREAM) == {"indices": [0]}
    new = Client(board, "worker:1", "worker:1-2")
    joined = new("join")
    assert (joined["starts"], joined["before"]) == (2, ["worker:1-1"])
    assert new("claim", stream=STREAM) == {"indices": [1]}
    # Its calls count from 1 again.
    assert clients[2]("finish", stream=STREAM, indices=[1], call=1) == [1]
    Client(board, "worker:2", "worker:2-2")("join")
    clients[2].session = "worker:2-2"
    assert clients[2]("finish", stream=STREAM, indices=[], call=1) == []
    with pytest.raises(RequestError, match="this process must stop"):
        clients[1]("finish", stream=STREAM, indices=[0])


def test_a_repeated_call_gets_the_recorded_answer(board, clients):
    a, *_ = clients
    ask(board, "open", stream=STREAM, limit=9)
    first = a("claim", stream=STREAM, count=2, call=5)
    assert a("claim", stream=STREAM, count=2, call=5) == first == {"indices": [0, 1]}
    assert a("claim", stream=STREAM, count=2, call=6) == {"indices": [2, 3]}
    with pytest.raises(RequestError, match="claim: number 5 came after number 6"):
        a("claim", stream=STREAM, call=5)
    for _ in range(2):
        assert a("finish", stream=STREAM, indices=[0], call=1) == []
        a("schedule", id="x", payload=1, call=1, function="f")
        assert a("take", call=1, functions=["f"])["id"] == "x"
        assert a("result", id="x", call=1, error={"type": "E"})
    for _ in range(2):
        assert a("raise_if_failed", call=1)["type"] == "E"
    assert a("raise_if_failed", call=2) is None
    assert streams_of(board)[STREAM]["finished"] == 1


def test_a_dead_workers_repeated_claim_leases_other_steps(clients, clock):
    a, *_ = clients
    a("open", stream=STREAM, limit=9)
    assert a("claim", stream=STREAM, call=1) == {"indices": [0]}
    clock.seconds = 20
    assert a("claim", stream=STREAM, call=1) == {"indices": [1]}
    again = {"stream": STREAM, "call": 2, "finished": [1]}
    assert a("claim", **again)["indices"] == [2]
    clock.seconds = 40
    assert a("claim", **again) == {"indices": [3]}
    assert list(streams_of(a.board)[STREAM]["lost"]) == ["0", "2"]


def test_a_call_that_is_refused_may_be_repeated(board, clients):
    a, *_ = clients
    with pytest.raises(RequestError, match="open it first"):
        a("claim", stream=STREAM, call=1)
    ask(board, "open", stream=STREAM)
    with pytest.raises(RequestError, match="count is 0; expected int >= 1"):
        a("claim", stream=STREAM, call=1, count=0)
    assert a("claim", stream=STREAM, call=1) == {"indices": [0]}
    with pytest.raises(RequestError, match="call is '2'; expected int"):
        a("claim", stream=STREAM, call="2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"worker": ["worker:0"], "session": "a"},
            "worker is \\['worker:0'\\]; expected",
        ),
        ({"worker": "worker:0", "session": 7}, "session is 7; expected str"),
        (
            {"worker": "worker:0", "session": ""},
            "session is ''; expected str of",
        ),
        ({"worker": "worker:0", "session": "a", "x": 1}, "unknown field x"),
    ],
)
def test_arguments_of_other_types_or_sizes_are_refused(board, arguments, message):
    with pytest.raises(RequestError, match=message):
        ask(board, "join", **arguments)
    assert ask(board, "alive") == []


def test_finishing_and_claiming_in_one_call(board, clients):
    a, *_ = clients
    ask(board, "open", stream=STREAM, limit=2)
    a("claim", stream=STREAM)
    assert a("claim", stream=STREAM, finished=[0]) == {"indices": [1]}
    with pytest.raises(RequestError, match="count"):
        a("claim", stream=STREAM, finished=[1], count=0)
    assert a("claim", stream=STREAM, finished=[1])["is_over"]
    assert streams_of(board)[STREAM]["held"] == 0


@pytest.mark.parametrize(
    "ticket", ["0", "00", 0.0, True, None, -1, [1], [-1, 0], ["0", 0], [0, 0, 0]]
)
def test_malformed_tickets_are_refused_and_change_nothing(clients, ticket):
    a, *_ = clients
    a("open", stream=STREAM)
    good = a("claim", stream=STREAM)["indices"]
    with pytest.raises(RequestError, match=r"indices\[\d"):
        a("finish", stream=STREAM, indices=[*good, ticket])
    with pytest.raises(RequestError, match=r"finished\[1"):
        a("claim", stream=STREAM, finished=[*good, ticket])
    assert a("finish", stream=STREAM, indices=good) == []


def test_workers_must_open_a_stream_with_equal_settings(board):
    assert ask(board, "open", stream=STREAM, limit=4) == {"is_over": False, "length": 4}
    assert ask(board, "open", stream=STREAM, limit=4) == {"is_over": False, "length": 4}
    with pytest.raises(RequestError, match="must open it alike"):
        ask(board, "open", stream=STREAM, limit=5)


def test_only_the_newest_stream_of_a_family_is_kept(board, clients):
    a, b, _ = clients
    for epoch in range(500):
        stream = f"fit 0/epoch/{epoch}"
        ask(board, "open", stream=stream, limit=1)
        assert a("claim", stream=stream) == {"indices": [0]}
        a("finish", stream=stream, indices=[0])
    assert list(streams_of(board)) == ["fit 0/epoch/499"]
    # A worker that comes late finds them over.
    old = "fit 0/epoch/498"
    assert ask(board, "open", stream=old, limit=1) == {"is_over": True, "length": 1}
    assert b("claim", stream=old) == {"is_over": True, "length": 1}
    assert b("finish", stream=old, indices=[0]) == [0]
    assert ask(board, "end", stream=old) == 1
    assert ask(board, "open", stream="fit 1/epoch/0") == {
        "is_over": False,
        "length": None,
    }
    assert list(streams_of(board)) == ["fit 0/epoch/499", "fit 1/epoch/0"]


def test_a_barrier_waits_for_live_workers(clients, clock):
    a, b, c = clients
    assert a("arrive", barrier="go") == ["worker:1", "worker:2"]
    clock.seconds = 8
    a("beat")
    b("beat")
    clock.seconds = 15  # The third is dead.
    assert a("arrive", barrier="go") == ["worker:1"]
    assert b("arrive", barrier="go") == []
    assert a("arrive", barrier="go") == []
    assert c("arrive", barrier="go") == []  # It is late.
    assert a("arrive", barrier="next") == ["worker:1", "worker:2"]


def test_a_late_worker_finds_all_barriers_of_a_long_job_complete(clients):
    names = ["begin/1", *(f"end/{number}" for number in range(2000))]
    for barrier in names:
        answers = [client("arrive", barrier=barrier) for client in clients]
        assert list(map(len, answers)) == [2, 1, 0]
    for barrier in names:
        assert clients[2]("arrive", barrier=barrier) == [], barrier
    assert len(clients[2]("arrive", barrier="end/2000")) == 2


def test_a_key_keeps_its_first_value(board):
    assert ask(board, "get", key="k") is None
    assert ask(board, "put", key="k", value={"a": [1]}) == {"a": [1]}
    assert ask(board, "put", key="k", value=2) == {"a": [1]}
    assert ask(board, "put", key="k", value=2, overwrite=True) == 2
    assert ask(board, "get", key="k") == 2
    with pytest.raises(RequestError, match="must not be null"):
        ask(board, "put", key="k", value=None)


def test_only_the_newest_numbered_keys_are_kept(board):
    ask(board, "put", key="init", value=1)
    for number in range(100):
        ask(board, "put", key=f"verdict/{number}", value=number)
    kept = [n for n in range(100) if ask(board, "get", key=f"verdict/{n}") is not None]
    assert kept == list(range(36, 100))
    assert ask(board, "get", key="init") == 1


def test_reports_are_by_worker_and_of_the_newest_topics(board, clients):
    a, b, _ = clients
    for epoch in range(70):
        a("report", topic=f"m/{epoch}", values={"loss": epoch})
    b("report", topic="m/69", values={"loss": 1.5})
    assert ask(board, "reports", topic="m/69") == {
        "worker:0": {"loss": 69},
        "worker:1": {"loss": 1.5},
    }
    assert ask(board, "reports", topic="m/5") == {}


def test_a_failure_is_final(board, clients, clock):
    clients[1]("leave", ok=False, error="ValueError")
    assert ask(board, "failed") is None
    clients[0]("leave", ok=False, error="OSError: disk")
    reason = "worker:0 (the chief) failed: OSError: disk"
    assert ask(board, "failed") == reason
    new = Client(board, "worker:0", "again")
    assert new("join")["failed"] == reason
    assert clients[2]("beat") == reason
    assert not ask(board, "is_done")


def test_done_when_all_have_left(board, clients):
    for client in clients:
        assert not ask(board, "is_done")
        client("leave", ok=True)
        client("leave", ok=True)
    assert ask(board, "is_done")
    assert ask(board, "failed") is None
    with pytest.raises(RequestError, match="has left"):
        clients[0]("beat")
    late = ask(board, "join", worker=NAMES[1], session="late")
    assert late["is_over"]
    assert ask(board, "alive") == []
    assert ask(board, "is_done")


def test_a_dead_workers_closure_is_retried(board, clients, clock):
    chief, a, b = clients
    chief("schedule", id="x", payload={"n": 1}, function="f")
    assert a("take", functions=["f"])["payload"] == {"n": 1}
    clock.seconds = 8
    chief("beat")
    b("beat")
    clock.seconds = 15
    assert ask(board, "pending")["queued"] == 1
    assert b("take", functions=["f"])["id"] == "x"
    assert b("result", id="x", value=2)
    assert ask(board, "pending") == {"queued": 0, "running": {}}
    assert ask(board, "fetch", ids=["x"]) == {"x": {"status": "done", "value": 2}}
    Client(board, "worker:0", "again")("join")
    assert ask(board, "fetch", ids=["x"]) == {"x": {"status": "unknown"}}


@pytest.mark.parametrize("error", ["ValueError", 3, ["a"]])
def test_malformed_errors_are_refused_and_the_closure_goes_on(clients, error):
    chief, a, _ = clients
    chief("schedule", id="x", payload=1, function="f")
    a("take", functions=["f"])
    with pytest.raises(RequestError, match=r"error is .*; expected object"):
        a("result", id="x", error=error)
    assert a("result", id="x", value=1)


def test_a_restarted_board_continues_the_sessions(board, clients, clock):
    a, b, _ = clients
    ask(board, "open", stream=STREAM, limit=5)
    a("claim", stream=STREAM, call=1)
    b("claim", stream=STREAM)
    a("schedule", id="x", payload=1, function="f")
    b("take", functions=["f"])
    a("put", key="k", value=1)
    a("report", topic="r", values=2)
    a("arrive", barrier="go")
    saved = json.loads(json.dumps(board.state()))
    clock.seconds = 1000
    again = restarted(NAMES, TIMEOUTS, saved, now=clock)
    a.board = b.board = again
    assert a("claim", stream=STREAM, call=1) == {"indices": [0]}
    assert a("finish", stream=STREAM, indices=[0]) == []
    assert b("finish", stream=STREAM, indices=[1]) == []
    assert b("result", id="x", value=3)
    assert (a("get", key="k"), a("reports", topic="r")) == (1, {"worker:0": 2})
    assert a("arrive", barrier="go") == ["worker:1", "worker:2"]
    assert a("beat") is None
    clock.seconds = 1011
    assert ask(again, "alive") == []


def test_a_restart_without_a_log_revokes_leases(board, clients, clock):
    a, b, _ = clients
    ask(board, "open", stream=STREAM, limit=3, max_staleness=1)
    a("claim", stream=STREAM)
    b("claim", stream=STREAM)
    again = restarted(NAMES, TIMEOUTS, board.state(), now=clock)
    a.board = b.board = again
    # The leases are revoked, so `a` need not wait: both may have finished their steps.
    assert a("claim", stream=STREAM) == {"indices": [2]}
    assert b("finish", stream=STREAM, indices=[1]) == []
    assert list(streams_of(again)[STREAM]["lost"]) == ["0"]


def test_closures_that_ran_at_the_snapshot_are_retried_or_reported(
    board, clients, clock
):
    chief, a, b = clients
    for id in "xyz":
        chief("schedule", id=id, payload=id, function="f")
    a("take", functions=["f"])
    b("take", functions=["f"], call=1)
    saved = json.loads(json.dumps(board.state()))
    a("result", id="x", value=1)  # The snapshot does not know of it.
    again = restarted(NAMES, TIMEOUTS, saved, now=clock)
    chief.board = a.board = b.board = again
    assert ask(again, "pending")["queued"] == 3
    # Its answer was lost with the server.
    assert b("take", functions=["f"], call=1)["id"] == "x"
    assert b("result", id="y", value=2)  # It still had that one.
    assert not a("result", id="x", value=3)
    assert b("result", id="x", value=3)
    assert a("take", functions=["f"])["id"] == "z"
    a("result", id="z", value=4)
    assert ask(again, "fetch", ids=["x", "y", "z"]) == {
        id: {"status": "done", "value": value}
        for id, value in (("x", 3), ("y", 2), ("z", 4))
    }


def test_a_new_session_does_not_get_an_old_sessions_answer(clock) -> None:
    wal = {}
    board = Board(
        NAMES,
        TIMEOUTS,
        now=clock,
        append=lambda key, value: wal.update({tuple(key): copy.deepcopy(value)}),
    )
    saved = board.state()
    ask(board, "open", stream=STREAM, limit=3)
    first = Client(board, NAMES[0], "s1")
    first("join")
    assert first("claim", stream=STREAM, count=1) == {"indices": [0]}
    first("finish", stream=STREAM, indices=[0])
    again = restarted(NAMES, TIMEOUTS, saved, wal, now=clock)
    second = Client(again, NAMES[0], "s2")
    second("join")
    assert second("claim", stream=STREAM, count=1) == {"indices": [1]}


def test_a_log_entry_has_only_its_workers_leases(clock) -> None:
    names = [f"worker:{i}" for i in range(200)]
    wal = {}

    def append(key, value):
        wal.pop(tuple(key), None)  # The latest is the last.
        wal[tuple(key)] = copy.deepcopy(value)

    board = Board(names, TIMEOUTS, Sessions(append), now=clock, append=append)
    saved = board.state()
    clients = [Client(board, name, f"{name}-1") for name in names]
    for client in clients:
        client("join")
    ask(board, "open", stream=STREAM, max_staleness=1000)
    given = [client("claim", stream=STREAM, count=3)["indices"] for client in clients]
    for client, steps in zip(clients, given, strict=True):
        client("claim", stream=STREAM, finished=steps[:1])
    assert max(len(json.dumps(entry)) for entry in wal.values()) < 1000
    again = restarted(names, TIMEOUTS, saved, wal, now=clock)
    assert streams_of(again) == streams_of(board)
    for client in clients:
        client.board = again
        client("join")
    repeated = clients[7]("claim", stream=STREAM, call=clients[7].call)
    assert repeated == {"indices": [607]}
    clock.seconds = 9
    clients[0]("beat")
    clock.seconds = 11  # All but one are dead, whose steps were given up.
    clients[0]("beat")
    stream = streams_of(again)[STREAM]
    assert (len(stream["lost"]), stream["held"]) == (3 * 199, 3)
