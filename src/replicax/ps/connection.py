"""A worker's client of one parameter server: streams of tensors, and single calls."""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax._util.waiting import back_off, wait_for
from replicax._version import versions
from replicax.cluster.addresses import parse_address
from replicax.errors import ClusterError, ClusterMismatchError
from replicax.ps import wire
from replicax.ps.client_stream import ClientStream, lost_errors
from replicax.ps.credentials import Credentials
from replicax.ps.messages import Message, Vectors
from replicax.ps.shared_memory import SharedMemory

if TYPE_CHECKING:
    from pyarrow import flight

__all__ = [
    "ROWS",
    "VALUES",
    "Connection",
    "ConnectionLost",
    "ServerRefused",
    "ValuesLostError",
]

VALUES = "values"
"""The stream of groups' values and gradients."""
ROWS = "rows"
"""The stream of tables' rows.

Callbacks inside a running program fetch rows. On the other stream the fetch would wait
for a push of dense gradients, which may be large.
"""

_PAUSES = (0.05, 5.0)
# A channel of its own for each connection: gRPC shares channels within a process.
_CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]

_Answer = TypeVar("_Answer")
_Reply = TypeVar("_Reply", bound=msgspec.Struct)


class ConnectionLost(ClusterError):
    """A parameter server cannot be reached, or does not answer, for too long."""


