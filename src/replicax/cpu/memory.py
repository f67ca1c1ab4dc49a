"""What the compiler freed is returned; with `REPLICAX_CPU=tuned`, huge pages are used.

The compiler frees hundreds of megabytes in small pieces. glibc keeps these, though
steps allocate large arrays, mostly elsewhere. `return_freed` changes no setting.

Each step on a CPU allocates its intermediate arrays. By default glibc maps large arrays
and unmaps them when freed, so every step pays for thousands of pages of 4 KiB. With
`tuned` the heap keeps freed memory, and the kernel backs it with pages of 2 MiB.
"""

import ctypes
import functools
import platform
import sys

from replicax._util.environment import usable_cores
from replicax.cpu.settings import is_on, is_tuned

__all__ = ["return_freed", "share_one_heap", "use_huge_pages"]

# Constants of malloc.h and mman-common.h, the same on all architectures of Linux.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_THREADS_HEAP = 2**26  # HEAP_MAX_SIZE of glibc's arena.c on 64 bits.
_MADV_HUGEPAGE = 14
_AHEAD = 2**29  # Address space that is reserved in advance; memory only when used.
_PAGE = 2**21
_end = 0  # End of the heap at the last `madvise`.


def share_one_heap() -> None:
    """On one core, make all future threads of this process use a single malloc heap.

    By default a thread gets its own heap (arena) at its first allocation, without huge
    pages, and returns arrays of 64 MiB and more to the kernel at once. Call this before
    JAX starts its backend and threads. On two cores threads would contend for the heap.
    """
    if usable_cores() == 1 and _is_wanted():
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_freed() -> None:
    """Return memory that this process has freed to the kernel, if glibc keeps it.

    Call it after a compilation; it takes 10 to 50 ms. `tuned` sets up huge pages, too.
    """
    if not use_huge_pages() and is_on() and _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def use_huge_pages() -> bool:
    """Keep freed memory of this process, and back it with huge pages if possible.

    Returns False and does nothing without `REPLICAX_CPU=tuned`, Linux and glibc. Call
    it after a program's first step: it also returns the memory that the compiler has
    freed, many small pieces, to the kernel.
    """
    global _end
    libc = _libc()
    if libc is None:
        return False
    if libc.sbrk(0) == _end:
        return True
    # Return free small pages, so that the next allocation uses huge pages.
    libc.malloc_trim(0)
    # Grow the heap before arrays are allocated, so that `madvise` covers all of it.
    libc.free(libc.malloc(_AHEAD))
    _end = libc.sbrk(0)
    start = -(-_start() // _PAGE) * _PAGE
    if _end > start:  # A kernel without huge pages ignores the advice.
        libc.madvise(start, _end - start, _MADV_HUGEPAGE)
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
    # glibc unmaps a thread's empty heap if the previous heap has more room than this
    # pad. No heap has that much room.
    libc.mallopt(_M_TOP_PAD, _THREADS_HEAP)
    return libc


def _is_wanted() -> bool:
    return is_tuned() and _has_glibc()


def _has_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _start() -> int:
    """Read the start address of the heap; 0 if unknown."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if line.endswith("[heap]\n"):
                return int(line.split("-", 1)[0], 16)
    return 0
