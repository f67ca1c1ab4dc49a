"""Memory that a worker and a server of one machine share, for the bytes of messages.

Over a socket the bytes of a message are copied four times, by gRPC and by the kernel;
through this memory twice, into it and out of it: 23 MB take 4 to 6 ms of processor time
in place of 14 to 17 (benchmarks/flight_round_trip.py has the throughput).

The worker makes a file without a name, whose size is sealed, and offers it when it
opens a stream. A server of the same machine and user opens it through `/proc`. Others
cannot, or find another file there, and the bytes go over the stream. The system frees
the memory with its last process, however that ends.
"""

import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import msgspec
import numpy as np

__all__ = ["NUM_WINDOWS", "WINDOW_BYTES", "Offer", "SharedMemory"]

_logger = logging.getLogger("replicax")

# One is filled while another is emptied. Each costs two notes on the stream, of 0.1 ms;
# memory is taken for those only that were ever used.
WINDOW_BYTES = 4 << 20
NUM_WINDOWS = 8
_NONCE_BYTES = 32
_START = mmap.PAGESIZE  # The windows begin behind the nonce, at an aligned address.
_SIZE = _START + NUM_WINDOWS * WINDOW_BYTES


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """Where a server finds a worker's memory, and the nonce that stands in it."""

    pid: int
    descriptor: int
    nonce: str


class SharedMemory:
    """Windows of memory that two processes map, used again and again in turns.

    `offer` is what a server needs to find it, until `close`. `is_agreed`: both ends are
    known to have the memory.

    Example:
        >>> import sys
        >>> if sys.platform == "linux":
        ...     mine = SharedMemory.make()
        ...     theirs = SharedMemory.accept(mine.offer)
        ...     sent, received = np.arange(5, dtype=np.uint8), np.zeros(5, np.uint8)
        ...     for [(part, place)] in mine.windows([sent]):
        ...         place[:] = part
        ...     for [(part, place)] in theirs.windows([received]):
        ...         part[:] = place
        ...     mine.close()
        ...     assert received.tolist() == [0, 1, 2, 3, 4]
    """

    def __init__(self, file: int, offer: bytes = b"") -> None:
        self.offer = offer
        self.is_agreed = not offer
        self._close: Callable[[], object] | None = None
        self._bytes = np.frombuffer(mmap.mmap(file, _SIZE), np.uint8)

    @classmethod
    def make(cls) -> Self | None:
        """New memory with an `offer` of it; None where the system has none to share."""
        if not hasattr(os, "memfd_create"):  # Linux has it.
            return None
        try:
            file = os.memfd_create("replicax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                return cls._sealed(file)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            _logger.info("bytes for servers go over the network: %s", error)
            return None

    @classmethod
    def _sealed(cls, file: int) -> Self:
        os.ftruncate(file, _SIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.pwrite(file, nonce, 0)
        offer = Offer(os.getpid(), file, nonce.hex())
        memory = cls(file, msgspec.json.encode(offer))
        memory._close = weakref.finalize(memory, os.close, file)
        return memory

    @classmethod
    def accept(cls, offer: bytes) -> Self | None:
        """The memory that a worker offers; None if it is none of this machine."""
        try:
            found = msgspec.json.decode(offer, type=Offer)
            path = f"/proc/{found.pid}/fd/{found.descriptor}"
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (msgspec.DecodeError, OSError):
            return None
        try:
            # Unsealed memory could be cut off by the worker while it is read here.
            is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
            nonce = os.pread(file, _NONCE_BYTES, 0).hex()
            if is_sealed and nonce == found.nonce and os.fstat(file).st_size == _SIZE:
                return cls(file)
        except OSError:  # No file of this kind.
            pass
        finally:
            os.close(file)
        return None

    def windows(
        self, arrays: Iterable[np.ndarray]
    ) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Parts of the arrays, all `uint8[n]`, and their places, window by window."""
        window: list[tuple[np.ndarray, np.ndarray]] = []
        number = used = 0
        for array in arrays:
            done = 0
            while done < len(array):
                size = min(len(array) - done, WINDOW_BYTES - used)
                start = _START + number % NUM_WINDOWS * WINDOW_BYTES + used
                place = self._bytes[start : start + size]
                window.append((array[done : done + size], place))
                done, used = done + size, used + size
                if used == WINDOW_BYTES:
                    yield window
                    window, number, used = [], number + 1, 0
        if window:
            yield window

    def close(self) -> None:
        """Withdraw the offer. A server that has accepted it keeps the memory."""
        if self._close is not None:
            self._close()


def _seals() -> int:
    return fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