class ServerRefused(RuntimeError):
    """A parameter server answered with an error, so a retry would not help.

    `kind` names the exception's class on the server, such as `"Superseded"`.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class ValuesLostError(ClusterError):
    """A server was restarted without the values that this worker trains."""


class Connection:
    """Streams to a server, opened on first use, and single calls.

    Each stream has a thread and sends one message at a time. Methods may be called from
    any thread.

    If the connection is lost, a client connects again, with growing pauses, and retries
    for `retry_timeout_seconds`. So a server may get a message twice: pushes carry
    sequence numbers, and the server applies each push once. Each chunk sent or received
    restarts `reply_timeout_seconds`.

    A connection may break without notice, for example if the server's host fails. So a
    client pings the server while a stream is idle or waits, and drops the stream after
    `silence_timeout_seconds` without an answer. Calls, which a server answers at once,
    have the same timeout. A slow network or large messages may also delay answers, so
    each retry doubles the timeout.

    A `caller` is a task of the job: a server refuses a caller whose token or versions
    differ from its own. `incarnation` changes when the server restarts, perhaps with
    older values; it is `""` before the first answer. With `shares_memory`, the default,
    a client offers shared memory to the server.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        task: str = "ps",
        caller: str | None = None,
        connect_timeout_seconds: float = 10.0,
        reply_timeout_seconds: float = 60.0,
        retry_timeout_seconds: float = 300.0,
        silence_timeout_seconds: float = 30.0,
    ) -> None:
        self.address = address
        self.task = task
        self._hello = {"caller": caller, "versions": versions()} if caller else {}
        self._location = _location(address, credentials)
        self._credentials = credentials
        self._connect_timeout = connect_timeout_seconds
        self._reply_timeout = reply_timeout_seconds
        self._silence_timeout = silence_timeout_seconds
        self.retry_timeout_seconds = retry_timeout_seconds
        self.shares_memory = True
        self.incarnation = ""
        wire.flight()  # Raises here if pyarrow is not installed.
        self._client_lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._closed = threading.Event()
        self._opening = threading.Lock()
        self._streams: dict[str, ClientStream] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of messages sent and of vectors received so far."""
        return sum(stream.num_bytes for stream in list(self._streams.values()))

    @property
    def exchange_s(self) -> float:
        """Seconds of exchanges on the stream of values."""
        return self._stream(VALUES).exchange_s

    def _stream(self, name: str) -> ClientStream:
        with self._opening:
            if name not in self._streams:
                self._streams[name] = ClientStream(
                    f"{name}-{self.task}", self._ping, self._silence_timeout / 4
                )
            return self._streams[name]

    def exchange(
        self,
        message: Message[_Reply],
        vectors: Mapping[str, np.ndarray] | None = None,
        *,
        stream: str = VALUES,
        reply_timeout_seconds: float | None = None,
        retry_timeout_seconds: float | None = None,
    ) -> tuple[_Reply, Vectors]:
        """Send a message on a stream; return the answer and its read-only vectors.

        A timeout of None stands for the connection's own.

        Raises:
            ServerRefused: If the server answers with an error.
            ConnectionLost: If the server cannot be reached, or is silent for too long.
            ClusterMismatchError: If the server has another token or other versions.
        """
        answer, results = self.exchange_header(
            msgspec.to_builtins(message),
            vectors,
            stream=stream,
            reply_timeout_seconds=reply_timeout_seconds,
            retry_timeout_seconds=retry_timeout_seconds,
        )
        # The message's class defines the answer's type.
        return cast(_Reply, msgspec.convert(answer, message.answer_type)), results

    def exchange_header(
        self,
        header: JSONObject,
        vectors: Mapping[str, np.ndarray] | None = None,
        *,
        stream: str = VALUES,
        reply_timeout_seconds: float | None = None,
        retry_timeout_seconds: float | None = None,
    ) -> tuple[JSONObject, Vectors]:
        """Send a message by its header; return the answer's header. See `exchange`."""
        timeout = reply_timeout_seconds or self._reply_timeout
        client_stream = self._stream(stream)
        with client_stream.lock:
            began = time.perf_counter()
            answer, results = self._until_answered(
                str(header.get("op")),
                lambda: self._attempt(client_stream, header, vectors or {}, timeout),
                retry_timeout_seconds,
            )
            client_stream.num_failed_pings = 0
            client_stream.exchange_s += time.perf_counter() - began
        return answer, results

    def submit(
        self, use: Callable[["Connection"], _Answer], *, stream: str = VALUES
    ) -> Future[_Answer]:
        """Queue a call for a stream's thread, which runs calls in order.

        The future raises `ClusterError` in place of `ServerRefused` if the server has
        lost its values, or if a later process has replaced this worker.
        """
        return self._stream(stream).thread.submit(self._translating_refusals, use)

    def _translating_refusals(self, use: Callable[["Connection"], _Answer]) -> _Answer:
        try:
            return use(self)
        except ServerRefused as refused:
            if refused.kind == "UnknownGroup":
                raise ValuesLostError(
                    f"{self.task} at {self.address} has lost its values: {refused} "
                    "Start the job again; with snapshot_dir=... a restarted server "
                    "restores its values.",
                    culprit=self.task,
                ) from refused
            if refused.kind == "Superseded":
                raise ClusterError(
                    f"{self.task} refuses to go on: {refused}", culprit=self.task
                ) from refused
            raise

    def call(self, name: str, **arguments: Any) -> Any:
        """Call an action, such as `"board.claim"`, with JSON; raises as `exchange`."""
        body = json.dumps(arguments).encode()
        longest = max(self.retry_timeout_seconds, self._connect_timeout)
        longest = min(longest, self._reply_timeout)
        timeouts = back_off(min(self._silence_timeout, longest), longest, factor=2.0)
        return self._until_answered(name, lambda: self._act(name, body, next(timeouts)))

    def close(self) -> None:
        """Close the connection. Calls in progress in other threads fail."""
        self._closed.set()
        for stream in list(self._streams.values()):
            stream.shut_down()
        self._drop_client(self._client)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _until_answered(
        self,
        what: str,
        attempt: Callable[[], _Answer],
        retry_timeout_seconds: float | None = None,
    ) -> _Answer:
        # Texts only: the frames of an error would keep its channel alive.
        failures: list[str] = []
        began = time.monotonic()

        def answered() -> tuple[_Answer] | None:
            if self._closed.is_set():
                raise ConnectionLost(
                    f"{self._name}: {what!r} was called after this process had closed "
                    "the connection.",
                    culprit=self.task,
                )
            try:
                return (attempt(),)
            except lost_errors() as error:
                if (refusal := _refusal_in(error)) is not None:
                    raise refusal from error
                failures.append(_short(error))
                return None

        def late() -> NoReturn:
            raise ConnectionLost(
                f"{self._name} gave no answer to {what!r} for "
                f"{time.monotonic() - began:.0f} s, in {len(failures)} attempts; the "
                f"last one failed with: {failures[-1]}. See its log, and whether "
                "it still runs.",
                culprit=self.task,
            )

        (answer,) = wait_for(
            answered,
            self.retry_timeout_seconds
            if retry_timeout_seconds is None
            else retry_timeout_seconds,
            late=late,
            reminder=lambda waited: (
                f"{self._name} has not answered {what!r} for {waited:.0f} s: "
                f"{failures[-1]}. It has not started yet, or was lost, or another "
                "program has its port, or the job is done and its servers have ended. "
                "Retrying"
            ),
            # Tasks of a cluster do not start at the same moment.
            is_early=True,
            pauses=_PAUSES,
            # Workers that lost the same server must not all reconnect at once.
            sleep=lambda pause: self._closed.wait(pause * random.uniform(0.5, 1.0)),
        )
        return answer

    @property
    def _name(self) -> str:
        return f"Parameter server {self.task} at {self.address}"

    def _options(self, timeout: float | None) -> object:
        token = f"Bearer {self._credentials.token}".encode()
        return wire.flight().FlightCallOptions(
            timeout=timeout,
            headers=[(b"authorization", token)],
            write_options=wire.write_options(),
        )

    def _connected(self) -> "flight.FlightClient":
        """Return the channel; without one, connect and check token and versions."""
        with self._client_lock:
            if self._client is not None:
                return self._client
            client = wire.flight().FlightClient(
                self._location,
                tls_root_certs=self._credentials.tls_root,
                generic_options=_CHANNEL_OPTIONS,
            )
            try:
                options = self._options(self._connect_timeout)
                body = json.dumps(self._hello).encode()
                hello = _act(client, "hello", body, options)
            except BaseException as error:
                client.close()
                if (mismatch := self._mismatch_in(error)) is not None:
                    raise ClusterMismatchError(mismatch) from None
                raise
            self._client = client
            self.incarnation = hello["incarnation"]
            return client

    def _mismatch_in(self, error: BaseException) -> str | None:
        """The error's text if the server refused this task's token or versions."""
        if isinstance(error, ServerRefused) and error.kind == "VersionMismatch":
            return str(error)
        caller = self._hello.get("caller")
        if caller and isinstance(error, wire.flight().FlightUnauthenticatedError):
            return self._credentials.mismatch(caller, self._name)
        return None

    def _drop_client(self, client: "flight.FlightClient | None") -> None:
        """Discard the channel: gRPC's back-off before reconnecting is too long."""
        with self._client_lock:
            if client is self._client:
                self._client = None

    def _ping(self, stream: ClientStream, seconds: float) -> None:
        """Cancel a stream if its server does not answer a call on its connection."""
        if (client := stream.client) is None:
            return
        patience = self._silence_timeout * 3 / 4 * 2**stream.num_failed_pings
        seconds = min(seconds, self._reply_timeout, patience)
        try:
            _act(client, "hello", b"{}", self._options(seconds))
        except (*lost_errors(), ServerRefused):
            stream.num_failed_pings += 1
            self._drop_client(client)
            stream.cancel()  # The current or next exchange opens a new stream.

    def _act(self, name: str, body: bytes, timeout: float) -> Any:
        client = self._connected()
        try:
            answer = _act(client, name, body, self._options(timeout))
        except lost_errors() as error:
            if _refusal_in(error) is None:
                self._drop_client(client)
            raise
        if answer["incarnation"] != self.incarnation:
            self._drop_client(client)  # The next client's handshake compares versions.
            self.incarnation = answer["incarnation"]
        return answer["value"]

    def _attempt(
        self,
        stream: ClientStream,
        header: JSONObject,
        vectors: Mapping[str, np.ndarray],
        timeout: float,
    ) -> tuple[JSONObject, dict[str, np.ndarray]]:
        client = self._connected()
        try:
            if stream.client is None:
                memory = SharedMemory.make() if self.shares_memory else None
                stream.open(client, self._options(None), memory)
            with stream.watchdog.watch(timeout, stream.cancel) as progress:
                answer = stream.transfer(header, vectors, progress)
        except BaseException:
            stream.drop()
            self._drop_client(client)
            raise
        if "error" in answer[0]:
            raise ServerRefused(answer[0]["error"], answer[0].get("kind", ""))
        return answer


