"""The Arrow Flight service of a parameter server: refuses calls without the token.

Workers send messages with tensors on streams (`messages`). All other calls are actions,
with JSON arguments and a JSON answer.

gRPC listens only at the address in TF_CONFIG. The service checks a call's token before
it reads anything else, and a message's announced vectors before it allocates memory.
The log has each refusal with the caller's address; a caller with the token also gets
the reason.
"""

import inspect
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from replicax._util.types import JSONObject
from replicax._util.waiting import wait_for
from replicax._version import versions as own_versions
from replicax.cluster.addresses import Address, parse_address
from replicax.errors import ClusterError
from replicax.ps import wire
from replicax.ps.board import Board
from replicax.ps.credentials import Credentials
from replicax.ps.limits import RequestError
from replicax.ps.message_stream import MessageStream
from replicax.ps.messages import MESSAGES, Message
from replicax.ps.open_connections import disconnect
from replicax.ps.shared_memory import SharedMemory
from replicax.ps.store import VariableStore

if TYPE_CHECKING:
    from pyarrow import flight

__all__ = ["Refused", "Service", "VersionMismatch"]

_logger = logging.getLogger("replicax")


class Refused(Exception):
    """A call is unknown, or its arguments are invalid."""


class VersionMismatch(RuntimeError):
    """A task has other versions of Python, replicax or a library than this server."""


class Service:
    """Serves a store, and on server 0 the board, to callers with the token.

    `address` is this server's in TF_CONFIG; it must not stand for all interfaces.
    `messages` are additional messages of the tensor streams, by name.
    """

    def __init__(
        self,
        address: str,
        store: VariableStore,
        board: Board | None,
        credentials: Credentials,
        *,
        messages: Mapping[str, type[Message]] | None = None,
    ) -> None:
        self.address = address
        self._bound = _address_to_bind(address)
        self._store = store
        self._credentials = credentials
        self._messages = MESSAGES | dict(messages or {})
        self._actions: dict[str, Callable[..., object]] = {
            "hello": self._hello,
            "store.admit": store.sessions.admit,
            "store.status": store.status,
            "tables.set_rule": store.set_rule,
            "tables.set_learning_rate": store.set_learning_rate,
        }
        for name in () if board is None else board.ANSWERS:
            self._actions[f"board.{name}"] = getattr(board, name)
        self._signatures = {n: inspect.signature(a) for n, a in self._actions.items()}
        self._flight_server: Any = None
        self._closing = False
        self._busy = 0
        self._idle = threading.Condition()

    def serve_in_thread(self) -> None:
        """Start to serve in gRPC's threads, and return."""
        _check_free(self.address, self._bound)
        host = f"[{self._bound.host}]" if ":" in self._bound.host else self._bound.host
        scheme = "grpc+tls" if self._credentials.tls else "grpc+tcp"
        try:
            self._flight_server = _flight_server(
                self,
                f"{scheme}://{host}:{self._bound.port}",
                self._credentials,
            )
        except OSError as error:
            raise ClusterError(
                f"The parameter server cannot listen at {self.address}: {error}"
            ) from error
        _logger.info("ps:%d serves at %s", self._store.server, self.address)

    def close(self, deadline: float = 10.0) -> None:
        """Wait for messages in progress, close all connections, free the port.

        After half of the `deadline`, in seconds, connections are cut. Raises a
        `ClusterError` if the port is still in use at the deadline.
        """
        self._closing = True
        end = time.monotonic() + deadline
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, deadline / 2)
        if self._flight_server is not None:
            self._shut_down(end)

    def _shut_down(self, end: float) -> None:
        # gRPC waits for streams to end, and idle streams never end by themselves.
        thread = threading.Thread(
            target=self._flight_server.shutdown,
            name=f"replicax-ps-shutdown-{self._bound.port}",
            daemon=True,
        )
        thread.start()

        def has_ended() -> bool | None:
            disconnect(self._bound.port)
            return not thread.is_alive() or None

        if not wait_for(
            has_ended,
            end - time.monotonic(),
            late=lambda: False,
            pauses=(0.02, 0.02),
            sleep=thread.join,
        ):
            raise ClusterError(
                f"The parameter server at {self.address} did not end in time: it still "
                f"handles {self._busy} messages."
            )
        self._flight_server = None

    # For the Flight server.

    def check(self, method: str, headers: Mapping[str, list[str]]) -> None:
        """Refuse a call without the token, before it is read."""
        values = headers.get("authorization") or [""]
        token = values[0].removeprefix("Bearer ") if isinstance(values[0], str) else ""
        if self._credentials.accepts(token):
            return
        why = "has the wrong token" if token else "has no token"
        _logger.warning(
            "Refused a call of %s at the parameter server %s: it %s.",
            *(method, self.address, why),
        )
        raise wire.flight().FlightUnauthenticatedError(
            f"the call {why}; all tasks of a cluster need the same one"
        )

    def exchange(
        self,
        peer: str,
        offer: bytes,
        reader: "flight.MetadataRecordBatchReader",
        writer: "flight.MetadataRecordBatchWriter",
    ) -> None:
        """Answer the messages of a worker's stream until it ends.

        `offer` is the worker's offer of shared memory; empty if it makes none.
        """
        stream = MessageStream(reader, writer, SharedMemory.accept(offer))
        try:
            while not self._closing:
                header = stream.receive_header()
                if header is None:
                    break
                self._answer(peer, header, stream)
        except (wire.WireError, RequestError) as error:
            raise self._refusal(peer, error) from error
        except ConnectionResetError as error:
            _logger.warning("Lost %s: %s.", peer, error)

    def _answer(self, peer: str, header: JSONObject, stream: MessageStream) -> None:
        kind = self._messages.get(str(header.get("op")))
        if kind is None:
            raise wire.WireError(
                f"there is no operation {header.get('op')!r:.80}; there are "
                f"{sorted(self._messages)}"
            )
        message = wire.read(kind, header, wire.WireError)
        expected = message.expected(self._store)
        announcement = wire.announced(header, expected)
        with self._idle:
            self._busy += 1
        try:
            vectors = stream.receive_vectors(announcement)
            try:
                answer, results = message.handle(self._store, vectors)
                self._store.flush()  # An answered update must not be lost.
                header = msgspec.to_builtins(answer)
            except Exception as error:  # noqa: BLE001
                header, results = self._error(peer, str(header["op"]), error), {}
            stream.send(header, results)
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def act(self, peer: str, name: str, body: bytes) -> bytes:
        """Execute an action with the arguments in `body`; return its answer as JSON."""
        try:
            value = self._call(name, body)
            # gRPC reconnects silently; a new incarnation shows the client a restart.
            answer = {"value": value, "incarnation": self._store.incarnation}
            return json.dumps(msgspec.to_builtins(answer)).encode()
        except Refused as error:
            raise self._refusal(peer, error) from error
        except Exception as error:  # noqa: BLE001
            return json.dumps(self._error(peer, name, error)).encode()

    def _call(self, name: str, body: bytes) -> object:
        function = self._actions.get(name)
        if function is None:
            names = sorted(self._actions)
            raise Refused(f"there is no action {name!r:.80}; there are {names}")
        try:
            arguments = wire.read_json(body)
            self._signatures[name].bind(**arguments)
        except (wire.WireError, TypeError) as error:
            raise Refused(f"the arguments of {name!r} are invalid: {error}") from error
        return function(**arguments)

    def _refusal(self, peer: str, error: Exception) -> Exception:
        _logger.warning("Refused a message from %s: %s.", peer, error)
        detail = json.dumps({"error": str(error), "kind": type(error).__name__})
        return wire.flight().FlightServerError(
            str(error)[:1000], extra_info=detail[:4000].encode()
        )

    def _error(self, peer: str, what: str, error: Exception) -> JSONObject:
        """Convert an exception to an answer; log the traceback if it is unexpected."""
        foreseen = (ValueError, LookupError, RuntimeError, TimeoutError, MemoryError)
        if isinstance(error, foreseen):
            _logger.warning("%.80r of %s failed: %s", what, peer, error)
        else:
            _logger.error("%r of %s failed.", what, peer, exc_info=error)
        return {"error": str(error), "kind": type(error).__name__}

    def _hello(
        self, caller: str | None = None, versions: dict[str, str] | None = None
    ) -> JSONObject:
        if versions is not None and versions != (mine := own_versions()):
            theirs = ", ".join(f"{k} {v}" for k, v in versions.items())
            here = ", ".join(f"{k} {v}" for k, v in mine.items())
            raise VersionMismatch(
                f"{caller} has {theirs}, and ps:{self._store.server} has {here}. All "
                "tasks of a cluster need the same versions: install them where they "
                "differ, and start that task again."
            )
        return {"server": self._store.server}


