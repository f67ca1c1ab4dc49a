"""A server's port in this process: what it answers, what it refuses, how it ends."""

import json
import os
import re
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from tests.ps.addresses import free_address

from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterError
from replicax.ps import message_stream, wire
from replicax.ps.board import Board
from replicax.ps.connection import Connection, ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.messages import Pull
from replicax.ps.partition import VariableInfo, place
from replicax.ps.service import Service
from replicax.ps.store import VariableStore

pa = pytest.importorskip("pyarrow")

CREDENTIALS = Credentials(token=new_token())
SIZE = 1000
GROUP = place(
    "weights",
    {"kind": "add"},
    [
        VariableInfo(path="kernel", shape=(SIZE // 2,), dtype="float32"),
        VariableInfo(path="bias", shape=(SIZE // 2,), dtype="float32"),
        VariableInfo(path="count", shape=(3,), dtype="int32"),
    ],
    1,
)


def values(scale):
    return {
        "float32": np.full(SIZE, scale, np.float32),
        "int32": np.full(3, scale, np.int32),
    }


def push(number, **more):
    return {
        "op": "push",
        "group": "weights",
        "worker": "worker:0",
        "session": "a",
        "sequence": number,
        "based_on": 0,
        **more,
    }


class Doubles:
    """A message that doubles up to ten numbers, with events to pause it."""

    def __init__(self):
        self.began, self.go_on = threading.Event(), threading.Event()

    def message(self):
        owner = self

        class Double(msgspec.Struct):
            wait: bool = False
            fail: bool = False

            def expected(self, store):
                return {"ids": wire.Allowed(("int64",), 0, 10)}

            def handle(self, store, vectors):
                if self.wait:
                    owner.began.set()
                    owner.go_on.wait(20)
                if self.fail:
                    raise ZeroDivisionError("on purpose")
                return {"done": True}, {"ids": vectors["ids"] * 2}

        return Double


@pytest.fixture
def doubles():
    return Doubles()


@pytest.fixture
def service(doubles):
    board = Board(["worker:0"], Timeouts(startup=9, heartbeat=9, chief=9))
    service = Service(
        free_address(),
        VariableStore(0),
        board,
        CREDENTIALS,
        messages={"double": doubles.message()},
    )
    service.serve_in_thread()
    yield service
    doubles.go_on.set()
    service.close()


@pytest.fixture
def connection(service):
    with Connection(service.address, CREDENTIALS, retry_timeout_seconds=5) as it:
        yield it


@pytest.fixture
def created(connection):
    connection.exchange_header({"op": "create", "group": GROUP.to_json()}, values(1))
    return connection


def test_create_pull_and_push(created):
    header, vectors = created.exchange_header({"op": "pull", "group": "weights"})
    assert (header["version"], header["steps"]) == (0, 0)
    np.testing.assert_array_equal(vectors["float32"], values(1)["float32"])
    header, vectors = created.exchange_header(push(1), values(2))
    assert (header["version"], header["steps"], header["staleness"]) == (1, 1, 0)
    assert header["applied"]
    np.testing.assert_array_equal(vectors["float32"], values(3)["float32"])
    np.testing.assert_array_equal(vectors["int32"], values(3)["int32"])


def test_a_worker_with_the_newest_version_gets_no_values(created):
    before = created.num_bytes
    message = Pull("weights", (created.incarnation, 0))
    answer, vectors = created.exchange(message)
    assert (answer.seen, answer.steps) == (message.seen, 0)
    assert vectors == {}
    assert created.num_bytes - before < SIZE  # The message's header only.


def test_a_replayed_push_is_not_applied_again(created):
    created.exchange_header(push(1), values(2))
    created.exchange_header(push(2), values(2))
    header, vectors = created.exchange_header(push(2), values(2))
    assert header["version"] == 2
    with pytest.raises(
        ServerRefused, match="push of worker:0: number 1 came after"
    ) as caught:
        created.exchange_header(push(1), values(2))
    assert caught.value.kind == "RequestError"
    _, vectors = created.exchange_header({"op": "pull", "group": "weights"})
    np.testing.assert_array_equal(vectors["float32"], values(5)["float32"])


@pytest.mark.parametrize(
    ("header", "vectors", "why"),
    [
        ({"op": "explode"}, {}, "there is no operation 'explode'"),
        ({}, {}, "there is no operation None"),
        ({"op": ["pull"]}, {}, "there is no operation"),
        ({"op": "pull", "group": "other"}, {}, "group 'other' is not on server 0"),
        ({"op": "pull", "group": 7}, {}, "group is 7; expected str"),
        ({"op": "pull", "group": "weights", "seen": ["a", "1"]}, {}, "is '1'"),
        ({"op": "push", "group": "weights"}, {}, "missing required field worker"),
        (push(1, sequence=True), {}, "sequence is True; expected int"),
        (push(1), {}, r"has the vectors \[\]"),
        ({"op": "double"}, {"ids": np.arange(11)}, "11 elements; expected 0 to 10"),
        ({"op": "create", "group": {}}, {}, "missing required field name"),
        (
            {"op": "create", "group": {"name": "x", "rule": {}, "shards": 3}},
            {},
            "group.shards is 3",
        ),
    ],
)
def test_invalid_messages_are_refused(created, caplog, header, vectors, why):
    with pytest.raises(ServerRefused, match=why):
        created.exchange_header(header, vectors)
    assert any(
        "Refused a message from ipv4:127.0.0.1:" in r.message for r in caplog.records
    )
    header, _ = created.exchange_header({"op": "pull", "group": "weights"})
    assert header["version"] == 0


def test_vectors_of_another_length_than_announced_are_refused(service, created):
    """Messages that a correct sender cannot send, written by hand."""
    for length, why in ((10, "the next message came"), (30_000, "lacked")):
        stream = OpenStream(service)
        header = push(1) | {"vectors": [[k, k, v.size] for k, v in values(1).items()]}
        stream.write(header)
        stream.write_bytes(np.zeros(length, np.uint8))
        try:
            stream.write({"op": "pull", "group": "weights"})
            refusal = stream.error()
        except wire.flight().FlightServerError as error:
            refusal = str(error)  # It was faster than the next message.
        assert why in refusal
    stream = OpenStream(service)
    stream.write_bytes(np.zeros(10, np.uint8))
    assert "a header was expected" in stream.error()
    stream = OpenStream(service)
    stream.writer.write_metadata(b"\x80\x04\x95 a pickle")
    assert "is not JSON" in stream.error()
    header, _ = created.exchange_header({"op": "pull", "group": "weights"})
    assert header["version"] == 0


def test_a_stream_that_ends_within_a_message_is_logged_as_lost(
    service, created, caplog
):
    stream = OpenStream(service)
    stream.write(push(1) | {"vectors": [[k, k, v.size] for k, v in values(1).items()]})
    stream.write_bytes(np.zeros(10, np.uint8))
    stream.writer.done_writing()
    with pytest.raises(StopIteration):
        stream.reader.read_chunk()
    stream.writer.close()
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search(
        "Lost ipv4:127.*: the stream ended before the end of a message", logged
    )
    assert "Refused" not in logged
    header, _ = created.exchange_header({"op": "pull", "group": "weights"})
    assert header["version"] == 0


class OpenStream:
    """A stream on which a test writes headers and bytes by hand."""

    def __init__(self, service):
        flight = wire.flight()
        self.client = flight.FlightClient(f"grpc+tcp://{service.address}")
        token = f"Bearer {CREDENTIALS.token}".encode()
        self.writer, self.reader = self.client.do_exchange(
            flight.FlightDescriptor.for_path("x"),
            flight.FlightCallOptions(headers=[(b"authorization", token)]),
        )
        message_stream.MessageStream(self.reader, self.writer)

    def write(self, header):
        self.writer.write_metadata(json.dumps(header).encode())

    def write_bytes(self, values):
        for chunk in message_stream._chunks([values]):
            self.writer.write_batch(message_stream._record_batch(chunk))

    def error(self):
        flight = wire.flight()
        with pytest.raises(flight.FlightServerError, match=r".") as caught:
            self.reader.read_chunk()
        with pytest.raises(flight.FlightServerError, match=r"."):
            self.writer.close()
        return str(caught.value)


def test_an_error_of_an_operation_is_answered_and_the_stream_continues(created, caplog):
    with pytest.raises(ServerRefused, match="on purpose") as caught:
        created.exchange_header({"op": "double", "fail": True}, {"ids": np.arange(3)})
    assert caught.value.kind == "ZeroDivisionError"
    assert any(record.exc_info for record in caplog.records)
    header, vectors = created.exchange_header({"op": "double"}, {"ids": np.arange(3)})
    assert header == {"done": True}
    assert vectors["ids"].tolist() == [0, 2, 4]


def test_actions_of_the_board_and_the_store(created):
    assert created.call("board.join", worker="worker:0", session="a")["starts"]
    assert created.call("board.alive") == ["worker:0"]
    assert created.call("store.status")["groups"]["weights"]["version"] == 0
    assert created.call("hello")["server"] == 0
    for name in ("board.state", "board.load_state", "board.__init__", "os.system", ""):
        with pytest.raises(ServerRefused, match="there is no action"):
            created.call(name)
    with pytest.raises(ServerRefused, match="are invalid"):
        created.call("board.alive", surplus=1)
    with pytest.raises(ServerRefused, match="no worker 'nobody'") as caught:
        created.call("board.join", worker="nobody", session="a")
    assert caught.value.kind == "RequestError"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0.0.0.0:2222", "on every network"),
        ("[::]:2222", "on every network"),
        ("nowhere.invalid:2222", "cannot listen"),
        ("127.0.0.1", "has no port"),
    ],
)
def test_unusable_addresses_are_refused(address, why):
    with pytest.raises(ValueError, match=why):
        Service(address, VariableStore(0), None, CREDENTIALS)


def test_only_the_given_address_is_bound(service):
    port = int(service.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.2", port)):
        pass


def test_a_port_that_is_taken_is_named(service):
    other = Service(service.address, VariableStore(0), None, CREDENTIALS)
    with pytest.raises(ClusterError, match=f"cannot listen at {service.address}"):
        other.serve_in_thread()
    other.close()


def test_closing_lets_an_answer_finish(service, connection, doubles):
    answers = []
    message = {"op": "double", "wait": True}
    thread = threading.Thread(
        target=lambda: answers.append(
            connection.exchange_header(message, {"ids": np.arange(2)})
        )
    )
    thread.start()
    assert doubles.began.wait(20)
    threading.Timer(0.3, doubles.go_on.set).start()
    service.close(deadline=20)
    thread.join(20)
    assert answers[0][1]["ids"].tolist() == [0, 2]


def test_closing_does_not_wait_for_idle_streams(service, created):
    began = time.monotonic()
    service.close(deadline=20)
    assert time.monotonic() - began < 10
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", int(service.address[-5:]))) != 0


def test_twenty_services_leave_no_thread_descriptor_or_port():
    def one():
        address = free_address()
        service = Service(address, VariableStore(0), None, CREDENTIALS)
        service.serve_in_thread()
        with Connection(address, CREDENTIALS) as connection:
            connection.exchange_header(
                {"op": "create", "group": GROUP.to_json()}, values(1)
            )
            service.close()
        host, _, port = address.rpartition(":")
        socket.create_server((host, int(port))).close()

    one()
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        one()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # gRPC's own threads end a little later.
        descriptors_left = len(os.listdir("/proc/self/fd")) - descriptors
        threads_left = len(os.listdir("/proc/self/task")) - threads
        if descriptors_left <= 4 and threads_left <= 4:
            break
        time.sleep(0.1)
    assert descriptors_left <= 4
    assert threads_left <= 4
