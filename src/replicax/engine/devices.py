"""Finds devices by strings such as `"gpu:0"`, lists them, and divides the CPU."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from replicax._private.jax import has_devices
from replicax._util.gpus import visible_gpus
from replicax._util.stand_ins import is_described, stand_in_devices
from replicax._util.waiting import Announced
from replicax.cluster.tpu_slice import skip_libtpu_without_chips
from replicax.cpu.memory import share_one_heap
from replicax.cpu.settings import cpu_pool_size, is_on, keep_loops
from replicax.errors import DeviceError

Device = Any  # Type checkers see a variable in jax.Device.

__all__ = [
    "Device",
    "LogicalDevice",
    "PhysicalDevice",
    "before_start",
    "check_cpu_pool",
    "default_devices",
    "device_name",
    "devices_of_one_kind",
    "list_logical_devices",
    "list_physical_devices",
    "resolve_devices",
    "set_logical_devices",
]

_PATTERN = re.compile(
    r"^(?:/job:(?P<job>\w+))?(?:/replica:\d+)?(?:/task:(?P<task>\d+))?/?(?:device:)?"
    r"(?P<platform>[a-zA-Z]+):(?P<index>\d+)$"
)


def set_logical_devices(n: int) -> None:
    """Make this machine's CPU appear as `n` devices, to develop without accelerators.

    Call it first, before anything uses a JAX device. XLA's CPU collectives block one
    thread per device, and hang if the thread pool is too small. This function also sets
    the size of the pool (environment variable `NPROC`), so use no other way to set the
    number of devices. (TF: `tf.config.set_logical_device_configuration`.)

    Args:
        n: Number of CPU devices, at least 1.

    Raises:
        ValueError: If `n` is not a positive integer.
        RuntimeError: If JAX has already started its devices.

    Example:
        >>> import replicax as rx
        >>> rx.set_logical_devices(8)  # doctest: +SKIP
        >>> rx.MirroredStrategy().num_replicas_in_sync  # doctest: +SKIP
        8
    """
    if type(n) is not int or n < 1:
        raise ValueError(
            f"set_logical_devices: n must be a positive integer; got n={n!r}."
        )
    if stand_in_devices() is not None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError as error:
        raise RuntimeError(
            f"set_logical_devices: JAX has already started its devices, so n={n} has "
            "no effect. Call rx.set_logical_devices at the top of the script, before "
            "creating any array, model or strategy."
        ) from error
    os.environ["NPROC"] = str(cpu_pool_size(n))
    keep_loops(os.environ)
    before_start()


def before_start() -> None:
    """Apply the settings that have an effect only before JAX starts its devices.

    Strategies call this before they first use devices, or join a cluster.
    """
    if has_devices():
        return
    skip_libtpu_without_chips(os.environ)
    platforms = jax.config.values.get("jax_platforms") or "cpu"
    has_gpus = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
    if platforms.startswith("cpu") and not has_gpus:
        share_one_heap()


def check_cpu_pool(devices: Sequence[Device]) -> None:
    """Raise if the CPU devices' thread pool is so small that collectives can hang."""
    process = jax.process_index()
    num_cpu = sum(d.platform == "cpu" and d.process_index == process for d in devices)
    if num_cpu:
        is_on()  # Raises for an unknown value now, not only in the first step.
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if num_cpu > 1 and threads < 2 * num_cpu:
        raise DeviceError(
            f"{num_cpu} CPU devices share a pool of {threads} threads, in which XLA's "
            f"collectives can hang; at least {2 * num_cpu} are needed. Create the "
            f"devices with rx.set_logical_devices({num_cpu}), not with JAX's options."
        )


def default_devices() -> list[Device]:
    """Return all visible accelerators of this process, or else its CPU devices."""
    stand_ins = stand_in_devices()
    if stand_ins is not None:
        return list(stand_ins)
    before_start()
    with Announced("starting JAX's devices"):
        return jax.local_devices()


def devices_of_one_kind(
    devices: Sequence[str | Device] | None, caller: str, argument: str = "devices"
) -> list[Device]:
    """Find devices by their strings (None: all visible devices), of one platform.

    A DeviceError for several platforms names the public `caller` and its `argument`.
    """
    if devices is None:
        return default_devices()
    resolved = resolve_devices(devices, caller)
    if len({d.platform for d in resolved}) > 1:
        raise DeviceError(
            f"{caller}: {argument}={list(devices)!r} mixes platforms; replicas in step "
            "need devices of one kind."
        )
    return resolved


