"""A worker's connections for rows of tables, beside those for dense values.

Rows are fetched by callbacks inside a running program. Behind a push of dense
gradients, which may be waiting for this very step, a callback would wait for ever.
"""

import atexit
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterError
from replicax.ps.connection import Connection, ConnectionLost, ServerRefused
from replicax.ps.credentials import Credentials

__all__ = ["RowLinks"]

_Result = TypeVar("_Result")

# Other replicas may wait in a collective for one whose callback waits for rows, and XLA
# ends the process after 40 s of that. An attempt that begins when the time for retries
# is nearly over takes the time for connecting and for the answer besides.
_CONNECT_SECONDS = 7.0
_REPLY_SECONDS = 8.0
_RETRY_SECONDS = 18.0


class RowLinks:
    """One connection to each server, with a thread of its own. Made when first used.

    Args:
        servers: Addresses of the parameter servers.
        credentials: The cluster's token and TLS files.
        timeouts: How long to wait outside of programs.
        caller: This task's name.
    """

    def __init__(
        self,
        servers: Sequence[str],
        credentials: Credentials,
        timeouts: Timeouts,
        caller: str | None = None,
    ) -> None:
        self._caller = caller
        self.num_servers = len(servers)
        self._servers = tuple(servers)
        self._credentials = credentials
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._links: list[Connection] = []
        self._pools: list[ThreadPoolExecutor] = []

    def soon(
        self, server: int, exchange: Callable[[Connection], _Result]
    ) -> Future[_Result]:
        """Do something with a server from within a program.

        Args:
            server: Which one.
            exchange: Does it.

        Returns:
            A future of what `exchange` returns. It is there before XLA gives up, or a
            `ConnectionLost`.
        """
        end = time.monotonic() + _RETRY_SECONDS
        return self._on(server, functools.partial(_asked, exchange, end))

    def patiently(
        self, server: int, exchange: Callable[[Connection], _Result]
    ) -> Future[_Result]:
        """The same outside of programs: a lost server has time to come back."""
        end = time.monotonic() + self._timeouts.server
        return self._on(server, functools.partial(_asked, exchange, end))

    def slowly(
        self, server: int, exchange: Callable[[Connection, float], _Result]
    ) -> Future[_Result]:
        """The same for what takes a server long; `exchange` is told for how long."""
        return self.patiently(server, lambda link: exchange(link, self._timeouts.step))

    def call_all(self, method: str, **arguments: Any) -> None:
        """Call an action of all servers, outside of programs."""
        calls = [
            self.patiently(server, lambda link: link.call(method, **arguments))
            for server in range(self.num_servers)
        ]
        for call in calls:
            call.result()

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received so far."""
        return sum(link.bytes_sent + link.bytes_received for link in self._links)

    def close(self) -> None:
        """End the connections. May be called again."""
        with self._lock:
            links, self._links = self._links, []
            pools, self._pools = self._pools, []
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for link in links:
            link.close()
        atexit.unregister(self.close)

    def _on(
        self, server: int, exchange: Callable[[Connection], _Result]
    ) -> Future[_Result]:
        with self._lock:
            if not self._links:
                self._make()
            return self._pools[server].submit(exchange, self._links[server])

    def _make(self) -> None:
        self._links = [
            Connection(
                address,
                self._credentials,
                task=f"ps:{i}",
                caller=self._caller,
                connect_timeout_seconds=_CONNECT_SECONDS,
                reply_timeout_seconds=_REPLY_SECONDS,
            )
            for i, address in enumerate(self._servers)
        ]
        # One thread a server: its stream carries one exchange at a time.
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"replicax-rows:{i}")
            for i in range(self.num_servers)
        ]
        atexit.register(self.close)


def _asked(
    exchange: Callable[[Connection], _Result], end: float, link: Connection
) -> _Result:
    left = end - time.monotonic()
    if left <= 0:  # Those before this one have waited for the server long enough.
        raise ConnectionLost(
            f"Parameter server {link.task} at {link.address} did not answer in time "
            "for rows. See its log, and whether it still runs.",
            culprit=link.task,
        )
    link.retry_timeout_seconds = left
    try:
        return exchange(link)
    except ServerRefused as refused:
        if refused.kind in ("UnknownTable", "Superseded"):
            raise ClusterError(
                f"{link.task} refuses to go on: {refused}", culprit=link.task
            ) from refused
        if refused.kind in ("TableError", "WireError"):
            raise ValueError(str(refused)) from refused
        raise
