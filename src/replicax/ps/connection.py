"""A client of one parameter server: one stream, its thread, and calls beside it."""

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, overload

import msgspec
import numpy as np

from replicax._util.types import JSONObject
from replicax._util.waiting import back_off, wait_for
from replicax._util.watchdog import Watchdog
from replicax._version import versions
from replicax.cluster.addresses import parse_address
from replicax.errors import ClusterError, ClusterMismatchError
from replicax.ps import wire
from replicax.ps.credentials import Credentials
from replicax.ps.message_stream import MessageStream
from replicax.ps.messages import Message, Vectors
from replicax.ps.shared_memory import SharedMemory

__all__ = ["Connection", "ConnectionLost", "ServerRefused", "ValuesLostError"]

_PAUSES = (0.05, 5.0)
# A channel of its own for each connection: gRPC shares channels within a process.
_CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]

_Answer = TypeVar("_Answer")
_Reply = TypeVar("_Reply", bound=msgspec.Struct)


class ConnectionLost(ClusterError):
    """A parameter server cannot be reached, or does not answer, for too long."""


class ServerRefused(RuntimeError):
    """A parameter server answered with an error. Asking again would not help.

    `kind` names the exception's class on the server, such as `"Superseded"`.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class ValuesLostError(ClusterError):
    """A server was restarted without the values that this worker trains."""


class Connection:
    """One stream to a server, and calls beside it, from any thread.

    When the connection is lost it is made again, with growing pauses, and what was
    asked is asked again, for `retry_timeout_seconds`. A server may so get a message
    twice: pushes carry sequence numbers, and it applies them once. While bytes come or
    go, `reply_timeout_seconds` begin anew.

    A connection may be lost without a word: the server's host, or a NAT's memory of it,
    is gone. So the stream's is pinged where it is idle, or waits, and counts as lost
    when nothing came for `silence_timeout_seconds`. A call, which a server answers at
    once, has as long. The network may only be slow, and what travels large: so both
    have twice as long in each further attempt.

    A server refuses a `caller` of another token or other versions than its own; None
    only looks on. `incarnation` is another text when the server was restarted, and so
    has other values or older ones; `""`: it was not reached yet. `exchange_s` counts
    the seconds of exchanges. One that `shares_memory`, as all do, offers some to a
    server of this machine.
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
        wire.flight()  # Fail here if it is not installed.
        self._stream_lock = threading.Lock()
        self._client_lock = threading.Lock()
        self._client: wire.FlightClient | None = None
        self._stream: _FlightStream | None = None
        self._num_lost = 0  # Streams since the last answer that did not answer a ping.
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"replicax-stream-{task}")
        self._watchdog = Watchdog(
            f"replicax-ps-watchdog-{address}",
            ping=self._ping,
            idle_seconds=self._silence_timeout / 4,
        )
        self.bytes_sent = 0
        self.bytes_received = 0
        self.exchange_s = 0.0

    @overload
    def exchange(
        self,
        message: Message[_Reply],
        vectors: Mapping[str, np.ndarray] | None = None,
        *,
        reply_timeout_seconds: float | None = None,
    ) -> tuple[_Reply, Vectors]: ...

    @overload
    def exchange(
        self,
        message: JSONObject,
        vectors: Mapping[str, np.ndarray] | None = None,
        *,
        reply_timeout_seconds: float | None = None,
    ) -> tuple[JSONObject, Vectors]: ...

    def exchange(
        self,
        message: Message[Any] | JSONObject,
        vectors: Mapping[str, np.ndarray] | None = None,
        *,
        reply_timeout_seconds: float | None = None,
    ) -> tuple[Any, Vectors]:
        """Send a message on the stream; return the answer and its read-only vectors.

        The answer to a message's header, in place of a message, is a header as well.

        Raises:
            ServerRefused: If the server answers with an error.
            ConnectionLost: If it cannot be reached, or does not answer, for too long.
            ClusterMismatchError: If it has another token or other versions.
        """
        timeout = reply_timeout_seconds or self._reply_timeout
        header: JSONObject = msgspec.to_builtins(message)
        with self._stream_lock:
            began = time.perf_counter()
            answer, results = self._until_answered(
                str(header.get("op")),
                lambda: self._attempt(header, vectors or {}, timeout),
            )
            self._num_lost = 0
            self.exchange_s += time.perf_counter() - began
        if isinstance(message, Message):
            return msgspec.convert(answer, message.answer_type), results
        return answer, results

    def submit(self, use: Callable[["Connection"], _Answer]) -> Future[_Answer]:
        """Queue a call for the connection's thread, which runs calls in order.

        A `ClusterError` in place of `ServerRefused` says that the server has lost its
        values, or that another process of this worker has taken over.
        """
        return self._thread.submit(self._used, use)

    def _used(self, use: Callable[["Connection"], _Answer]) -> _Answer:
        try:
            return use(self)
        except ServerRefused as refused:
            if refused.kind == "UnknownGroup":
                raise ValuesLostError(
                    f"{self.task} at {self.address} has lost its values: {refused} "
                    "Start the job again; with snapshot_dir=... a restarted server "
                    "goes on.",
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
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._closed.set()
        self._watchdog.fire()
        with self._stream_lock:
            self._drop_stream()
        self._drop_client(self._client)
        self._watchdog.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _until_answered(self, what: str, attempt: Callable[[], _Answer]) -> _Answer:
        # Not the errors: their frames hold channels, which would connect again unused.
        failures: list[str] = []
        began = time.monotonic()

        def answered() -> tuple[_Answer] | None:
            if self._closed.is_set():
                raise ConnectionLost(
                    f"{self._name} was asked for {what!r} after the connection was "
                    "closed here.",
                    culprit=self.task,
                )
            try:
                return (attempt(),)
            except _lost_errors() as error:
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
            self.retry_timeout_seconds,
            late=late,
            reminder=lambda waited: (
                f"{self._name} does not answer to {what!r} for {waited:.0f} s: "
                f"{failures[-1]}. It is not there yet, or was lost, or another program "
                "has its port, or the job is done and its servers have ended. Trying "
                "again"
            ),
            # Tasks of a cluster do not start at the same moment.
            is_early=True,
            pauses=_PAUSES,
            # Workers that lost the same server must not all come back at once.
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

    def _connected(self) -> wire.FlightClient:
        """Return a client after the handshake, on a channel not known to be lost."""
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
        """In what this task differs from the server, if that is why it is refused."""
        if isinstance(error, ServerRefused) and error.kind == "VersionMismatch":
            return str(error)
        caller = self._hello.get("caller")
        if caller and isinstance(error, wire.flight().FlightUnauthenticatedError):
            return self._credentials.mismatch(caller, self._name)
        return None

    def _drop_client(self, client: wire.FlightClient | None) -> None:
        """Discard the channel: its reconnect back-off is too long."""
        with self._client_lock:
            if client is self._client:
                self._client = None

    def _ping(self, seconds: float) -> None:
        """Give up the stream if its server does not answer on the same connection."""
        if (stream := self._stream) is None:
            return
        patience = self._silence_timeout * 3 / 4 * 2**self._num_lost
        seconds = min(seconds, self._reply_timeout, patience)
        try:
            _act(stream.client, "hello", b"{}", self._options(seconds))
        except (*_lost_errors(), ServerRefused):
            self._num_lost += 1
            self._drop_client(stream.client)
            stream.cancel()  # Whoever waits for it, or comes next, makes another one.

    def _act(self, name: str, body: bytes, timeout: float) -> Any:
        client = self._connected()
        try:
            answer = _act(client, name, body, self._options(timeout))
        except _lost_errors() as error:
            if _refusal_in(error) is None:
                self._drop_client(client)
            raise
        if answer["incarnation"] != self.incarnation:
            self._drop_client(client)  # A new one says hello, and is compared.
            self.incarnation = answer["incarnation"]
        return answer["value"]

    def _attempt(
        self,
        header: JSONObject,
        vectors: Mapping[str, np.ndarray],
        timeout: float,
    ) -> tuple[JSONObject, dict[str, np.ndarray]]:
        client = self._connected()
        try:
            if self._stream is None:
                memory = SharedMemory.make() if self.shares_memory else None
                self._stream = _FlightStream(client, self._options(None), memory)
            stream = self._stream
            with self._watchdog.watch(timeout, stream.cancel) as progress:
                answer = self._transfer(stream, header, vectors, progress)
        except BaseException:
            self._drop_stream()
            self._drop_client(client)
            raise
        if "error" in answer[0]:
            raise ServerRefused(answer[0]["error"], answer[0].get("kind", ""))
        return answer

    def _transfer(
        self,
        stream: "_FlightStream",
        header: JSONObject,
        vectors: Mapping[str, np.ndarray],
        progress: Callable[[], None],
    ) -> tuple[JSONObject, dict[str, np.ndarray]]:
        self.bytes_sent += stream.messages.send(header, vectors, progress)
        answer = stream.messages.receive_header()
        if answer is None:
            raise ConnectionResetError("the server ended the stream")
        progress()
        announcement = wire.announced(answer, None)
        del answer["vectors"]
        results = stream.messages.receive_vectors(announcement, progress)
        self.bytes_received += sum(vector.nbytes for vector in results.values())
        return answer, results

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _FlightStream:
    """A Flight stream to a server, to which `memory` is offered."""

    def __init__(
        self,
        client: wire.FlightClient,
        options: object,
        memory: SharedMemory | None,
    ) -> None:
        offer = b"" if memory is None else memory.offer
        self.client = client
        descriptor = wire.flight().FlightDescriptor.for_command(offer)
        writer, reader = client.do_exchange(descriptor, options)
        self.messages = MessageStream(reader, writer, memory)
        self._memory = memory

    def cancel(self) -> None:
        """Cancel calls in progress; from any thread."""
        self.messages.reader.cancel()

    def close(self) -> None:
        """End the stream; the server need not answer."""
        self.cancel()
        try:
            self.messages.writer.close()
        except _lost_errors():
            pass  # It was lost, or has just been cancelled.
        if self._memory is not None:
            self._memory.close()


def _act(
    client: wire.FlightClient, name: str, body: bytes, options: object
) -> JSONObject:
    results = list(client.do_action((name, body), options))
    if len(results) != 1:
        raise wire.WireError(f"{name!r} has {len(results)} results; expected one")
    answer = json.loads(results[0].body.to_pybytes())
    if "error" in answer:
        raise ServerRefused(answer["error"], answer.get("kind", ""))
    return answer


def _lost_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError)


def _refusal_in(error: Exception) -> ServerRefused | None:
    """The server's refusal in an error; None: the connection was lost."""
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
    """A Flight error's message, shortened."""
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
