"""Rendezvous of the processes of a job at the address of process 0.

Each process sends its index and a free port to process 0. Process 0 adds the host that
the process connects from, and finally sends all addresses to each process. At the
deadline process 0 sends an error that names the missing processes.
"""

import contextlib
import json
import select
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from replicax._util.listing import listed
from replicax._util.waiting import wait_for
from replicax.cluster.addresses import Address, parse_address
from replicax.cluster.environments.base import bracketed
from replicax.cluster.listening import free_port, host_to_bind, listener
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError, ClusterError

__all__ = ["await_workers", "collect_addresses"]

_MAX_BYTES = 2**24
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # Wait for process 0's error, which names missing processes.
_MORE_TIME = "or give it more time (rx.Timeouts(startup=...))"


def collect_addresses(
    launcher: str, index: int, count: int, coordinator: str, seconds: float
) -> list[str]:
    """Exchange addresses, with free ports, with the launcher's other processes.

    Raises:
        ClusterError: If a process is missing after `seconds`.
        ClusterConfigError: If process 0 cannot listen at `coordinator`, or if two
            processes have the same index or belong to different jobs.
    """
    hello = {"launcher": launcher, "count": count, "index": index, "port": free_port()}
    names = [f"worker:{i}" for i in range(count)]
    remedy = "set JAX_COORDINATOR_ADDRESS=host:port with a free one, in all processes"
    return _meet(hello, names, coordinator, remedy, seconds)


def await_workers(
    source: str, cluster: ClusterSpec, index: int, seconds: float
) -> None:
    """Wait until all workers of a cluster have connected to the first one.

    `source` names the cluster's description in messages, such as `"TF_CONFIG"`, and
    `index` is this process' position in `cluster.workers`.

    Raises:
        ClusterError: If a worker is missing at the deadline.
        ClusterConfigError: If the first worker cannot listen, or if two processes have
            the same index or different clusters.
    """
    chief, *others = cluster.workers
    names = [chief.name, *(f"{task.name} ({task.address})" for task in others)]
    hello = {"launcher": source, "count": len(names), "index": index, "port": 0}
    hello["cluster"] = cluster.fingerprint
    remedy = "give this task another port, in the configuration of all processes"
    _meet(hello, names, chief.address, remedy, seconds)


def _meet(
    hello: dict[str, Any],
    names: Sequence[str],
    coordinator: str,
    remedy: str,
    seconds: float,
) -> list[str]:
    if hello["index"] != 0:
        return _await_addresses(coordinator, hello, names, seconds)
    server = parse_address(coordinator)
    # Other machines may connect: do not bind to the loopback address of a host name.
    remote = [] if server.is_loopback else [Address("another-machine", 1)]
    with contextlib.ExitStack() as stack:
        try:
            sockets = stack.enter_context(
                listener(host_to_bind(server, remote), server.port)
            )
        except OSError as error:
            raise ClusterConfigError(
                f"{hello['launcher']}: {names[0]} must listen on {coordinator}, but "
                f"its port cannot be used: {error.strerror}. Another program, or "
                f"another start of the same task, uses it. End that one, or {remedy}."
            ) from error
        return _Register(sockets, server, hello, names).collect(coordinator, seconds)


