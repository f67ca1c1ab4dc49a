"""Virtual environments of the peers, made when they are first needed."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.entries import Environment

__all__ = ["EnvironmentMissingError", "named_pythons", "python_of", "versions_of"]

_REQUIREMENTS: dict[Environment, list[str]] = {
    "tensorflow": ["tensorflow-cpu", "tf_keras"],
    # The newest torch that is one file for CPUs; others bring gigabytes of CUDA.
    "torch": ["torch==2.13.0", "numpy"],
}
_SHOWN = ("replicax", "jax", "jaxlib", "keras", "tensorflow-cpu", "tf_keras", "torch")
_PROGRAM = """
import importlib.metadata, json, sys
found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))
"""


class EnvironmentMissingError(Exception):
    """An environment could not be made; says why."""


def python_of(
    environment: Environment,
    folder: Path,
    tell: Callable[[str], None],
    *,
    on_gpu: bool = False,
    limit_seconds: float = 1800.0,
) -> str:
    """The Python of an environment, which is made if it is not there.

    Args:
        environment: Which one; "here" is this one.
        folder: Where environments are.
        tell: Called with what is done, since it can take minutes.
        on_gpu: Whether it is to use a GPU. Then nothing is installed: it is this
            Python, if that has the library.
        limit_seconds: For pip.

    Raises:
        EnvironmentMissingError: If it cannot be made.
    """
    if environment == "here":
        return sys.executable
    if on_gpu:
        if importlib.util.find_spec(environment) is None:
            raise EnvironmentMissingError(
                f"{sys.executable} has no {environment}, and builds for GPUs are not "
                f"installed here. Name a Python that has it: "
                f"--python {environment}=PATH."
            )
        return sys.executable
    place = folder / environment
    python, done = place / "bin" / "python", place / "complete"
    if not done.exists():
        packages = _REQUIREMENTS[environment]
        tell(f"Installing {' and '.join(packages)} into {place}.")
        _run([sys.executable, "-m", "venv", "--clear", str(place)], limit_seconds)
        _run([str(python), "-m", "pip", "install", "-q", *packages], limit_seconds)
        done.touch()
    return str(python)


def named_pythons(options: Sequence[str]) -> dict[str, str]:
    """Interpreters by environment, from options `--python NAME=PATH`.

    Raises:
        ValueError: If a name is unknown, or if there is no such interpreter.
    """
    pythons = {}
    for option in options:
        name, equals, path = option.partition("=")
        if name not in ("tensorflow", "torch") or not equals:
            raise ValueError(
                f"--python {option!r}: write tensorflow=PATH or torch=PATH."
            )
        python = shutil.which(path)
        if python is None:
            raise ValueError(f"--python {option!r}: there is no {path!r}.")
        pythons[name] = python
    return pythons


def versions_of(python: str) -> dict[str, str]:
    """Versions of the libraries that matter, by name."""
    text = _run([python, "-c", _PROGRAM, *_SHOWN], 120.0)
    return json.loads(text)


def _run(command: list[str], limit_seconds: float) -> str:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=limit_seconds
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
        raise EnvironmentMissingError(f"{command[:4]}: {lines[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMissingError(str(error)) from error
    return ended.stdout
