"""Serializes the call of a function or script for another process."""

import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax.cluster.failure import ATTEMPT
from replicax.cpu.settings import keep_loops
from replicax.testing.runner import FunctionCall, ScriptCall

__all__ = ["call_of", "child_environment"]

_DEFAULTS = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}
# Variables that each task sets itself: tasks do not inherit them.
_NOT_INHERITED = ("JAX_NUM_CPU_DEVICES", "NPROC", ATTEMPT)


def call_of(
    program: Callable[..., object] | str | Path,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    logical_devices: int | None,
) -> FunctionCall | ScriptCall:
    """Serialize a call in plain values, for `replicax.testing.runner`.

    Raises:
        ValueError: If the function is not at the top level of a module with a file, or
            the script does not exist.
        TypeError: If a script's arguments are no strings, or an argument of a function
            cannot be pickled.
    """
    if isinstance(program, str | Path):
        script = Path(program)
        if not script.is_file():
            raise ValueError(f"Cluster: there is no script {script}.")
        words = [argument for argument in args if isinstance(argument, str)]
        if kwargs or len(words) < len(args):
            raise TypeError(
                "Cluster: a script's arguments are strings, given as args; got "
                f"args={args!r}, kwargs={kwargs!r}."
            )
        script = str(script.resolve())
        return {"script": script, "args": words, "logical_devices": logical_devices}
    if not callable(program):
        raise TypeError(
            f"Cluster: program must be a function or the path of a script; got "
            f"{program!r}."
        )
    module, name = _module_and_name(program)
    if module == "__main__":
        # Tasks load it under this name, which the pickles of their results contain.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    return {
        "module": module,
        "file": str(_source_file(program, module)),
        "function": name,
        "args": _pickled(args, kwargs),
        "sys_path": sys.path,
        "logical_devices": logical_devices,
    }


def _pickled(args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps((tuple(args), dict(kwargs)))
    except Exception as error:  # The class of an argument may raise any exception.
        raise TypeError(
            f"Cluster: {args=}, {kwargs=} cannot be pickled for the tasks: {error}. "
            "Pass numbers, strings, NumPy arrays, and lists, tuples or dicts of them; "
            "make everything else in the function."
        ) from error


def _module_and_name(function: Callable[..., object]) -> tuple[str, str]:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise ValueError(
            f"Cluster: another process cannot find {function!r}. Write a function with "
            "`def` at the top level of a module, and pass its inputs as args."
        )
    return module, name


def _source_file(function: Callable[..., object], module: str) -> Path:
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        code = getattr(function, "__code__", None)
        file = getattr(code, "co_filename", None)
    if file is None or not Path(file).is_file():
        raise ValueError(
            f"Cluster: another process cannot import {function!r}: its module "
            f"{module!r} has no file. Put it into a file, or run a script."
        )
    return Path(file).resolve()


def child_environment() -> dict[str, str]:
    """Make a task's environment: it imports this replicax, by default on the CPU."""
    environment = _DEFAULTS | dict(os.environ)
    for name in _NOT_INHERITED:
        environment.pop(name, None)
    keep_loops(environment)
    source = str(Path(__file__).resolve().parents[2])
    # `site-packages` must not precede the standard library, so it is not added.
    if source not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [source, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
