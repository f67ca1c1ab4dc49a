"""Memory that a worker and a server of one machine share, for the bytes of messages.

Over a socket, gRPC and the kernel copy the bytes of a message four times. Through
shared memory there are two copies: into the memory and out of it.

The worker creates an unnamed file of fixed size, and offers it when it opens a stream.
A server of the same machine and user opens the file through `/proc`. Any other server
fails to open the file, or reads a wrong nonce; then the bytes go over the stream. The
two ends take turns: a message is read before its answer is written.
"""

import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator
from typing import Self

import msgspec
import numpy as np

__all__ = ["Offer", "SharedMemory"]

_logger = logging.getLogger("replicax")

_CAPACITY_BYTES = 256 << 20  # Larger messages go over the stream.
_NONCE_BYTES = 32
_START = mmap.PAGESIZE  # The bytes begin behind the nonce, at an aligned address.
_SIZE = _START + _CAPACITY_BYTES


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """Where a server finds a worker's memory, and the nonce written in it."""

    pid: int
    descriptor: int
    nonce: str


class SharedMemory:
    """Memory that two processes map.

    `offer` tells a server where the memory is; it is valid until `close`. `is_agreed`
    becomes true when this end knows that the other end maps the memory too.
    """

    def __init__(self, file: int, offer: bytes = b"") -> None:
        self.offer = offer
        self.is_agreed = not offer
        self._bytes = np.frombuffer(mmap.mmap(file, _SIZE), np.uint8)
        # A server opens the file by its owner's descriptor, so the owner keeps it open.
        self.close = weakref.finalize(self, os.close, file) if offer else _do_nothing

    @classmethod
    def make(cls) -> Self | None:
        """Create memory with an `offer`; None if the system cannot share memory."""
        if not hasattr(os, "memfd_create"):  # Only Linux has it.
            return None
        try:
            file = os.memfd_create("replicax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            _logger.info("no memory can be shared with servers: %s", error)
            return None
        os.ftruncate(file, _SIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        nonce = secrets.token_bytes(_NONCE_BYTES)
        os.pwrite(file, nonce, 0)
        return cls(file, msgspec.json.encode(Offer(os.getpid(), file, nonce.hex())))

    @classmethod
    def accept(cls, offer: bytes) -> Self | None:
        """Map the memory that a worker offers; None if it is not on this machine."""
        try:
            parsed = msgspec.json.decode(offer, type=Offer)
            path = f"/proc/{parsed.pid}/fd/{parsed.descriptor}"
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (msgspec.DecodeError, OSError):
            return None
        try:
            # A worker could truncate an unsealed file while this server reads it.
            is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() == _seals()
            nonce = os.pread(file, _NONCE_BYTES, 0).hex()
            if is_sealed and nonce == parsed.nonce and os.fstat(file).st_size == _SIZE:
                return cls(file)
        except OSError:  # The file has no seals: it is of another kind.
            pass
        finally:
            os.close(file)
        return None

    def has_room_for(self, size: int) -> bool:
        """Whether a message of `size` bytes fits."""
        return size <= _CAPACITY_BYTES

    def places(
        self, arrays: Iterable[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each array `uint8[n]` with its part of the memory."""
        start = _START
        for array in arrays:
            yield array, self._bytes[start : start + len(array)]
            start += len(array)


def _do_nothing() -> None:
    pass


def _seals() -> int:
    return fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
