"""Configures malloc for arrays on CPUs: keep freed memory, and use huge pages.

A step on a CPU allocates its intermediate arrays each time. glibc takes large arrays
from the kernel and returns them at once, so every step pays for finding, zeroing and
mapping thousands of 4 KiB pages, and for the TLB misses of so many. With
`REPLICAX_CPU=tuned` the heap keeps freed memory, and the kernel backs it with pages of
2 MiB.
"""

import ctypes
import functools
import logging
import platform
import sys

from replicax._util.environment import usable_cores
from replicax.cpu.settings import is_tuned

__all__ = ["share_one_heap", "use_huge_pages"]

_log = logging.getLogger("replicax")

# Constants of malloc.h and mman-common.h, the same on all architectures of Linux.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_THREADS_HEAP = 2**26  # HEAP_MAX_SIZE of glibc's arena.c on 64 bits.
_MADV_HUGEPAGE = 14
_AHEAD = 2**29  # Address space that is reserved in advance; memory only when used.
_PAGE = 2**21
_end = 0  # End of the heap at the last `madvise`.


def share_one_heap() -> None:
    """Make all future threads of this process use a single malloc heap, on one core.

    By default a thread gets its own heap (arena) at its first allocation. Huge pages do
    not cover it, and it returns arrays of 64 MiB and more to the kernel at once. JAX's
    threads start with its backend, so call this before. With one core, as workers that
    share a machine have; on two cores threads would contend for the heap: MobileNetV2
    takes 28 s to compile in place of 22, and 190 ms for a step on two devices, not 138.
    """
    if usable_cores() == 1 and _is_wanted():
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def use_huge_pages() -> bool:
    """Keep freed memory of this process, and back it with huge pages if possible.

    For processes that compute on CPUs under Linux with glibc. The process keeps the
    memory of freed arrays for its next arrays. Without `REPLICAX_CPU=tuned` malloc
    stays as it is, and this returns False.

    Call it after the first step of a program, not before: the compiler allocates much
    memory in small pieces, which would be slower in new huge pages. This call returns
    the compiler's memory to the kernel.
    """
    global _end
    libc = _libc()
    if libc is None:
        return False
    if libc.sbrk(0) == _end:
        return True
    # Small pages stay small: return the free ones, so that they come back huge.
    libc.malloc_trim(0)
    # Grow the heap before arrays are allocated, so that `madvise` covers all of it.
    libc.free(libc.malloc(_AHEAD))
    _end = libc.sbrk(0)
    start = -(-_start() // _PAGE) * _PAGE
    if _end > start and libc.madvise(start, _end - start, _MADV_HUGEPAGE) != 0:
        _log_small_pages()
    return True


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Configure malloc to keep memory; return the C library, or None if not wanted."""
    if not _is_wanted():
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_size_t
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # glibc unmaps the last heap of a thread when a step has emptied it, unless the heap
    # before it has less room than the pad; that a heap can never have.
    libc.mallopt(_M_TOP_PAD, _THREADS_HEAP)
    return libc


@functools.cache
def _log_small_pages() -> None:
    _log.info("Arrays on CPUs are not in huge pages: the kernel has none.")


def _is_wanted() -> bool:
    is_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return is_glibc and is_tuned()


def _start() -> int:
    """Read the start address of the heap; 0 if unknown."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                return int(line.split("-", 1)[0], 16)
    return 0
