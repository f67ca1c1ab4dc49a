"""A worker's side: lost servers, silent ones, and servers that come back."""

import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from tests.ps.addresses import free_address

from replicax.errors import ClusterError
from replicax.ps import wire
from replicax.ps.connection import Connection, ConnectionLost, ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.service import Service
from replicax.ps.store import VariableStore

pytest.importorskip("pyarrow")

CREDENTIALS = Credentials(token=new_token())


class Adds:
    """An operation that adds to a number, and can be slow or drop the connection."""

    def __init__(self):
        self.total = 0
        self.calls = 0
        self.before = lambda: None

    def message(self):
        owner = self

        class Number(msgspec.Struct):
            def expected(self, store):
                return {"x": wire.Allowed(("float32",), 1, 1 << 24)}

            def handle(self, store, vectors):
                owner.calls += 1
                owner.total += float(vectors["x"][0])
                owner.before()
                return {"total": owner.total}, {}

        return Number


def serve(address, adds, incarnation="first"):
    store = VariableStore(0)
    store.incarnation = incarnation
    messages = {"add": adds.message()}
    service = Service(address, store, None, CREDENTIALS, messages=messages)
    service.serve_in_thread()
    return service


@pytest.fixture
def adds():
    return Adds()


@pytest.fixture
def service(adds):
    service = serve(free_address(), adds)
    yield service
    service.close()


def connect(address, **more):
    settings = {
        "task": "ps:0",
        "connect_timeout_seconds": 1,
        "reply_timeout_seconds": 5,
        "retry_timeout_seconds": 5,
    }
    return Connection(address, CREDENTIALS, **settings | more)


ONE = {"x": np.ones(1, np.float32)}


def test_an_unreachable_server_is_named_after_the_deadline():
    address = free_address()
    with connect(address, retry_timeout_seconds=1) as connection:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=f"ps:0 at {address}.*'add'") as caught:
            connection.exchange_header({"op": "add"}, ONE)
        assert 1 <= time.monotonic() - began < 20
        assert caught.value.culprit == "ps:0"
        assert isinstance(caught.value, ClusterError)
        with pytest.raises(ConnectionLost, match=r"'hello' for 1 s"):
            connection.call("hello")


def test_a_connection_survives_restarts_of_the_server(adds):
    address = free_address()
    services = [serve(address, adds)]

    def start(incarnation):
        services.append(serve(address, adds, incarnation=incarnation))

    with connect(address) as connection:
        connection.exchange_header({"op": "add"}, ONE)
        assert connection.incarnation == "first"
        services[0].close()
        timer = threading.Timer(0.5, start, ["second"])
        timer.start()
        assert connection.exchange_header({"op": "add"}, ONE)[0] == {"total": 2.0}
        timer.join()
        assert connection.incarnation == "second"
        services[1].close()
        start("third")
        assert connection.call("hello")["server"] == 0
        assert connection.incarnation == "third"
        services[2].close()


def test_a_server_that_never_answers_is_lost(service, adds):
    go_on = threading.Event()
    adds.before = lambda: go_on.wait(20)
    with connect(
        service.address, reply_timeout_seconds=0.3, retry_timeout_seconds=0.5
    ) as connection:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"nothing came for 0\.3 s"):
            connection.exchange_header({"op": "add"}, ONE)
        assert time.monotonic() - began < 5
        go_on.set()
        adds.before = lambda: None
        assert connection.exchange_header({"op": "add"}, ONE)[0]["total"] >= 2


def test_the_deadline_of_one_message_may_be_longer(service, adds):
    adds.before = lambda: time.sleep(0.6)
    with connect(service.address, reply_timeout_seconds=0.3) as connection:
        connection.exchange_header({"op": "add"}, ONE, reply_timeout_seconds=5)
    assert adds.calls == 1


def test_a_refusal_is_not_retried(service, adds):
    with connect(service.address) as connection:
        began = time.monotonic()
        with pytest.raises(ServerRefused, match="elements") as caught:
            connection.exchange_header({"op": "add"}, {"x": np.ones(0, np.float32)})
        assert caught.value.kind == "WireError"
        assert time.monotonic() - began < 5
        connection.exchange_header({"op": "add"}, ONE)
    assert adds.calls == 1


def test_a_large_message_is_refused_before_it_was_sent(service):
    with connect(service.address) as connection:
        large = {"x": np.zeros(1 << 26, np.float32)}
        with pytest.raises(ServerRefused, match="67108864 elements; expected 1 to"):
            connection.exchange_header({"op": "add"}, large)


def test_many_threads_share_a_connection(service, adds):
    with connect(service.address) as connection:
        threads = [
            threading.Thread(
                target=lambda: [
                    (
                        connection.exchange_header({"op": "add"}, ONE),
                        connection.call("hello"),
                    )
                    for _ in range(20)
                ]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert connection.exchange_header({"op": "add"}, ONE)[0] == {"total": 81.0}


def test_closing_fails_an_exchange_in_another_thread(service, adds):
    go_on = threading.Event()
    adds.before = lambda: go_on.wait(20)
    connection = connect(service.address, reply_timeout_seconds=60)
    errors = []

    def wait():
        try:
            connection.exchange_header({"op": "add"}, ONE)
        except ConnectionLost as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not adds.calls:
        time.sleep(0.01)
    connection.close()
    thread.join(10)
    go_on.set()
    assert "had closed the connection" in errors[0]


def test_an_ipv6_address():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            address = f"[::1]:{free.getsockname()[1]}"
    except OSError:
        pytest.skip("no IPv6 on this machine")
    service = serve(address, Adds())
    try:
        with connect(address) as connection:
            assert connection.exchange_header({"op": "add"}, ONE)[0] == {"total": 1.0}
    finally:
        service.close()


def test_an_invalid_address_is_refused():
    with pytest.raises(ValueError, match="'ps0' is not a server's address: it has no"):
        connect("ps0")


@pytest.mark.parametrize("shares_memory", [True, False])
def test_vectors_arrive_with_shared_memory_and_without(service, adds, shares_memory):
    """As on one machine, and as between two."""
    with Connection(service.address, CREDENTIALS) as connection:
        connection.shares_memory = shares_memory
        for x in (1.0, 2.0, 3.0):
            vector = np.full(1 << 24, x, np.float32)  # More than all windows have.
            connection.exchange_header({"op": "add"}, {"x": vector})
    assert adds.total == 6.0
