"""Runs a ported script up to its first training step, and reports its error."""

import contextlib
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax_migrate.command import Status
from replicax_migrate.script import Finding
from replicax_migrate.tables import MESSAGES

__all__ = ["check"]

_FIRST_STEP = "replicax_migrate.first_step"
_IN_CLUSTER = (
    *("-c", "from replicax.cli import main; main()", "run"),
    *("--workers", "1", "--ps", "1", "--max-restarts", "0", "--grace-seconds", "1"),
)
"""Starts a worker and a parameter server, which both run the script."""
# If JAX filters tracebacks, it adds lines to error messages.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}


def check(
    path: Path,
    original: str,
    ported: Mapping[Path, str],
    arguments: Sequence[str],
    limit_seconds: float,
) -> tuple[Status, Finding]:
    """Run a ported script on two CPU devices, in a process of its own.

    A script with `ParameterServerStrategy` runs in a cluster of a worker and a server.

    Args:
        path: The path of the original. The script can import modules of its folder.
        original: The text of the original script, for line numbers.
        ported: The ported texts of this script and of other modules, by path.
        arguments: Command-line arguments of the script.
        limit_seconds: The time after which `check` stops the script.

    Returns:
        The exit status, and a finding with the reason for a status other than 0. A
        module that does not train has status 0 if another ported script imports it.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / path.name
        for other, text in ported.items():
            if other.parent == path.parent:
                (Path(folder) / other.name).write_text(text, "utf-8")
        outcome = Path(folder) / "outcome.json"
        command = ["-m", _FIRST_STEP, str(outcome), str(script), *arguments]
        if "ParameterServerStrategy" in ported[path]:
            command = [*_IN_CLUSTER, *command]
        errors = _run(command, str(path.resolve().parent), outcome, limit_seconds)
        if outcome.exists():
            status, line, reason = json.loads(outcome.read_text("utf-8"))
        elif errors is None:
            reason = MESSAGES["no_step"].format(limit=limit_seconds)
            status, line = Status.NOT_RUN, 1
        else:  # The process crashed.
            status, line, reason = Status.LEFT, 1, errors.strip().rpartition("\n")[2]
    if status == Status.NOT_RUN and not reason:
        others = (text for other, text in ported.items() if other != path)
        if any(_imports(text, path.stem) for text in others):
            status = Status.RUN
        reason = MESSAGES["untrained"]
    number = _original_line(original, ported[path], line)
    source = "".join(original.splitlines()[number - 1 : number]).strip()
    return Status(status), Finding(number, source[:70], reason)


def _run(
    command: list[str], folder: str, outcome: Path, limit_seconds: float
) -> str | None:
    """Run Python until it writes OUTCOME, exits, or exceeds the limit; then stop it.

    Returns:
        The text on standard error; None if Python did not exit by itself.
    """
    python_path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    deadline = time.monotonic() + limit_seconds
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": python_path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        while process.poll() is None and not outcome.exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        has_exited = process.poll() is not None
        process.terminate()  # On SIGTERM, a launcher stops its tasks.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        return errors.read() if has_exited else None


def _imports(text: str, module: str) -> bool:
    return bool(re.search(rf"(?m)^\s*(import|from)\b.*\b{re.escape(module)}\b", text))


def _original_line(original: str, ported: str, line: int) -> int:
    """Map a line number of the ported script to the original, by a diff."""
    before, after = original.splitlines(), ported.splitlines()
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for _, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if b_start <= line - 1 < b_end:
            if a_end - a_start == b_end - b_start:
                return a_start + line - b_start
            replaced = before[a_start:a_end]
            similar = difflib.get_close_matches(after[line - 1], replaced, 1, 0)
            return a_start + (replaced.index(similar[0]) if similar else 0) + 1
    return line
