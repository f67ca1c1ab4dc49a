"""Lists physical and logical devices, as `tf.config` does."""

import os
from pathlib import Path
from typing import NamedTuple

import jax

from replicax._private.jax import has_devices
from replicax._util.dry_run import current_rehearsal
from replicax.engine.devices import default_devices, device_name

__all__ = [
    "LogicalDevice",
    "PhysicalDevice",
    "list_logical_devices",
    "list_physical_devices",
]


class PhysicalDevice(NamedTuple):
    """A device of this machine.

    Attributes:
        name: Such as `"gpu:0"`.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
    """

    name: str
    device_type: str


class LogicalDevice(NamedTuple):
    """A device as strategies take it; `name` is what `devices=` takes.

    Attributes:
        name: Such as `"cpu:1"`.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
    """

    name: str
    device_type: str


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this machine, without starting JAX's devices.

    Workers can still join a cluster, and the CPU be divided, after this. Before JAX has
    started, NVIDIA GPUs are counted by their driver's files and `CUDA_VISIBLE_DEVICES`,
    TPU chips by their device files; other accelerators are not seen. (TF:
    `tf.config.list_physical_devices`.)

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None: all.

    Returns:
        The CPU, which is one device, and the accelerators.

    Example:
        >>> import replicax as rx
        >>> rx.config.list_physical_devices("CPU")
        [PhysicalDevice(name='cpu:0', device_type='CPU')]
    """
    devices = [PhysicalDevice("cpu:0", "CPU")]
    if current_rehearsal() is not None:
        pass  # A plan's devices need not be here.
    elif has_devices():
        started = [d for d in jax.local_devices() if d.platform != "cpu"]
        devices += [PhysicalDevice(device_name(d), d.platform.upper()) for d in started]
    else:
        for platform, number in (("gpu", _num_gpus()), ("tpu", _num_tpu_chips())):
            devices += [
                PhysicalDevice(f"{platform}:{i}", platform.upper())
                for i in range(number)
                if _is_allowed(platform)
            ]
    return [d for d in devices if device_type in (None, d.device_type)]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that strategies of this process can take; starts JAX's devices.

    After it the CPU can no longer be divided, nor a cluster be joined. (TF:
    `tf.config.list_logical_devices`.)

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None: all.

    Example:
        >>> import replicax as rx
        >>> names = [d.name for d in rx.config.list_logical_devices("CPU")]
        >>> names[0]
        'cpu:0'
    """
    default_devices()
    found = []
    for platform in ("cpu", "gpu", "tpu"):
        try:
            devices = jax.local_devices(backend=platform)
        except RuntimeError:  # JAX's way to say that there are none.
            continue
        kind = platform.upper()
        found += [LogicalDevice(f"{platform}:{i}", kind) for i in range(len(devices))]
    return [d for d in found if device_type in (None, d.device_type)]


def _num_gpus() -> int:
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [name.strip() for name in visible.split(",")]
    return min(there, len([name for name in named if name not in {"", "-1"}]))


def _num_tpu_chips() -> int:
    return len(list(Path("/dev").glob("accel*")))


def _is_allowed(platform: str) -> bool:
    """Whether JAX will start a platform's devices."""
    named = jax.config.values.get("jax_platforms")
    if not named:
        return True
    wanted = {"cuda" if platform == "gpu" else platform, platform}
    return not wanted.isdisjoint(named.split(","))
