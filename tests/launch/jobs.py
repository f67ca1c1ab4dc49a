"""Scripts that only look like tasks of a cluster, and processes that must end."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

HEAD = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}:{task['index']}"
attempt = int(os.environ["REPLICAX_ATTEMPT"])
here = sys.argv[1]

def mark(text):
    open(f"{here}/{text}", "w").write(str(os.getpid()))

def wait_for(text):
    end = time.monotonic() + 30
    while not os.path.exists(f"{here}/{text}"):
        time.sleep(0.01)
        assert time.monotonic() < end, text
"""

REPLICAX = [
    sys.executable,
    "-c",
    # Python takes SIGINT only if nobody above has told it to ignore it.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from replicax.cli import main; main()",
]
"""The command `replicax`, which an interrupt ends."""


def state(pid: int) -> str:
    """The kernel's letter for what a process does; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def eventually(reached: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.02)
    return reached()


def gone(pids: list[int]) -> bool:
    """Whether the processes end within seconds."""
    return eventually(lambda: not any(map(alive, pids)))
