"""`REPLICAX_CPU`, XLA options for CPUs, and scheduling of Gloo's thread.

By default replicax only changes the programs that it compiles. `REPLICAX_CPU=tuned` in
the environment also tunes the process: malloc, huge pages and scheduling classes of
threads. `REPLICAX_CPU=off` turns both off.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = [
    "compiler_options",
    "cpu_pool_size",
    "flags_in",
    "heap_bytes",
    "in_batch_class",
    "is_on",
    "is_tuned",
    "keep_loops",
]

P = ParamSpec("P")
T = TypeVar("T")

SWITCH = "REPLICAX_CPU"
_CHOICES = ("on", "off", "tuned")

# JAX 0.10 to 0.12 have this flag. Asking XLA for its flags would take 20 ms.
_HEAP = "xla_multiheap_size_constraint_per_heap"

# XLA's default orders a program so that independent operations may overlap, and keeps
# more arrays at a time. In the order of least memory the intermediate arrays of the
# benchmark's transformer need 297 MB, not 434, at the same time a step on two cores.
_SCHEDULER = "xla_cpu_scheduler_type"
_LEAST_MEMORY = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"

# XLA of JAX 0.10 to 0.12 computes most convolutions with YNNPACK, on a single core. The
# list below is XLA's default for YNNPACK without convolutions, so Eigen computes these.
# On two cores with AVX-512 a step of a small CNN takes 10 ms with Eigen and 17 ms with
# YNNPACK; a step of the benchmark's ResNet-18 takes 103 and 124 ms.
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
_NO_CONVOLUTIONS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"

# XLA has this as a process flag only, not as an option of a program. Unrolled loops
# take longer to compile (on one core the first step of the benchmark's ResNet-18 takes
# 8.6 s, not 7.8, of MobileNetV2 41 s, not 32), and steps are no faster.
_EXTRA = "--xla_backend_extra_options"
_KEEP_LOOPS = f"{_EXTRA}=xla_cpu_disable_loop_unrolling"

_THREADS = Path("/proc/self/task")


def is_on() -> bool:
    """Whether programs for CPUs get replicax' lowerings and compiler options.

    Raises a ValueError if `REPLICAX_CPU` is not "on" (the default), "off" or "tuned".
    """
    return _choice() != "off"


def is_tuned() -> bool:
    """Whether malloc and threads of this process are tuned for arrays on CPUs."""
    return _choice() == "tuned"


def heap_bytes() -> int:
    """Maximal size of one allocation of a step on a CPU, unless an array is larger.

    By default XLA allocates all intermediate arrays of a step together. glibc's malloc
    reuses blocks of up to 32 MiB; a larger block comes from the kernel in every step,
    page by page. With pieces of 31 MiB a step of the benchmark's MLP on two devices
    takes 37 ms, with 48 MiB 61 ms. The tuned malloc keeps all blocks: there a step of
    ResNet-18 on two workers of one core takes 177 ms of CPU time with pieces of 48 MiB,
    with 31 MiB 255 ms.
    """
    return (48 if is_tuned() else 31) * 2**20


def _choice() -> str:
    choice = os.environ.get(SWITCH) or "on"
    if choice not in _CHOICES:
        raise ValueError(f"{SWITCH} has {choice!r}; use one of {list(_CHOICES)}.")
    return choice


def keep_loops(environ: MutableMapping[str, str]) -> None:
    """Add a flag to `XLA_FLAGS`: XLA does not unroll loops of programs for CPUs.

    XLA reads the variable once, when devices are first used. The variable does not
    change if it already has extra options or names a file of flags.

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
) -> dict[str, int | str]:
    """Return the `compiler_options` of `jax.jit` for a step on CPUs.

    Flags of the user in `XLA_FLAGS` are not overridden. `largest_bytes` is the size of
    the largest array, if known; above `heap_bytes()` there is no limit on allocations,
    since XLA would warn of each array above the limit.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.
    """
    if not is_on():
        return {}
    options: dict[str, int | str] = {
        _YNNPACK: _NO_CONVOLUTIONS,
        _SCHEDULER: _LEAST_MEMORY,
    }
    if largest_bytes <= heap_bytes():
        options[_HEAP] = heap_bytes()
    users = flags_in(environ)
    return {name: value for name, value in options.items() if name not in users}


def flags_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Parse the flags in `XLA_FLAGS`, or in the file that it names: values by name."""
    text = environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        text = Path(text).read_text(encoding="utf-8")
    flags = (word.lstrip("-").partition("=") for word in text.split())
    return {name: value for name, _, value in flags}


def in_batch_class(make: Callable[P, T]) -> Callable[P, T]:
    """Wrap the factory of JAX's Gloo: its thread gets Linux' batch scheduling class.

    This needs `REPLICAX_CPU=tuned`. On one core, a message that arrives during a send
    wakes Gloo's thread, which spins for the connection's lock until its time slice
    ends, while the sender holds the lock: 4 ms a message, not 0.2. In the batch class a
    woken thread does not preempt the running one.
    """

    @functools.wraps(make)
    def scheduled(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_tuned():
            return make(*args, **kwargs)
        before = _threads()
        gloo = make(*args, **kwargs)
        for thread in _threads() - before:
            with contextlib.suppress(OSError):  # Not allowed: only slower.
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        return gloo

    return scheduled


def _threads() -> set[int]:
    if not _THREADS.is_dir():
        return set()
    return {int(path.name) for path in _THREADS.iterdir()}


def cpu_pool_size(num_devices: int) -> int:
    """Compute the thread pool size with which CPU collectives do not deadlock.

    On two cores, a pool of 1 or 1.5 threads per device hangs; 2 threads per device
    passed every soak test. Two more threads are a margin. The pool has at least one
    thread per core.
    """
    fewest = 2 * num_devices + 2 if num_devices > 1 else 1
    return max(fewest, os.cpu_count() or 1)
