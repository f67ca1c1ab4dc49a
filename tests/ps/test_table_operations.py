"""A server's tables over a real connection: rows out, gradients in, nothing more."""

import numpy as np
import pytest
from tests.ps import asking
from tests.ps.addresses import free_address

from replicax.ps.connection import Connection, ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.service import Service
from replicax.ps.snapshots import Snapshots
from replicax.ps.store import UnknownGroup, VariableStore
from replicax.ps.table import TableError, TableSpec

pytest.importorskip("pyarrow")

CREDENTIALS = Credentials(token=new_token())
NUM_ROWS, DIM = 100, 4
SPEC = {
    "name": "words",
    "num_rows": NUM_ROWS,
    "dim": DIM,
    "initializer": {"class_name": "Ones", "config": {}},
    "seed": 0,
}
GROUP = "sgd 0"


def sgd(rate=0.5, **options):
    config = {"learning_rate": rate, "momentum": 0.0, "nesterov": False, **options}
    return {"kind": "optimizer", "config": {"class_name": "SGD", "config": config}}


def adam(rate=0.1):
    options = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}
    config = {"learning_rate": rate, **options}
    return {"kind": "optimizer", "config": {"class_name": "Adam", "config": config}}


def spec_of(**changes):
    return TableSpec(**{**SPEC, **changes})


@pytest.fixture
def tables():
    return VariableStore(1, 2)  # Has the odd rows.


@pytest.fixture
def connection(tables):
    service = Service(
        free_address(),
        tables,
        None,
        CREDENTIALS,
    )
    service.serve_in_thread()
    try:
        with Connection(
            service.address, CREDENTIALS, task="ps:1", retry_timeout_seconds=5
        ) as link:
            yield link
    finally:
        service.close()


@pytest.fixture
def words(connection):
    """A connection to a server that has the table, and knows how to update it."""
    connection.exchange_header({"op": "create_table", "spec": SPEC})
    connection.call("tables.set_rule", table="words", rule=sgd(), group=GROUP)
    return connection


def rows(connection, *ids):
    vectors = {"ids": np.array(ids, np.int64)}
    answer = connection.exchange_header({"op": "rows", "table": "words"}, vectors)[1]
    return answer["rows"].reshape(len(ids), DIM)


def push(connection, ids, value=1.0, sequence=1, dtype=np.float32, **changes):
    header = {
        "op": "push_rows",
        "table": "words",
        "num_rows": len(ids),
        "worker": "worker:0",
        "session": "a",
        "sequence": sequence,
    } | changes
    vectors = {
        "ids": np.array(ids, np.int64),
        "gradients": np.full(len(ids) * DIM, value, dtype),
    }
    return connection.exchange_header(header, vectors)[0]


def test_rows_are_pulled_and_pushed(words):
    pushed = push(words, [3, 7, 7])
    assert (pushed["version"], pushed["applied"]) == (1, True)
    assert rows(words, 7, 1, 3)[:, 0].tolist() == [0.0, 1.0, 0.5]
    assert rows(words).shape == (0, DIM)
    assert push(words, [], sequence=2)["version"] == 2
    status = words.call("store.status")["tables"]
    assert status == {
        "words": {
            "version": 2,
            "applied": 2,
            "lost": 0,
        }
    }


@pytest.mark.parametrize(
    ("header", "vectors", "message"),
    [
        (
            {"op": "rows", "table": "other"},
            {"ids": ("<i8", 1)},
            "table 'other' is not on server 1",
        ),
        ({"op": "rows", "table": 7}, {"ids": ("<i8", 1)}, "table is 7; expected str"),
        ({"op": "rows", "table": "words"}, {"ids": ("<i4", 1)}, "has dtype 'int32'"),
        ({"op": "rows", "table": "words"}, {"ids": ("<i8", 51)}, "expected 0 to 50"),
        ({"op": "rows", "table": "words"}, {}, "expected \\['ids'\\]"),
        ({"op": "push_rows", "num_rows": 51}, {}, "has only 50 rows here"),
        ({"op": "push_rows", "num_rows": -1}, {}, "num_rows is -1"),
        (
            {"op": "push_rows", "num_rows": 2},
            {"ids": ("<i8", 2), "gradients": ("<f4", 9)},
            "has 9 elements; expected 8",
        ),
    ],
)
def test_other_messages_are_refused(words, header, vectors, message):
    complete = {
        "table": "words",
        "num_rows": 0,
        "worker": "worker:0",
        "session": "a",
        "sequence": 1,
    } | header
    arrays = {name: np.zeros(n, dtype) for name, (dtype, n) in vectors.items()}
    with pytest.raises(ServerRefused, match=message):
        words.exchange_header(complete, arrays)
    assert rows(words, 3).shape == (1, DIM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 0}, "num_rows=0"),
        ({"num_rows": "9"}, "num_rows is '9'"),
        ({"num_rows": 10**14}, "Unable to allocate"),
        ({"dim": True}, "dim is True"),
        ({"name": ""}, "spec.name is ''"),
        ({"name": "x" * 300}, "str of length <= 256"),
        ({"initializer": {"class_name": "GlorotUniform"}}, "Use RandomUniform"),
        ({"initializer": []}, r"spec.initializer is \[\]"),
        ({"more": 1}, "unknown field more"),
    ],
)
def test_invalid_tables_are_refused(connection, changes, message):
    with pytest.raises(ServerRefused, match=message):
        connection.exchange_header({"op": "create_table", "spec": {**SPEC, **changes}})
    assert connection.call("store.status")["tables"] == {}


