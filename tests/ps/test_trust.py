"""What strangers can do to a server: be refused, and be named in its log."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from replicax.ps import wire
from replicax.ps.connection import Connection, ConnectionLost, ServerRefused
from replicax.ps.credentials import Credentials, new_token
from replicax.ps.message_stream import MessageStream
from replicax.ps.partition import VariableInfo, place

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

SIZE = 1_000_000
GROUP = place(
    "weights",
    {"kind": "add"},
    [VariableInfo(path="kernel", shape=(SIZE,), dtype="float32")],
    1,
)
SERVER = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s")
from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.credentials import Credentials
from replicax.ps.service import Service
from replicax.ps.store import VariableStore
board = Board(["worker:0"], Timeouts(startup=60, heartbeat=60, chief=60))
credentials = Credentials.from_environment()
store = VariableStore(0)
service = Service(sys.argv[1], store, board, credentials)
service.serve_in_thread()
print("ready", flush=True)
sys.stdin.read()
service.close()
print("closed", flush=True)
"""


class Server:
    """A server in a process of its own, and an honest worker of it."""

    def __init__(self, folder, environment, credentials, host="127.0.0.1"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.credentials = credentials
        self.log_file = (folder / "log").open("w")
        self.log_path = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, self.address],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log_file,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n", self.log_path.read_text()
        self.connection = self.connect()
        self.pushed = 0
        vectors = {"float32": np.zeros(SIZE, np.float32)}
        self.connection.exchange_header(
            {"op": "create", "group": GROUP.to_json()}, vectors
        )

    def connect(self, credentials=None, **settings):
        defaults = {"retry_timeout_seconds": 5, "reply_timeout_seconds": 10}
        credentials = credentials or self.credentials
        return Connection(self.address, credentials, **defaults | settings)

    def push(self, number):
        message = {
            "op": "push",
            "group": "weights",
            "worker": "worker:0",
            "session": "a",
            "sequence": number,
            "based_on": 0,
        }
        return self.connection.exchange_header(
            message, {"float32": np.ones(SIZE, "float32")}
        )

    def still_trains(self):
        """An honest worker's push and pull work, on the stream it had all along."""
        self.pushed += 1
        header, vectors = self.push(self.pushed)
        assert header["version"] == self.pushed
        assert vectors["float32"].min() == vectors["float32"].max() == self.pushed

    def resident_megabytes(self):
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def log_has(self, *patterns, seconds=5.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            text = self.log_path.read_text()
            if all(re.search(pattern, text) for pattern in patterns):
                return True
            time.sleep(0.05)
        raise AssertionError(f"{patterns} are not in the log:\n{text}")

    def close(self):
        self.connection.close()
        try:
            out, _ = self.process.communicate("", timeout=30)
        finally:
            self.process.kill()
            self.log_file.close()
        assert out == "closed\n", self.log_path.read_text()
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def module_server(tmp_path_factory):
    token = new_token()
    server = Server(
        tmp_path_factory.mktemp("ps"),
        {"REPLICAX_PS_TOKEN": token},
        Credentials(token=token),
    )
    yield server
    server.close()


@pytest.fixture
def server(module_server):
    module_server.still_trains()
    yield module_server
    module_server.still_trains()
    assert module_server.process.poll() is None


def plain(server):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    return sock, sock.getsockname()[1]


@pytest.mark.parametrize("how", ["exchange", "call"])
def test_a_wrong_token_is_refused_at_once(server, how):
    began = time.monotonic()
    with server.connect(Credentials(token=new_token())) as stranger:
        calls = {
            "exchange": lambda: stranger.exchange_header(
                {"op": "pull", "group": "weights"}
            ),
            "call": lambda: stranger.call("board.alive"),
        }
        with pytest.raises(ServerRefused, match="has the wrong token") as caught:
            calls[how]()
        assert caught.value.kind == "Unauthenticated"
    assert time.monotonic() - began < 10
    server.log_has(r"Refused a call of \w+ at .*: it has the wrong token")
    assert server.connection.call("board.alive") == []


def test_calls_without_a_token_are_refused(server):
    flight = wire.flight()
    descriptor = flight.FlightDescriptor.for_path("x")
    with flight.FlightClient(f"grpc+tcp://{server.address}") as client:
        calls = [
            lambda: list(client.do_action(("store.status", b"{}"))),
            lambda: list(client.list_flights()),
            lambda: client.list_actions(),
            lambda: client.do_exchange(descriptor)[1].read_chunk(),
            lambda: client.do_get(flight.Ticket(b"x")).read_all(),
            lambda: client.get_flight_info(descriptor),
        ]
        for call in calls:
            with pytest.raises(flight.FlightUnauthenticatedError, match="no token"):
                call()
        for header in (b"Bearer ", b"Bearer \xff\xfe", b"Basic abc", b"\x00"):
            options = flight.FlightCallOptions(headers=[(b"authorization", header)])
            with pytest.raises((flight.FlightError, pa.ArrowException), match=r"."):
                list(client.do_action(("store.status", b"{}"), options))
    server.log_has(r"Refused a call of \w+ at .*: it has no token")


def test_a_claimed_frame_of_two_gigabytes_takes_no_memory(server):
    before = server.resident_megabytes()
    with server.connect() as worker:
        header = {"op": "push", "group": "weights", "worker": "w", "session": "s"}
        header |= {"sequence": 1, "based_on": 0}
        claim = {**header, "vectors": [["float32", "float32", 1 << 29]]}
        stream = worker._connected().do_exchange(
            wire.flight().FlightDescriptor.for_path("x"), worker._options(10)
        )
        writer, reader = stream
        MessageStream(reader, writer)
        writer.write_metadata(json.dumps(claim).encode())
        with pytest.raises(wire.flight().FlightServerError, match="536870912 elements"):
            reader.read_chunk()
        with pytest.raises(wire.flight().FlightServerError, match="536870912"):
            writer.close()
    assert server.resident_megabytes() - before < 50
    server.log_has(
        r"Refused a message from ipv4:127\.0\.0\.1:\d+: .*536870912 elements"
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Paths of a self-made certificate for localhost and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    return self_made(tmp_path_factory.mktemp("tls"))


def self_made(folder):
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        [*command.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    key.chmod(0o600)
    return certificate, key


def test_tls(tmp_path, certificates):
    certificate, key = certificates
    token = new_token()
    root = certificate.read_bytes()
    credentials = Credentials(token=token, tls_root=root)
    environment = {
        "REPLICAX_PS_TOKEN": token,
        "REPLICAX_PS_TLS_CERT": str(certificate),
        "REPLICAX_PS_TLS_KEY": str(key),
    }
    server = Server(tmp_path, environment, credentials, host="localhost")
    try:
        server.still_trains()
        for wrong in (
            Credentials(token=token),
            Credentials(token=token, tls_root=self_made(tmp_path)[0].read_bytes()),
        ):
            with (
                server.connect(
                    wrong, retry_timeout_seconds=0.5, connect_timeout_seconds=2
                ) as stranger,
                pytest.raises(ConnectionLost, match="gave no answer"),
            ):
                stranger.call("hello")
        sock, _ = plain(server)
        sock.sendall(b"\x16\x03\x01" + os.urandom(200))
        sock.close()
        server.still_trains()
    finally:
        server.close()
