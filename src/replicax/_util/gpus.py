"""The NVIDIA GPUs of this machine, counted by the files of their driver."""

import itertools
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CUDA_VISIBLE_DEVICES", "visible_gpus"]

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable: the GPUs that a process sees, by number or UUID."""

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """List the GPUs that a process with this environment sees; starts no device.

    The names are those of `CUDA_VISIBLE_DEVICES`. As in CUDA, a number that no GPU has,
    such as -1, ends the list.
    """
    present = [str(number) for number, _ in enumerate(_DRIVER.glob("*"))]
    visible = environment.get(CUDA_VISIBLE_DEVICES)
    if visible is None:
        return present
    named = [name.strip() for name in visible.split(",")]
    visible_names = itertools.takewhile(
        lambda name: name in present or name[:1].isalpha(), named
    )
    return list(visible_names)[: len(present)]