def test_an_existing_table_is_kept(words):
    push(words, [3])
    again = {**SPEC, "seed": 5, "initializer": {"class_name": "Zeros", "config": {}}}
    answer, _ = words.exchange_header({"op": "create_table", "spec": again})
    assert answer["spec"]["initializer"] == SPEC["initializer"]
    assert answer["version"] == 1
    assert rows(words, 3)[0, 0] == 0.5
    with pytest.raises(ServerRefused, match="with 100 rows of 4; got 100 rows of 5"):
        words.exchange_header({"op": "create_table", "spec": {**SPEC, "dim": 5}})


def test_pushes_to_a_table_need_an_optimizer(connection):
    connection.exchange_header({"op": "create_table", "spec": SPEC})
    assert (rows(connection, 3) == 1).all()
    with pytest.raises(ServerRefused, match="Set its rule before rows are pushed"):
        push(connection, [3])
    for malformed in ({}, {"kind": "optimizer", "config": {"class_name": "SGD"}}):
        with pytest.raises(ServerRefused, match=r"malformed|cannot be updated"):
            connection.call(
                "tables.set_rule", table="words", rule=malformed, group=GROUP
            )


def test_a_table_keeps_its_first_optimizer(words):
    with pytest.raises(ServerRefused, match=r"\('SGD', 'Adam'\)"):
        words.call("tables.set_rule", table="words", rule=adam(), group="adam 1")
    with pytest.raises(ServerRefused, match=r"'momentum': \(0.0, 0.9\)"):
        words.call(
            "tables.set_rule", table="words", rule=sgd(momentum=0.9), group="sgd 1"
        )
    # A worker that is late, or was restarted, has the first learning rate.
    words.call("tables.set_learning_rate", table="words", learning_rate=0.25)
    words.call("tables.set_rule", table="words", rule=sgd(name="b"), group=GROUP)
    push(words, [3])
    assert rows(words, 3)[0, 0] == 0.75
    # A model that was compiled again brings its own.
    words.call("tables.set_rule", table="words", rule=sgd(0.125), group="sgd 1")
    push(words, [5], sequence=2)
    assert rows(words, 5)[0, 0] == 0.875


def test_restored_tables_continue_like_the_originals(tmp_path):
    tables = VariableStore(1, 2)
    tables.create_table(spec_of())
    tables.create_table(spec_of(name="topics", dim=2, seed=1))
    tables.set_rule("words", adam(), "adam 0")
    tables.set_rule("words", adam(), "adam 1")

    def push_row(tables, sequence):
        return asking.push_rows(
            tables,
            "words",
            ids=np.array([3]),
            gradients=np.full((1, DIM), sequence, np.float32),
            worker="worker:0",
            session="a",
            sequence=sequence,
        )

    push_row(tables, 1)
    Snapshots(tmp_path, 1).write(tables.state())
    state = Snapshots(tmp_path, 1).restore().state
    restored = VariableStore(1, 2)
    restored.load_state(state)
    assert restored.status()["tables"] == tables.status()["tables"]
    assert push_row(restored, 1).version == 1  # Is in the snapshot.
    for each in (tables, restored):
        each.table("words").set_learning_rate(0.05)
        push_row(each, 2)
        assert each.table("topics").spec.rule is None
    everything = np.arange(1, NUM_ROWS, 2)
    for name in ("words", "topics"):
        np.testing.assert_array_equal(
            restored.table(name).rows(everything), tables.table(name).rows(everything)
        )
    assert restored.num_updates == 2
    other = VariableStore(0, 2)
    with pytest.raises(TableError, match="Use the number of servers"):
        other.load_state(state)
    with pytest.raises(UnknownGroup, match=r"table 'words' is not on server 0"):
        other.table("words")
