"""A client's end of a stream of messages to a parameter server."""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from replicax._util.types import JSONObject
from replicax._util.watchdog import Watchdog
from replicax.ps import wire
from replicax.ps.message_stream import MessageStream
from replicax.ps.shared_memory import SharedMemory

if TYPE_CHECKING:
    from pyarrow import flight

__all__ = ["ClientStream", "lost_errors"]


class ClientStream:
    """A stream and its thread; a lost stream can be opened again.

    `client` is the channel of the open stream, or None. Exchanges hold the `lock`.
    `num_failed_pings` counts since the last answer. `exchange_s` is the total time of
    all exchanges, in seconds.
    """

    def __init__(
        self,
        name: str,
        ping: Callable[["ClientStream", float], None],
        idle_seconds: float,
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, f"replicax-stream-{name}")
        self.watchdog = Watchdog(
            f"replicax-ps-watchdog-{name}",
            ping=functools.partial(ping, self),
            idle_seconds=idle_seconds,
        )
        self.client: flight.FlightClient | None = None
        self.num_failed_pings = 0
        self.num_bytes = 0  # Sent and received.
        self.exchange_s = 0.0
        self._messages: MessageStream | None = None
        self._memory: SharedMemory | None = None

    def open(
        self,
        client: "flight.FlightClient",
        options: object,
        memory: SharedMemory | None,
    ) -> None:
        """Open a Flight stream; offer the server to share `memory`."""
        offer = b"" if memory is None else memory.offer
        descriptor = wire.flight().FlightDescriptor.for_command(offer)
        writer, reader = client.do_exchange(descriptor, options)
        self._messages = MessageStream(reader, writer, memory)
        self._memory, self.client = memory, client

    def transfer(
        self,
        header: JSONObject,
        vectors: Mapping[str, np.ndarray],
        progress: Callable[[], None],
    ) -> tuple[JSONObject, dict[str, np.ndarray]]:
        """Send a message, and receive its answer."""
        messages = self._messages
        assert messages is not None
        self.num_bytes += messages.send(header, vectors, progress)
        answer = messages.receive_header()
        if answer is None:
            raise ConnectionResetError("the server ended the stream")
        progress()
        announcement = wire.announced(answer, None)
        del answer["vectors"]
        results = messages.receive_vectors(announcement, progress)
        self.num_bytes += sum(vector.nbytes for vector in results.values())
        return answer, results

    def cancel(self) -> None:
        """Cancel the current exchange. Any thread may call this."""
        if (messages := self._messages) is not None:
            messages.reader.cancel()

    def drop(self) -> None:
        """Close the Flight stream, without waiting for the server."""
        messages, self._messages, self.client = self._messages, None, None
        memory, self._memory = self._memory, None
        if messages is None:
            return
        messages.reader.cancel()
        try:
            messages.writer.close()
        except lost_errors():
            pass  # The stream was lost, or has just been cancelled.
        if memory is not None:
            memory.close()

    def shut_down(self) -> None:
        """Cancel the current exchange and all queued exchanges."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.watchdog.fire()
        with self.lock:
            self.drop()
        self.watchdog.close()


def lost_errors() -> tuple[type[Exception], ...]:
    """The errors of a lost connection."""
    import pyarrow as pa

    return (pa.ArrowException, OSError)
