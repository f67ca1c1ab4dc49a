"""Which TPU slice a machine is in, from its environment and its metadata server."""

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax.cluster.tpu_slice import (
    VARIABLES,
    TpuSlice,
    detect_slice,
)
from replicax.errors import ClusterConfigError

Resolver = rx.cluster_resolver.TPUClusterResolver


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TPU variable is set, and nobody asks Google Cloud's server."""
    for name in (*VARIABLES, "JAX_COORDINATOR_PORT", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_IP", "localhost:1")


def set_all(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def gke(num_hosts: int, worker: int) -> dict[str, str]:
    hosts = ",".join(f"job-0-{i}.service" for i in range(num_hosts))
    return {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": str(worker)}


@pytest.mark.parametrize("tpu", ["", "local"])
def test_alone(tpu: str) -> None:
    resolver = Resolver(tpu, zone="us-east1-d", project="p")
    assert resolver.cluster_spec() == rx.ClusterSpec({})
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == ""
    assert resolver.num_hosts == resolver.num_slices == 1
    assert resolver.num_accelerators() == {}  # There are CPU devices here.


@pytest.mark.parametrize("worker", range(4))
def test_a_slice_of_several_hosts(worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **gke(4, worker))
    resolver = Resolver()
    hosts = [f"job-0-{i}.service:8482" for i in range(4)]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert resolver.task_id == worker
    assert resolver.master() == f"grpc://{hosts[worker]}"
    assert resolver.master("worker", 2) == f"grpc://{hosts[2]}"
    assert resolver.num_hosts == 4


@given(num_hosts=st.integers(2, 40), data=st.data())
def test_hosts_agree_on_the_slice(num_hosts: int, data: st.DataObject) -> None:
    workers = data.draw(st.lists(st.integers(0, num_hosts - 1), min_size=2))
    found = [detect_slice(gke(num_hosts, i), is_tpu_vm=True) for i in workers]
    assert len({s.addresses for s in found}) == 1
    assert [s.index for s in found] == workers
    assert {s.num_hosts for s in found} == {num_hosts}


@pytest.mark.parametrize(
    ("variables", "addresses"),
    [
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ()),
        ({"TPU_WORKER_HOSTNAMES": ""}, ()),
        ({"TPU_WORKER_HOSTNAMES": "a, b"}, ("a:8482", "b:8482")),
        ({"TPU_WORKER_HOSTNAMES": "x:0:10.0.0.1,y:1:10.0.0.2"},
         ("10.0.0.1:8482", "10.0.0.2:8482")),
        # Several processes of one host; the ports listed are libtpu's own.
        ({"TPU_PROCESS_ADDRESSES": "h:8476,h:8477", "TPU_WORKER_HOSTNAMES": "x,y,z"},
         ("h:8482", "h:8483")),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_COORDINATOR_PORT": "99"},
         ("a:99", "b:99")),
    ],
)  # fmt: skip
def test_forms_of_the_list_of_hosts(
    variables: dict[str, str], addresses: tuple[str, ...]
) -> None:
    found = detect_slice({"TPU_WORKER_ID": "0", **variables}, is_tpu_vm=False)
    assert found == TpuSlice(addresses=addresses)


def test_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **gke(2, 1), MEGASCALE_NUM_SLICES="3", MEGASCALE_SLICE_ID="2")
    resolver = Resolver()
    assert (resolver.num_slices, resolver.num_hosts) == (3, 6)
    assert resolver.cluster_spec().num_tasks("worker") == 2  # Of this slice.
    assert resolver.task_id == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, r"TPU_WORKER_ID .* 0 to 1.*got ''"),
        (gke(2, 2), r"2 hosts .*TPU_WORKER_ID .* 0 to 1.*got '2'"),
        ({**gke(2, 0), "TPU_WORKER_ID": "-1"}, r"TPU_WORKER_ID .*got '-1'"),
        ({"TPU_WORKER_HOSTNAMES": "a,,b", "TPU_WORKER_ID": "0"}, "the entry ''"),
        ({"TPU_WORKER_HOSTNAMES": "a,b:1:c:2"}, "the entry 'b:1:c:2'"),
        ({"MEGASCALE_NUM_SLICES": "0"}, "MEGASCALE_NUM_SLICES .*from 1 .*got '0'"),
        (
            {**gke(2, 0), "JAX_COORDINATOR_PORT": "http"},
            "JAX_COORDINATOR_PORT .*got 'http'",
        ),
    ],
)
def test_malformed_environments(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        detect_slice(variables, is_tpu_vm=False)


@pytest.mark.parametrize(
    ("tpu", "message"),
    [
        ("grpc://10.0.0.2:8470", r"tpu='grpc://10.0.0.2:8470' is not this machine"),
        ("my-tpu", r"tpu='my-tpu' is not this machine\. .*start it there"),
    ],
)
def test_a_remote_tpu_is_refused(tpu: str, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        Resolver(tpu=tpu)


def test_this_machines_own_name_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **gke(2, 1), TPU_NAME="mine")
    assert Resolver("mine").task_id == 1
    with pytest.raises(ClusterConfigError, match="whose TPU is called 'mine'"):
        Resolver("yours")
    with pytest.raises(ClusterConfigError, match=r"job-0-0\.service"):
        Resolver("grpc://job-0-0.service:8470")


# The metadata server.


GCE = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "n:0:10.0.0.5,n:1:10.0.0.6",
    "instance-id": "my-tpu",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-8'\nMEGASCALE_NUM_SLICES: '2'\n"
    "MEGASCALE_SLICE_ID: '1'\nZONE: 'z'\n",
}


