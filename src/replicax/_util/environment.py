"""What a process reads of the machine and the environment that it runs in."""

import os

__all__ = ["is_off", "usable_cores"]


def is_off(switch: str) -> bool:
    """Whether an environment variable turns off what is on by default."""
    return os.environ.get(switch, "").strip().lower() in ("off", "0", "false")


def usable_cores() -> int:
    """Number of cores that this process may run on, where the system says it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
