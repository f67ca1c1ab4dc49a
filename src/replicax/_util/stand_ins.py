"""Stand-in devices: strategies use them, whichever devices a script names.

`replicax plan` compiles a training step for devices that this machine may not have.
`replicax migrate --check` executes a script's first steps on CPU devices.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["is_described", "stand_in_devices", "using_devices"]

_devices: Sequence[Any] | None = None


def stand_in_devices() -> Sequence[Any] | None:
    """Return the devices that strategies use, for any thread; None: JAX's own."""
    return _devices


@contextlib.contextmanager
def using_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Have all strategies that the block creates use these devices.

    They join no cluster: the devices stand for those of all its tasks.
    """
    global _devices
    if _devices is not None:
        raise RuntimeError("rx.plan: another plan is in progress; wait for its end.")
    _devices = devices
    try:
        yield
    finally:
        _devices = None


def is_described(device: Any) -> bool:
    """Whether a JAX device is only a description, which cannot hold arrays."""
    return device.client.runtime_type == "compile_only_runtime"
