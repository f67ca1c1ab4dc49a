"""Runs a ported script on CPU devices until it has executed a training step.

`check` starts `python -m replicax_migrate.first_step OUTCOME SCRIPT [ARGUMENT ...]`.
The process writes the file OUTCOME, such as `[1, 9, "ValueError: ..."]`: the exit
status, a line of the script, and the reason.

A callback in the update of each optimizer counts the executed updates. The process
exits at the second update: the first step has then ended.

In a cluster with a parameter server, the worker and the server run this module. The
server updates the parameters, and writes OUTCOME at the first update. The worker writes
OUTCOME if the script fails or ends earlier.
"""

import functools
import itertools
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import keras
from jax.core import Tracer

import replicax as rx
from replicax.seams import using_devices
from replicax_migrate.command import Status

__all__ = ["main"]

_DEPENDENCIES_OF_PORTS = ("grain", "jax", "keras", "numpy", "replicax", "tensorflow")


class _UpdateCounter:
    """Counts the executed updates of optimizers.

    Args:
        on_trained: Called by a thread of JAX once a training step has ended.
        is_server: Whether one update ends a step. Elsewhere, the second update shows
            that the first step has ended.
    """

    def __init__(self, on_trained: Callable[[], None], *, is_server: bool) -> None:
        self._on_trained = on_trained
        self._is_server = is_server
        self.counts = Counter[int]()

    def watch(self) -> None:
        """Patch all optimizers of Keras to count their updates."""
        owner = next(c for c in keras.Optimizer.__mro__ if "apply" in vars(c))
        original = owner.apply
        trace_numbers = itertools.count()

        @functools.wraps(original)
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # A gradient tape traces a step several times: each trace has its own count.
            is_traced = isinstance(optimizer.iterations.value, Tracer)
            key = next(trace_numbers) if is_traced else -id(optimizer)
            jax.debug.callback(functools.partial(self._count, key))
            return original(optimizer, *args, **kwargs)

        owner.apply = apply

    def _count(self, key: int) -> None:
        self.counts[key] += 1
        # Each device calls this method once per update.
        if self._is_server or self.counts[key] > jax.local_device_count():
            self._on_trained()


def main() -> None:
    """Run SCRIPT, and write its outcome as JSON."""
    outcome, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)

    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    has_servers = "ps" in config.get("cluster", {})
    is_server = has_servers and config["task"]["type"] == "ps"

    def write(status: Status, line: int = 1, reason: str = "") -> None:
        if Path(outcome).exists():
            return  # The cluster's other task has already written OUTCOME.
        temporary = Path(f"{outcome}.{os.getpid()}")
        temporary.write_text(json.dumps([status, line, reason]), "utf-8")
        temporary.replace(outcome)

    def on_trained() -> None:
        write(Status.RUN)
        if not is_server:
            os._exit(0)

    if not has_servers:
        rx.set_logical_devices(2)
    updates = _UpdateCounter(on_trained, is_server=is_server)
    updates.watch()
    error: BaseException | None = None
    try:
        with nullcontext() if has_servers else using_devices(jax.devices("cpu")):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        error = end if end.code not in (None, 0) else None
    except BaseException as failure:  # noqa: BLE001 - OUTCOME reports it.
        error = failure
    jax.effects_barrier()
    status = Status.RUN if updates.counts else Status.NOT_RUN
    if error is not None:
        status = status if _is_missing_input(error) else Status.LEFT
        write(status, _line(error, script), _text(error))
    elif not is_server:
        write(status)


def _is_missing_input(error: BaseException) -> bool:
    """Whether an error means that data, a package or an argument is missing."""
    for cause in _causes(error):
        if isinstance(cause, ModuleNotFoundError):
            return not (cause.name or "").startswith(_DEPENDENCIES_OF_PORTS)
        if isinstance(cause, OSError):
            return True
    # `argparse` exits with 2.
    return isinstance(error, SystemExit) and error.code == 2


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException, script: str) -> int:
    """The innermost line of the script in the traceback of an error; else 1."""
    for cause in _causes(error):
        frames = traceback.walk_tb(cause.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == script]
        if lines:
            return lines[-1]
    return 1


def _text(error: BaseException) -> str:
    """The last line of a traceback, without the arguments that Keras appends."""
    if isinstance(error, SystemExit):
        return f"the script exits with status {error.code!r}"
    text = f"{type(error).__name__}: {error}".partition("Arguments received")[0]
    return " ".join(text.split())[:400]


if __name__ == "__main__":
    main()