class Server(http.server.ThreadingHTTPServer):
    """A metadata server with these attributes."""

    daemon_threads = True

    def __init__(self, attributes: dict[str, str]) -> None:
        self.attributes = attributes
        self.asked: list[str] = []
        super().__init__(("localhost", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(Server, self.server)
        name = self.path.rpartition("/")[2]
        server.asked.append(name)
        if self.headers["Metadata-Flavor"] != "Google":
            self.send_error(403)
        elif name not in server.attributes:
            self.send_error(404)
        else:
            body = server.attributes[name].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(attributes: dict[str, str]) -> Server:
        server = Server(attributes)
        servers.append(server)
        monkeypatch.setenv("GCE_METADATA_IP", f"localhost:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=[0.05]).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_google_cloud_slice(serve: Callable[..., Server]) -> None:
    server = serve(GCE)
    found = detect_slice({}, is_tpu_vm=True)
    assert found == TpuSlice(
        addresses=("10.0.0.5:8482", "10.0.0.6:8482"),
        index=1,
        num_slices=2,
        name="my-tpu",
    )
    assert len(server.asked) == len(set(server.asked)) == len(GCE)


@pytest.mark.parametrize(
    ("variables", "is_tpu_vm"),
    [({}, False), ({"TPU_SKIP_MDS_QUERY": "1"}, True), (gke(2, 0), True)],
)
def test_the_metadata_server_is_not_asked_needlessly(
    variables: dict[str, str], is_tpu_vm: bool, serve: Callable[..., Server]
) -> None:
    server = serve(GCE)
    detect_slice(variables, is_tpu_vm=is_tpu_vm)
    assert server.asked == []


def test_a_machine_of_no_slice(serve: Callable[..., Server]) -> None:
    server = serve({})
    assert detect_slice({}, is_tpu_vm=True) == TpuSlice()
    assert server.asked == ["agent-worker-number"]


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    with socket.create_server(("localhost", 0)) as silent:  # It accepts nothing.
        address = f"localhost:{silent.getsockname()[1]}"
        monkeypatch.setenv("GCE_METADATA_IP", address)
        with pytest.raises(ClusterConfigError, match=r"no answer: .*timed out") as e:
            detect_slice({}, is_tpu_vm=True, timeout_seconds=0.5)
    assert time.monotonic() - begin < 10
    message = str(e.value)
    assert address in message
    assert "'agent-worker-number'" in message
    assert "TPU_SKIP_MDS_QUERY=1" in message
    assert "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID" in message


def test_there_is_no_server() -> None:
    begin = time.monotonic()
    with pytest.raises(
        ClusterConfigError, match=r"localhost:1, asked .*Connection refused"
    ):
        detect_slice({}, is_tpu_vm=True)
    assert time.monotonic() - begin < 10
