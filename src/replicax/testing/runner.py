"""The script of each task in a test's cluster: it calls the user's program.

Its arguments are the file of the call, and a folder for the function's return value
and, on SIGUSR1, the stacks of all threads.
"""

import faulthandler
import importlib
import importlib.util
import operator
import os
import pickle
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TypedDict

__all__ = ["CALL", "STACKS", "VALUE", "FunctionCall", "ScriptCall"]

CALL = "call.pickle"
STACKS = "stacks.txt"
VALUE = "value.pickle"


class ScriptCall(TypedDict):
    """A script and its command line."""

    script: str
    args: list[str]
    logical_devices: int | None


class FunctionCall(TypedDict):
    """A function's module and name, and its pickled arguments."""

    module: str
    file: str
    function: str
    args: bytes
    sys_path: list[str]
    logical_devices: int | None


def main(call_file: Path, folder: Path) -> None:
    """Run the call in the file `call_file`, and write its results to `folder`."""
    _show_stacks_on_signal(folder)
    call: ScriptCall | FunctionCall = pickle.loads(call_file.read_bytes())
    if call["logical_devices"] is not None:
        from replicax.engine.devices import set_logical_devices

        set_logical_devices(call["logical_devices"])
    if "script" in call:
        _run_script(call["script"], call["args"])
    else:
        _run_function(call, folder)


def _show_stacks_on_signal(folder: Path) -> None:
    part = folder / f"{STACKS}.part"
    # Open for the process' life: the signal's handler writes to it.
    stacks = part.open("wb", buffering=0)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    part.rename(folder / STACKS)  # Only now is the handler installed.


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _run_function(call: FunctionCall, folder: Path) -> None:
    sys.path[:] = call["sys_path"]
    module = _load(call["module"], Path(call["file"]))
    function = operator.attrgetter(call["function"])(module)
    args, kwargs = pickle.loads(call["args"])
    value = function(*args, **kwargs)
    try:
        pickled = pickle.dumps(value)
    except Exception as error:  # The class of the value may raise any exception.
        raise TypeError(
            f"{call['function']} returned {value!r}, which cannot be pickled for the "
            f"test: {error}. Return numbers, strings, NumPy arrays, and lists, tuples "
            "or dicts of them."
        ) from error
    part = folder / f"{VALUE}.part"
    part.write_bytes(pickled)
    part.rename(folder / VALUE)


def _load(name: str, file: Path) -> ModuleType:
    """Import the module of a file, also if its name is not importable, as in pytest."""
    if name == "__main__":
        # Like multiprocessing: the block under `if __name__ == "__main__"` is skipped.
        return _load_file("__mp_main__", file, "__main__")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # No such parent package; a module without spec.
        spec = None
    if spec is not None and spec.origin and Path(spec.origin).resolve() == file:
        return importlib.import_module(name)
    return _load_file(name, file)


def _load_file(name: str, file: Path, *other_names: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(dict.fromkeys((name, *other_names), module))
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ.pop("PYTHONSAFEPATH", None)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