def resolve_devices(devices: Sequence[str | Device], caller: str) -> list[Device]:
    """Find devices by strings such as `"gpu:0"` or `"/gpu:0"`.

    TF's long form `"/job:localhost/replica:0/task:0/device:GPU:0"` and JAX devices are
    accepted, too. A DeviceError names `caller`.
    """
    if isinstance(devices, str) or not hasattr(devices, "__iter__"):
        raise DeviceError(
            f"{caller}: devices must be a list of device strings; got {devices!r}. "
            "Name each device, as in devices=['gpu:0', 'gpu:1'], or omit devices to "
            "use all accelerators."
        )
    stand_ins = stand_in_devices()
    if stand_ins is not None:
        return list(stand_ins)
    before_start()
    resolved = [_resolve(d, caller) for d in devices]
    if not resolved:
        raise DeviceError(
            f"{caller}: devices is empty. Name at least one of {_visible()}, or omit "
            "devices to use all accelerators."
        )
    repeated = sorted({device_name(d) for d in resolved if resolved.count(d) > 1})
    if repeated:
        raise DeviceError(
            f"{caller}: {', '.join(repeated)} appears more than once in "
            f"devices={list(devices)!r}; a device holds one replica. Name each device "
            "once."
        )
    return resolved


def _resolve(device: str | Device, caller: str) -> Device:
    if isinstance(device, jax.Device):
        return device
    match = _PATTERN.match(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(
            f"{caller}: {device!r} is no device string. Examples are 'gpu:0' and "
            f"'/gpu:0'. Visible here: {_visible()}."
        )
    platform, index = match["platform"].lower(), int(match["index"])
    candidates = _local_devices(platform)
    if index >= len(candidates):
        hint = (
            f" For more CPU devices call rx.set_logical_devices({index + 1}) at the "
            "top of the script."
        )
        raise DeviceError(
            f"{caller}: device {device!r} is not there. Visible here: {_visible()}."
            + (hint if platform == "cpu" else "")
        )
    return candidates[index]


def device_name(device: Device) -> str:
    """A device's string, such as `"gpu:0"`."""
    if is_described(device):
        return f"{device.platform}:{device.id}"
    devices = jax.devices(device.platform)
    local = [d for d in devices if d.process_index == device.process_index]
    return f"{_short_platform(device.platform)}:{local.index(device)}"


def _short_platform(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def _visible() -> str:
    devices = list(jax.local_devices())
    if all(d.platform != "cpu" for d in devices):
        devices += jax.local_devices(backend="cpu")
    return ", ".join(device_name(d) for d in devices)


# Lists of devices, as `tf.config` returns them.


class PhysicalDevice(NamedTuple):
    """A device of this machine.

    (TF: `tf.config.PhysicalDevice`.)

    Attributes:
        name: Such as `"gpu:0"`; strategies accept it as a device.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.

    Example:
        >>> import replicax as rx
        >>> rx.config.list_physical_devices()[0].name
        'cpu:0'
    """

    name: str
    device_type: str


class LogicalDevice(PhysicalDevice):
    """A JAX device; a CPU may be divided into several.

    (TF: `tf.config.LogicalDevice`.)

    Example:
        >>> import replicax as rx
        >>> device, *others = rx.config.list_logical_devices("CPU")
        >>> device
        LogicalDevice(name='cpu:0', device_type='CPU')
        >>> rx.MirroredStrategy(devices=[device.name])
        MirroredStrategy(cpu:0)
    """


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """List the CPU, as one device, and the accelerators; JAX's devices do not start.

    So a process can still join a cluster or divide the CPU afterwards. Before JAX's
    devices are started, NVIDIA GPUs and TPU chips are the only accelerators listed.
    (TF: `tf.config.list_physical_devices`.)

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None: all.

    Example:
        >>> import replicax as rx
        >>> rx.config.list_physical_devices("CPU")
        [PhysicalDevice(name='cpu:0', device_type='CPU')]
    """
    if has_devices():
        accelerators = [d for d in list_logical_devices() if d.device_type != "CPU"]
        devices = [("cpu:0", "CPU"), *accelerators]
    else:
        counts = {
            "cpu": 1,
            "gpu": len(visible_gpus(os.environ)) if _is_allowed("gpu", "cuda") else 0,
            "tpu": len(list(Path("/dev").glob("accel*"))) if _is_allowed("tpu") else 0,
        }
        devices = [(f"{x}:{i}", x.upper()) for x, n in counts.items() for i in range(n)]
    return [PhysicalDevice(*d) for d in devices if device_type in (None, d[1])]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Start JAX's devices, and list those of this process.

    Afterwards the process can no longer divide the CPU or join a cluster. (TF:
    `tf.config.list_logical_devices`.)

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None: all.

    Example:
        >>> import replicax as rx
        >>> rx.config.list_logical_devices("CPU")[0].name
        'cpu:0'
    """
    default_devices()
    devices = [
        LogicalDevice(f"{platform}:{i}", platform.upper())
        for platform in ("cpu", "gpu", "tpu")
        for i in range(len(_local_devices(platform)))
    ]
    return [d for d in devices if device_type in (None, d.device_type)]


def _local_devices(platform: str) -> list[Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX has no such platform here.
        return []


def _is_allowed(*platforms: str) -> bool:
    """Whether `jax_platforms` allows a platform, under one of its names."""
    allowed = jax.config.values.get("jax_platforms")
    return not allowed or not set(platforms).isdisjoint(allowed.split(","))
