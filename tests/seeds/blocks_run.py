"""Programs of the seeds, ported by the command, started, and looked at."""

import contextlib
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from tests.seeds.blocks_program import Machines, Planned, Process, Program, Tasks
from tests.seeds.blocks_source import program_text
from typer.testing import CliRunner

from replicax.cli import app

__all__ = ["Ended", "check", "migrate", "start"]

ROOT = Path(__file__).parents[2]
_REPLICAX = [sys.executable, "-c", "from replicax.cli import main; main()"]
_ON_DEVICES = (
    "import runpy, sys, replicax; replicax.set_logical_devices(int(sys.argv[1])); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)
_TASK = re.compile(r"""(?P<key>(?P<quote>["'])task(?P=quote): )\{[^}]*\}""")
_REPLICAS = re.compile(r"Number of (?:devices|replicas): (\d+)")
_LOSSES = re.compile(r"Losses: \[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended, with what it printed on both streams."""

    task: str
    status: int
    output: str


def migrate(program: Program, folder: Path) -> Path:
    """Write the program and port it in place by the command; nothing may be left."""
    script = folder / f"{program.name}.py"
    script.write_text(program_text(program), encoding="utf-8")
    result = CliRunner().invoke(app, ["migrate", "--write", str(script)])
    # Ported, not run.
    assert result.exit_code == 2, result.stderr or repr(result.exception)
    assert f"{script}: nothing is left to port by hand" in result.stderr
    return script


def start(program: Program, script: Path, data: Path | None) -> list[Ended]:
    """Run a ported program to its end.

    Args:
        program: The program.
        script: Its ported script; files are written beside it.
        data: The folder with the folders of photos.

    Raises:
        TimeoutError: If it takes longer than it may; all its processes are killed.
    """
    commands = _commands(program, script)
    environment = _environment(program, script.parent, data)
    deadline = time.monotonic() + program.limit_s
    with contextlib.ExitStack() as stack:
        outputs = {task: script.parent / f"{i}.txt" for i, task in enumerate(commands)}
        started = {
            task: stack.enter_context(_started(command, environment, outputs[task]))
            for task, command in commands.items()
        }
        while any(process.poll() is None for process in started.values()):
            if time.monotonic() > deadline:
                texts = "\n".join(path.read_text() for path in outputs.values())
                raise TimeoutError(
                    f"{program.name} runs for more than {program.limit_s} s:\n{texts}"
                )
            time.sleep(0.05)
    return [
        Ended(task, process.returncode, outputs[task].read_text())
        for task, process in started.items()
    ]


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; at the end nothing of it is left."""
    with (
        output.open("wb") as stream,
        subprocess.Popen(
            command,
            cwd=output.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            # `replicax run` ends its tasks when it is asked to end.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _commands(program: Program, script: Path) -> dict[str, list[str]]:
    run = program.run
    if isinstance(run, Machines):
        return _machines(run.addresses, script)
    if isinstance(run, Process):
        start = [sys.executable, "-c", _ON_DEVICES, str(run.num_devices)]
        return {"process": [*start, script.name]}
    if isinstance(run, Tasks):
        tasks = ["--workers", str(run.workers), "--ps", str(run.ps)]
        tasks += ["--max-restarts", "0", "--grace-seconds", "5"]
        return {"replicax run": [*_REPLICAX, "run", *tasks, script.name]}
    topology = ["--topology", run.topology]
    return {"replicax plan": [*_REPLICAX, "plan", *topology, script.name]}


def _machines(addresses: Mapping[str, str], script: Path) -> dict[str, list[str]]:
    """The script of each machine: "the only difference is the task part"."""
    text = script.read_text(encoding="utf-8")
    for address, port in zip(
        addresses.values(), _free_ports(len(addresses)), strict=True
    ):
        assert address in text, f"{script.name} has no address {address}"
        text = text.replace(address, f"localhost:{port}")
    assert _TASK.search(text), f"{script.name} has no task"
    commands = {}
    for task in addresses:
        kind, _, index = task.partition(":")
        own = rf"\g<key>{{'type': '{kind}', 'index': {index}}}"
        path = script.with_name(f"{kind}_{index}.py")
        path.write_text(_TASK.sub(own, text), encoding="utf-8")
        commands[task] = [sys.executable, path.name]
    return commands


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _environment(program: Program, folder: Path, data: Path | None) -> dict[str, str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "REPLICAX_TESTS_XLA_FLAGS": "",  # The TPU compiler does not know them.
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        # Several tests may compile for TPUs at a time.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        **program.environment,
    }
    environment.pop("TF_CONFIG", None)
    if isinstance(program.run, Machines) and any(
        "ps" in t for t in program.run.addresses
    ):
        environment["REPLICAX_PS_TOKEN"] = secrets.token_urlsafe(32)
    if "000_mnist.prelude" in program.parts:
        environment["MNIST"] = str(_write_digits(folder / "mnist.npz"))
    if program.data:
        assert data is not None, f"{program.name} needs the folder {program.data}"
        environment["IMAGES"] = str(data / program.data)
    return environment


def _write_digits(path: Path) -> Path:
    """Scikit-learn's digits as a file of MNIST: 1,024 to train on and 256 held out."""
    digits, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))[:1280]
    x = (digits[order].reshape(-1, 8, 8) * (255 / 16)).astype("uint8")
    x = np.pad(np.kron(x, np.ones((1, 3, 3), "uint8")), [(0, 0), (2, 2), (2, 2)])
    y = labels[order].astype("uint8")
    np.savez(path, x_train=x[:1024], y_train=y[:1024], x_test=x[1024:], y_test=y[1024:])
    return path


def check(program: Program, ended: list[Ended]) -> str:
    """What a program's run has shown, in a few words.

    Raises:
        AssertionError: If it is not what the table says.
    """
    everything = "\n".join(f"[{e.task}] {e.status}\n{e.output}" for e in ended)
    if program.error:
        assert all(e.status not in (0, None) for e in ended), everything
        assert program.error in everything, everything
        return f"refused: “{program.error}”"
    assert all(e.status == 0 for e in ended), everything
    if isinstance(program.run, Planned):
        assert "8 x TPU v5 lite" in everything, everything
        return f"compiled for {program.run.topology}, 8 replicas"
    found = []
    if program.falls:
        losses = _check_losses(everything)
        found.append(f"loss {losses[0]:.3g} → {losses[-1]:.3g}")
    for pattern in program.prints:
        match = re.search(pattern, everything)
        assert match, f"no {pattern!r} in\n{everything}"
        found.append(" ".join(match[0].split()))
    for name, least in program.at_least.items():
        numbers = re.findall(rf"{name}: ([\d.e-]+)", everything)
        assert numbers, f"no {name} in\n{everything}"
        assert float(numbers[-1]) >= least, everything
        found.append(f"{name} {float(numbers[-1]):.3g}")
    if program.replicas is not None:
        assert set(_REPLICAS.findall(everything)) == {str(program.replicas)}, everything
        found.append(f"{program.replicas} replicas")
    return ", ".join(found)


def _check_losses(output: str) -> list[float]:
    """Losses that every process printed: finite, and falling."""
    printed = [
        [float(value) for value in values.split(",")]
        for values in _LOSSES.findall(output)
    ]
    assert printed, output
    for losses in printed:
        assert all(math.isfinite(loss) for loss in losses), output
        assert losses[-1] < losses[0], output
    return printed[0]