def _flight_server(service: Service, location: str, credentials: Credentials) -> Any:
    module: Any = wire.flight()

    class TokenCheck(module.ServerMiddlewareFactory):
        def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
            service.check(info.method.name, headers)

    class Server(module.FlightServerBase):
        def do_exchange(
            self, context: Any, descriptor: Any, reader: Any, writer: Any
        ) -> None:
            offer = descriptor.command or b""
            service.exchange(context.peer(), offer, reader, writer)

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            return [service.act(context.peer(), action.type, action.body)]

    pair = (credentials.tls_certificate, credentials.tls_key)
    return Server(
        location,
        tls_certificates=[pair] if credentials.tls_certificate else None,
        middleware={"token": TokenCheck()},
    )


def _address_to_bind(address: str) -> Address:
    try:
        host, port = parse_address(address)
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"A parameter server cannot listen at {address!r}: {error}. Set an address "
            "of this machine for its task in TF_CONFIG."
        ) from error
    numeric = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0]
    if str(numeric) in ("0.0.0.0", "::"):
        raise ValueError(
            f"A parameter server would listen at {address!r} on every network of this "
            "machine. Set one address of this machine for its task in TF_CONFIG."
        )
    return Address(str(numeric), port)


def _check_free(address: str, bound: Address) -> None:
    family = socket.AF_INET6 if ":" in bound.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((bound.host, bound.port))
        except OSError as error:
            raise ClusterError(
                f"The parameter server cannot listen at {address}: {error}. Is another "
                "server still running, or is this not an address of this machine?"
            ) from error
