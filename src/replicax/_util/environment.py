"""Reads switches from environment variables, and the number of usable cores."""

import os

__all__ = ["is_off", "usable_cores"]


def is_off(switch: str) -> bool:
    """Whether an environment variable is `off`, `0` or `false`."""
    return os.environ.get(switch, "").strip().lower() in ("off", "0", "false")


def usable_cores() -> int:
    """Number of cores that this process may run on, else of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
