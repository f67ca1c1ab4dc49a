"""How much memory the devices of a process hold."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["memory_of"]

_STATUS = Path("/proc/self/status")


def memory_of(devices: Sequence[Any]) -> dict[str, Any]:
    """Memory in bytes: of the fullest device, or of the process where it is a CPU.

    Returns:
        `bytes` and `peak_bytes`, either None where unknown; `limit_bytes`, None where
        there is none; `of`: `"device"` or `"process"`.
    """
    found = [stats for stats in (d.memory_stats() for d in devices) if stats]
    if found:
        return {
            "of": "device",
            "bytes": _most(found, "bytes_in_use"),
            "peak_bytes": _most(found, "peak_bytes_in_use"),
            "limit_bytes": _most(found, "bytes_limit"),
        }
    now, peak = _process_bytes()
    return {"of": "process", "bytes": now, "peak_bytes": peak, "limit_bytes": None}


def _most(found: Sequence[Mapping[str, int]], name: str) -> int | None:
    return max((stats[name] for stats in found if name in stats), default=None)


def _process_bytes() -> tuple[int | None, int | None]:
    if _STATUS.exists():
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        now, peak = values.get("VmRSS"), values.get("VmHWM")
        if now is not None and peak is not None:
            return 1024 * int(now.split()[0]), 1024 * int(peak.split()[0])
    if sys.platform == "win32":
        return None, None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None, peak if sys.platform == "darwin" else 1024 * peak
