"""The switch of this folder, XLA options for CPUs, and the schedule of Gloo's thread.

`REPLICAX_CPU=off` in the environment leaves XLA, malloc and threads on CPUs alone.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = [
    "HEAP_BYTES",
    "compiler_options",
    "cpu_pool_size",
    "flags_in",
    "is_on",
    "keep_loops",
    "without_interrupts",
]

P = ParamSpec("P")
T = TypeVar("T")

SWITCH = "REPLICAX_CPU"
_CHOICES = ("on", "off")
_FORMER = ("REPLICAX_CPU_LOWERINGS", "REPLICAX_HUGE_PAGES")

HEAP_BYTES = 48 * 2**20
"""Most that a step on a CPU takes from malloc at once, where its arrays are smaller.

XLA asks for all intermediate arrays of a step together. glibc serves JAX' threads from
heaps of 64 MiB each, which it keeps; what does not fit into one comes from the kernel
and goes back to it, page by page, in every step. In pieces that fit, the transformer of
the bench takes 701 ms a step on two devices and not 1093, and MobileNetV2 187
and not 276; pieces of 2 to 16 MiB gain less.
"""

# Every XLA that JAX 0.10 to 0.12 come with knows it. To ask would cost 20 ms.
_HEAP = "xla_multiheap_size_constraint_per_heap"

# No option of a program: XLA takes these from its flags only. Unrolled loops take time
# to compile (on one core the first step of ResNet-18 in the bench 8.6 s and not
# 7.8, of MobileNetV2 41 and not 32), and steps take as long with and without.
_EXTRA = "--xla_backend_extra_options"
_KEEP_LOOPS = f"{_EXTRA}=xla_cpu_disable_loop_unrolling"

_THREADS = Path("/proc/self/task")
_log = logging.getLogger("replicax")


def is_on() -> bool:
    """Whether programs, memory and threads on CPUs are tuned, by `REPLICAX_CPU`.

    Raises:
        ValueError: If the variable has another value than "on" or "off".
    """
    for name in _FORMER:
        if name in os.environ:
            _warn_of(name)
    choice = os.environ.get(SWITCH) or "on"
    if choice not in _CHOICES:
        raise ValueError(f"{SWITCH} has {choice!r}; use one of {list(_CHOICES)}.")
    return choice == "on"


@functools.cache
def _warn_of(name: str) -> None:
    _log.warning(
        "The environment variable %s=%s has no effect any more. Unset it; %s=off "
        "leaves lowerings, memory, compiler options and threads on CPUs alone.",
        name,
        os.environ[name],
        SWITCH,
    )


def keep_loops(environ: MutableMapping[str, str]) -> None:
    """Tell XLA in `XLA_FLAGS` not to unroll loops of programs for CPUs.

    XLA reads the variable once, when the first devices are asked for. Where it has
    extra options of the user, or names a file, nothing is added.

    Args:
        environ: The environment of a process on CPUs, which is changed.

    Example:
        >>> environ = {"XLA_FLAGS": "--xla_dump_to=folder"}
        >>> keep_loops(environ)
        >>> environ["XLA_FLAGS"].split()[1]
        '--xla_backend_extra_options=xla_cpu_disable_loop_unrolling'
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    is_file = bool(flags) and not flags.startswith("-")
    if is_on() and _EXTRA not in flags and not is_file:
        environ["XLA_FLAGS"] = f"{flags} {_KEEP_LOOPS}".strip()


def compiler_options(
    environ: Mapping[str, str], *, largest_bytes: int = 0
) -> dict[str, int] | None:
    """The `compiler_options` of `jax.jit` for a step on CPUs; None where it needs none.

    Args:
        environ: The process' environment; what `XLA_FLAGS` sets is left out.
        largest_bytes: Size of the largest intermediate array, where it is known. XLA
            would warn of each that is larger than `HEAP_BYTES`.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.
    """
    if not is_on() or largest_bytes > HEAP_BYTES or _HEAP in flags_in(environ):
        return None
    return {_HEAP: HEAP_BYTES}


def flags_in(environ: Mapping[str, str]) -> set[str]:
    """Names of the flags in `XLA_FLAGS`, which may also be the name of a file.

    Raises:
        OSError: If that file cannot be read.
    """
    text = environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        text = Path(text).read_text(encoding="utf-8")
    return {word.lstrip("-").split("=", 1)[0] for word in text.split()}


def without_interrupts(make: Callable[P, T]) -> Callable[P, T]:
    """A function that makes JAX's Gloo, with a thread that never interrupts others.

    Where a worker has one core, the message that arrives wakes Gloo's thread amid a
    send. It finds the connection locked, looks again and again, and keeps the core from
    the thread that holds the lock until the scheduler's slice is over: 4 ms for each
    message, where 0.2 will do. Linux' class for batch jobs waits for the core.
    """

    @functools.wraps(make)
    def scheduled(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_on():
            return make(*args, **kwargs)
        before = _threads()
        gloo = make(*args, **kwargs)
        for thread in _threads() - before:
            try:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            except OSError as error:
                _log.info("Gloo's thread is scheduled like any other: %s.", error)
        return gloo

    return scheduled


def _threads() -> set[int]:
    """This process' threads as Linux numbers them; none on other systems."""
    if not _THREADS.is_dir():
        return set()
    return {int(path.name) for path in _THREADS.iterdir()}


def cpu_pool_size(num_devices: int) -> int:
    """Threads that keep collectives on `num_devices` CPU devices from blocking.

    Measured on two cores: as many threads as devices hang, 1.5 times as many hang, and
    twice as many passed every soak; the two on top are margin. Never fewer than cores.
    """
    needed = 2 * num_devices + 2 if num_devices > 1 else 1
    return max(needed, os.cpu_count() or 1)
