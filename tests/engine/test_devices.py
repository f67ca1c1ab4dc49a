"""Device strings, logical devices and the thread pool they need."""

import os
import subprocess
import sys

import jax
import pytest

import replicax as rx
from replicax.engine.devices import device_name, resolve_devices


@pytest.mark.parametrize(
    "name",
    [
        "cpu:3",
        "/cpu:3",
        "CPU:3",
        "/CPU:3",
        "device:CPU:3",
        "/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:3",
        "/job:worker/task:0/device:CPU:3",
        "/replica:0/task:0/cpu:3",
    ],
)
def test_device_strings(name) -> None:
    assert resolve_devices([name], "test") == [jax.devices()[3]]


def test_jax_devices_are_accepted() -> None:
    resolved = resolve_devices([jax.devices()[2], "cpu:0"], "test")
    assert [device_name(d) for d in resolved] == ["cpu:2", "cpu:0"]


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "cpu:", "cpu:-1", "cpu:x", "3", "cpu:1 ", "cpu/1", "a:b:1", 3, None],
)
def test_no_device_string(name) -> None:
    with pytest.raises(
        rx.DeviceError, match=r"test: .* is no device string.*'gpu:0'.*cpu:0, .*cpu:7"
    ):
        resolve_devices([name], "test")


def test_absent_devices() -> None:
    with pytest.raises(
        rx.DeviceError,
        match=r"'/cpu:8' is not there.*cpu:7\..*set_logical_devices\(9\)",
    ):
        resolve_devices(["/cpu:8"], "test")
    for name in ("gpu:0", "tpu:0", "npu:1"):
        if name.startswith(jax.default_backend()):
            continue
        with pytest.raises(
            rx.DeviceError, match=rf"'{name}' is not there.*cpu:0"
        ) as error:
            resolve_devices([name], "test")
        assert "set_logical_devices" not in str(error.value)


def test_invalid_lists_of_devices() -> None:
    with pytest.raises(rx.DeviceError, match=r"test: devices is empty.*cpu:0"):
        resolve_devices([], "test")
    with pytest.raises(rx.DeviceError, match=r"cpu:1 appears more than once.*'/cpu:1'"):
        resolve_devices(["cpu:0", "cpu:1", "/cpu:1"], "test")
    with pytest.raises(rx.DeviceError, match=r"must be a list .*; got 'cpu:0'. Name"):
        resolve_devices("cpu:0", "test")


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", None, True])
def test_set_logical_devices_refuses_bad_counts(n) -> None:
    with pytest.raises(ValueError, match=rf"set_logical_devices: .*got n={n!r}"):
        rx.set_logical_devices(n)


def test_set_logical_devices_comes_too_late() -> None:
    assert len(jax.devices()) == 8
    before = os.environ["NPROC"]
    with pytest.raises(
        RuntimeError, match=r"already started its devices, so n=2 .*top of"
    ):
        rx.set_logical_devices(2)
    assert os.environ["NPROC"] == before


def python(code: str, **environment: str) -> str:
    """The output of a new interpreter."""
    environ = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logical_devices_get_a_pool_that_does_not_hang() -> None:
    code = """
import os
import replicax as rx
rx.set_logical_devices(4)
print(rx.MirroredStrategy().num_replicas_in_sync, int(os.environ["NPROC"]) >= 8)
"""
    assert python(code).split() == ["4", "True"]


def test_physical_devices_are_listed_before_the_cpu_is_divided() -> None:
    code = """
import replicax as rx
from jax._src import xla_bridge
print([d.name for d in rx.config.list_physical_devices()][0])
print(xla_bridge.backends_are_initialized())
rx.set_logical_devices(2)
print(*[d.name for d in rx.config.list_logical_devices("CPU")])
"""
    assert python(code).split() == ["cpu:0", "False", "cpu:0", "cpu:1"]


@pytest.mark.slow
def test_devices_made_by_hand_over_a_small_pool_are_refused() -> None:
    code = """
import replicax as rx
try:
    rx.MirroredStrategy()
except rx.DeviceError as error:
    print(error)
print(rx.OneDeviceStrategy("cpu:3").num_replicas_in_sync)
print(rx.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync)
"""
    flags = "--xla_force_host_platform_device_count=4"
    out = python(code, XLA_FLAGS=flags, NPROC="6")
    assert "4 CPU devices share a pool of 6 threads" in out
    assert "at least 8 are needed" in out
    assert "rx.set_logical_devices(4)" in out
    assert out.split()[-2:] == ["1", "2"]
    assert "share a pool" not in python(code, XLA_FLAGS=flags, NPROC="8")
