"""malloc for arrays on CPUs: a heap in huge pages, kept from step to step.

A step on a CPU allocates its intermediate arrays anew each time. glibc takes large ones
from the kernel and gives them back at once, so every step pays for the kernel to find,
zero and map thousands of pages of 4 KiB, and then for the lookups of so many. Here the
heap is allowed to keep what was freed, and the kernel to back it with pages of 2 MiB.
"""

import ctypes
import functools
import logging
import os
import platform
import sys
from pathlib import Path

from replicax._util.environment import usable_cores
from replicax.cpu.settings import is_on

__all__ = ["share_one_heap", "use_huge_pages"]

_log = logging.getLogger("replicax")

# Of malloc.h and mman-common.h; the same on all of Linux' architectures.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_AHEAD = 2**29  # Address space that is asked for in advance; memory only when used.
_PAGE = 2**21
_end = 0  # Of the heap, when it was last seen to.


def share_one_heap() -> None:
    """Has all threads of this process that are yet to come use its one heap.

    A thread has a heap of its own from its first allocation on, which `use_huge_pages`
    does not reach, and which gives arrays of 64 MiB and more back at once. Those of JAX
    begin with its backend. So this is for the moment before, where `use_huge_pages`
    would do something and the process has one core, as workers that share a machine do.

    On two cores threads wait for each other's allocations: MobileNetV2 takes 28 s to
    compile and not 22, and 190 ms a step on two devices and not 138.

    Example:
        >>> share_one_heap()
    """
    if usable_cores() == 1 and _is_wanted():
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def use_huge_pages() -> bool:
    """Keep freed memory of this process and back it with huge pages.

    For processes that compute on CPUs under Linux with glibc. Memory that arrays took
    stays with the process for its next arrays. `REPLICAX_CPU=off` leaves malloc as
    it is, and so does a user who has configured malloc or put another in its place.

    To be called after the first step of a program, and not before: its compiler takes
    much memory in small pieces, which would be slower in pages that are not there yet,
    and is given back here.

    Returns:
        Whether it is done.
    """
    global _end
    libc = _libc()
    if libc is None:
        return False
    if libc.sbrk(0) == _end:
        return True
    # Pages that are small already stay so: the free ones go, to come back huge.
    libc.malloc_trim(0)
    # So that the heap has memory, all of it advised, before the arrays come.
    libc.free(libc.malloc(_AHEAD))
    _end = libc.sbrk(0)
    start = -(-_start() // _PAGE) * _PAGE
    if _end > start and libc.madvise(start, _end - start, _MADV_HUGEPAGE) != 0:
        _tell_once("the kernel gives none")
    return True


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library with a malloc that keeps memory; None where it is left alone."""
    if not _is_wanted():
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_size_t
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return libc


@functools.cache
def _tell_once(reason: str) -> None:
    _log.info("Arrays on CPUs are not in huge pages: %s.", reason)


def _is_wanted() -> bool:
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    if not is_on():
        return False
    # Somebody has thought about memory already.
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") + os.environ.get(
        "LD_PRELOAD", ""
    ):
        return False
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in text


def _start() -> int:
    """Where the heap begins."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                return int(line.split("-", 1)[0], 16)
    return 0