class _Register:
    """Process 0's connections to the other processes."""

    def __init__(
        self,
        servers: Sequence[socket.socket],
        own: Address,
        hello: dict[str, Any],
        names: Sequence[str],
    ) -> None:
        self._servers, self._own = servers, own
        self._hello, self._names = hello, names
        self._unidentified: list[socket.socket] = []
        self._members: dict[int, tuple[socket.socket, str]] = {}

    def collect(self, coordinator: str, seconds: float) -> list[str]:
        """Wait for all processes, and send all addresses to each."""
        launcher = self._hello["launcher"]

        def late() -> NoReturn:
            self._fail(
                ClusterError(
                    f"{listed(self._missing())} did not come to {self._names[0]} "
                    f"({coordinator}) within {seconds:.0f} s. Start the same script "
                    f"there with {launcher}, see that this port can be reached, "
                    f"{_MORE_TIME}."
                )
            )

        return wait_for(
            self._poll,
            seconds,
            late=late,
            reminder=lambda waited: (
                f"{self._names[0]} has waited {waited:.0f} s for "
                f"{listed(self._missing())}"
            ),
            is_early=True,
        )

    def _missing(self) -> Iterator[str]:
        names = enumerate(self._names[1:], 1)
        return (name for i, name in names if i not in self._members)

    def _poll(self) -> list[str] | None:
        owners = {member[0]: i for i, member in self._members.items()}
        sockets = [*self._servers, *self._unidentified, *owners]
        for ready in select.select(sockets, [], [], _POLL_SECONDS)[0]:
            if ready in self._servers:
                self._unidentified.append(ready.accept()[0])
            elif ready not in owners:
                self._unidentified.remove(ready)
                self._admit(ready, _receive(ready))
            elif not _receive(ready):  # The process has ended; its restart may connect.
                self._members.pop(owners[ready])[0].close()
        if any(self._missing()):
            return None
        others = (self._members[i][1] for i in sorted(self._members))
        addresses = [self._address(self._own.host, self._hello["port"]), *others]
        self._answer({"addresses": addresses})
        return addresses

    def _admit(self, connection: socket.socket, message: dict[str, Any]) -> None:
        index, port = message.get("index"), message.get("port")
        if not isinstance(index, int) or not isinstance(port, int):
            connection.close()  # Another program, such as a port scanner.
            return
        is_new = index not in self._members and 0 < index < self._hello["count"]
        peer = Address(connection.getpeername()[0].removeprefix("::ffff:"), port)
        host = self._own.host if peer.is_loopback else peer.host
        key = index if is_new else -1  # The rejected process gets the error, too.
        self._members[key] = connection, self._address(host, port)
        ignored = {"index": 0, "port": 0}
        if not is_new or {**message, **ignored} != {**self._hello, **ignored}:
            self._fail(
                ClusterConfigError(
                    f"{self._hello['launcher']}: {self._names[0]} of "
                    f"{self._hello['count']} processes received {message}: the index "
                    "is taken, or the process belongs to another job. Start each "
                    "process with its own index and the same cluster; give each job "
                    "its own port (JAX_COORDINATOR_ADDRESS=host:port, or the address "
                    f"of {self._names[0]})."
                )
            )

    def _fail(self, error: ClusterError | ClusterConfigError) -> NoReturn:
        self._answer({"error": str(error), "retry": isinstance(error, ClusterError)})
        raise error

    def _answer(self, answer: dict[str, Any]) -> None:
        for connection in self._unidentified:
            connection.close()
        for connection, _ in self._members.values():
            with contextlib.suppress(OSError), connection:
                connection.sendall(json.dumps(answer).encode() + b"\n")

    @staticmethod
    def _address(host: str, port: int) -> str:
        return f"{bracketed(host)}:{port}"


def _await_addresses(
    coordinator: str, hello: dict[str, Any], names: Sequence[str], seconds: float
) -> list[str]:
    """Connect to process 0, and wait for all addresses."""
    me = names[int(hello["index"])].partition(" ")[0]
    server = parse_address(coordinator)
    connections: list[socket.socket] = []

    def poll() -> dict[str, Any] | None:
        if not connections:
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(server, timeout=5.0))
                connections[0].sendall(json.dumps(hello).encode() + b"\n")
            return None
        if not select.select(connections, [], [], _POLL_SECONDS)[0]:
            return None
        with connections.pop() as connection:  # No answer: process 0 has ended. Retry.
            return _receive(connection) or None

    def late() -> NoReturn:
        problem = "has not answered" if connections else "did not come"
        for connection in connections:
            connection.close()
        raise ClusterError(
            f"{me}: {names[0]} ({coordinator}) {problem} within {seconds:.0f} s. Start "
            "the same script there, see that its port can be reached from here, "
            f"{_MORE_TIME}."
        )

    answer = wait_for(
        poll,
        seconds + _GRACE_SECONDS,
        late=late,
        reminder=lambda waited: (
            f"{me} has waited {waited:.0f} s for {names[0]} ({coordinator}) and others"
        ),
        is_early=True,
        pauses=(0.1, 1.0),
    )
    if "error" in answer:
        kind = ClusterError if answer["retry"] else ClusterConfigError
        raise kind(f"{me}: {answer['error']}")
    return answer["addresses"]


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Read a JSON object; return `{}` for other data and for a closed connection."""
    connection.settimeout(5.0)
    with contextlib.suppress(OSError, ValueError):
        message = json.loads(connection.makefile("rb").readline(_MAX_BYTES))
        return message if isinstance(message, dict) else {}
    return {}