def _act(
    client: "flight.FlightClient", name: str, body: bytes, options: object
) -> JSONObject:
    results = list(client.do_action((name, body), options))
    if len(results) != 1:
        raise wire.WireError(f"{name!r} has {len(results)} results; expected one")
    answer = json.loads(results[0].body.to_pybytes())
    if "error" in answer:
        raise ServerRefused(answer["error"], answer.get("kind", ""))
    return answer


def _refusal_in(error: Exception) -> ServerRefused | None:
    """The server's refusal that an error carries; None if the connection was lost."""
    if isinstance(error, wire.flight().FlightUnauthenticatedError):
        return ServerRefused(_short(error), "Unauthenticated")
    try:
        detail = json.loads(getattr(error, "extra_info", b"") or b"null")
    except ValueError:
        return None
    if not isinstance(detail, dict):
        return None
    return ServerRefused(str(detail.get("error")), str(detail.get("kind")))


def _short(error: Exception) -> str:
    if isinstance(error, wire.flight().FlightTimedOutError):
        return "no answer came in time"
    text = str(error) or type(error).__name__
    for mark in (". gRPC client debug context", ". Detail:", ". Client context"):
        text = text.partition(mark)[0]
    return text.removeprefix("Flight returned ")[:300]


def _location(address: str, credentials: Credentials) -> str:
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ValueError(f"{address!r} is not a server's address: {error}") from error
    scheme = "grpc+tls" if credentials.tls else "grpc+tcp"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
