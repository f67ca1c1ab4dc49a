"""TPUStrategy and what scripts call before it, on a machine that has no TPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

import replicax as rx
from replicax.cluster.tpu_slice import VARIABLES
from replicax.cluster.tpu_system import topology_of
from replicax.launch.local_tasks import free_ports

DEADLINE_S = 100.0

SCRIPT = """
import sys
import replicax as rx
from jax._src import xla_bridge

tpu_address = sys.argv[1] if len(sys.argv) > 1 else ""
resolver = rx.cluster_resolver.TPUClusterResolver(tpu=tpu_address)
rx.config.experimental_connect_to_cluster(resolver)
print("devices started:", xla_bridge.backends_are_initialized())
rx.tpu.experimental.initialize_tpu_system(resolver)
strategy = rx.TPUStrategy(resolver)
"""

JOIN = """
import jax
import replicax as rx

resolver = rx.cluster_resolver.TPUClusterResolver()
rx.config.experimental_connect_to_cluster(resolver)
rx.config.experimental_connect_to_cluster(resolver)  # Again: nothing.
print("joined:", jax.process_index(), jax.process_count())
try:
    rx.TPUStrategy(resolver, timeouts=rx.Timeouts(step=99))
except rx.DeviceError as error:
    print(error)
"""


def environment(**more: str) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return {**base, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", **more}


def start(code: str, *args: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def test_the_error_names_the_missing_parts() -> None:
    status, out, err = result_of(start(SCRIPT, env=environment()))
    assert status == 1
    assert out == "devices started: False\n"
    error = err.strip().splitlines()[-1]
    assert error.startswith("replicax.errors.DeviceError: initialize_tpu_system: there")
    assert "there is no TPU here; JAX has 1 cpu device." in error
    assert "libtpu (" in error
    assert "JAX_PLATFORMS='cpu'; " in error
    assert f"{', '.join(VARIABLES)} (not set)" in error
    assert "rx.set_logical_devices(8) and rx.MirroredStrategy()" in error
    assert "replicax plan --topology v5e:2x4 train.py" in error


@pytest.mark.slow
def test_an_address_is_refused() -> None:
    process = start(SCRIPT, "grpc://10.0.0.2:8470", env=environment())
    status, out, err = result_of(process)
    assert (status, out) == (1, "")
    error = err.strip().splitlines()[-1]
    assert "ClusterConfigError: TPUClusterResolver: tpu='grpc://10.0.0.2" in error
    assert "JAX runs on the TPU VM itself" in error


def test_jax_platforms_names_a_tpu() -> None:
    process = start(SCRIPT, env=environment(JAX_PLATFORMS="tpu"))
    status, out, err = result_of(process)
    assert (status, out) == (1, "devices started: False\n")
    error = err.strip().splitlines()[-1]
    assert "initialize_tpu_system: JAX could not start its devices: " in error
    assert "JAX_PLATFORMS='tpu'; " in error


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_hosts_of_a_slice_join() -> None:
    """CPU devices stand for chips; a variable makes JAX believe it is on a TPU VM."""
    port = free_ports(1)[0]
    env = environment(
        JAX_FORCE_TPU_INIT="1",
        TPU_WORKER_HOSTNAMES="localhost,localhost",
        JAX_COORDINATOR_PORT=str(port),
    )
    hosts = [start(JOIN, env={**env, "TPU_WORKER_ID": str(i)}) for i in range(2)]
    for i, (status, out, err) in enumerate(map(result_of, hosts)):
        assert status == 0, err
        assert f"joined: {i} 2" in out
        assert "TPUStrategy: there is no TPU here; JAX has 2 cpu devices." in out


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "make", [rx.TPUStrategy, rx.experimental.TPUStrategy, lambda: rx.TPUStrategy(None)]
)
def test_other_devices_are_refused(make) -> None:
    with pytest.raises(rx.DeviceError, match=r"TPUStrategy: .* JAX has 8 cpu devices"):
        make()


def test_tf_config_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "malformed")
    with pytest.raises(rx.DeviceError, match="no TPU here"):
        rx.TPUStrategy()


def test_a_slice_without_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a slice on a machine outside it: no call waits."""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    resolver = rx.cluster_resolver.TPUClusterResolver()
    message = "2 hosts, but this machine is not a TPU VM.*TPU_WORKER_ID='1'"
    for call in (
        rx.config.experimental_connect_to_cluster,
        rx.tpu.experimental.initialize_tpu_system,
        rx.TPUStrategy,
    ):
        with pytest.raises(rx.DeviceError, match=message):
            call(resolver)


def test_other_resolvers() -> None:
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    connect = rx.config.experimental_connect_to_cluster
    with pytest.raises(rx.ClusterConfigError, match="connect by themselves"):
        connect(resolver)
    with pytest.raises(rx.ClusterConfigError, match="got ClusterSpec"):
        connect(rx.ClusterSpec({"worker": ["a:1"]}))
    with pytest.raises(rx.ClusterConfigError, match=r"must be an .*TPUClusterResolver"):
        rx.tpu.experimental.initialize_tpu_system(resolver)  # type: ignore[arg-type]
    with pytest.raises(rx.ClusterConfigError, match="MultiWorkerMirroredStrategy"):
        rx.TPUStrategy(resolver)  # type: ignore[arg-type]


def test_shutting_down_does_nothing() -> None:
    rx.tpu.experimental.shutdown_tpu_system()
    rx.tpu.experimental.shutdown_tpu_system(
        rx.cluster_resolver.TPUClusterResolver(tpu="")
    )


def test_without_a_tpu_scripts_can_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if "TPU_" in n or n in VARIABLES]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="there is no TPU on this machine"):
        rx.cluster_resolver.TPUClusterResolver()


def test_topology_of_two_slices_with_two_devices_to_a_chip() -> None:
    devices = [
        SimpleNamespace(
            device_kind="TPU v3",
            coords=(x, y, 0),
            core_on_chip=core,
            process_index=slice_index,
            slice_index=slice_index,
        )
        for slice_index in range(2)
        for y in range(2)
        for x in range(2)
        for core in range(2)
    ]
    assert topology_of(devices) == rx.tpu.experimental.Topology(
        device_kind="TPU v3",
        num_chips=8,
        num_devices=16,
        num_hosts=2,
        num_slices=2,
        mesh_shape=(2, 2, 1, 2),
    )
    topology = topology_of(devices)
    assert topology.num_chips_per_host == 4
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 8)
