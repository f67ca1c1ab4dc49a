"""Who may call a parameter server: its credentials, and limits for everybody else.

Credentials are a shared token and TLS files. Every task of a cluster has the same
token. Whoever has it can read and change the model, so it stands in no log and no
message, and a file with it is its owner's only.

gRPC takes the whole body of a call into memory before the token can be checked, and
keeps connections that never call. Flight has no limit to set for either. So the
process's own sockets are looked at 20 times a second: a connection without the token is
closed once it has sent too much or stayed too long. What strangers can make a server
hold is so bounded by what arrives within a twentieth of a second.
"""

import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

__all__ = [
    "Credentials",
    "LimitedLog",
    "UnauthenticatedConnections",
    "host_of",
    "new_token",
    "peer_of",
]

TOKEN = "REPLICAX_PS_TOKEN"
TOKEN_FILE = "REPLICAX_PS_TOKEN_FILE"
TLS_CERTIFICATE = "REPLICAX_PS_TLS_CERT"
TLS_KEY = "REPLICAX_PS_TLS_KEY"
TLS_ROOT = "REPLICAX_PS_TLS_ROOT"

_LEAST_CHARACTERS = 16
_HOW = (
    "Make one with replicax.ps.credentials.new_token() and give the same one to every "
    f"task of the cluster: its text in {TOKEN}, or the path of a file in {TOKEN_FILE}. "
    "`replicax run` does this by itself."
)


def new_token() -> str:
    """A new token for a cluster: 256 random bits as 43 characters.

    Example:
        >>> len(new_token())
        43
    """
    return secrets.token_urlsafe(32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The token of a cluster and, where it uses TLS, certificates.

    Attributes:
        token: At least 16 visible ASCII characters. `repr` does not show it.
        tls_certificate: A server's certificate chain, PEM. None: no TLS.
        tls_key: The private key that belongs to it, PEM.
        tls_root: The certificates that workers trust, PEM. None: no TLS, or those that
            the machine trusts if `tls_certificate` is given.

    Raises:
        ValueError: If the token is too short or has other characters, or if only one
            of certificate and key is given.

    Example:
        >>> credentials = Credentials(token=new_token())
        >>> credentials
        Credentials(token=<hidden>, tls=False)
        >>> credentials.accepts("a guess")
        False
    """

    token: str
    tls_certificate: bytes | None = None
    tls_key: bytes | None = None
    tls_root: bytes | None = None

    def __post_init__(self) -> None:
        if len(self.token) < _LEAST_CHARACTERS:
            raise ValueError(
                f"The token of a parameter-server cluster has {len(self.token)} "
                f"characters, and needs at least {_LEAST_CHARACTERS}. {_HOW}"
            )
        if not all("!" <= character <= "~" for character in self.token):
            raise ValueError(
                "The token of a parameter-server cluster has other characters than "
                f"visible ASCII ones. {_HOW}"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                f"TLS needs a certificate ({TLS_CERTIFICATE}) and its key ({TLS_KEY}); "
                "only one of them is given."
            )

    def __repr__(self) -> str:
        return f"Credentials(token=<hidden>, tls={self.tls})"

    @property
    def tls(self) -> bool:
        """Whether the cluster's connections are encrypted."""
        return self.tls_certificate is not None or self.tls_root is not None

    def accepts(self, token: str) -> bool:
        """Whether a caller's token is this one; the time taken tells nothing of it."""
        return hmac.compare_digest(
            self.token.encode(), token.encode("utf-8", "replace")
        )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> "Credentials":
        """The credentials that environment variables name.

        `REPLICAX_PS_TOKEN` is the token, or `REPLICAX_PS_TOKEN_FILE` the path of a file
        with it. `REPLICAX_PS_TLS_CERT`, `REPLICAX_PS_TLS_KEY` and
        `REPLICAX_PS_TLS_ROOT` are paths of PEM files: servers need the first two,
        workers the last.

        Args:
            environment: The variables. None: those of this process.

        Raises:
            ValueError: If there is no token, or it is none.
            PermissionError: If other users of the machine may read the file with the
                token or the key.
            OSError: If a file cannot be read.
        """
        variables = os.environ if environment is None else environment
        return cls(
            token=_token(variables),
            tls_certificate=_pem(variables, TLS_CERTIFICATE),
            tls_key=_pem(variables, TLS_KEY, secret=True),
            tls_root=_pem(variables, TLS_ROOT),
        )


def _token(variables: Mapping[str, str]) -> str:
    if token := variables.get(TOKEN):
        return token.strip()
    if path := variables.get(TOKEN_FILE):
        return _read(path, TOKEN_FILE, secret=True).decode("ascii", "replace").strip()
    raise ValueError(
        f"There is no token for the parameter servers: neither {TOKEN} nor "
        f"{TOKEN_FILE} is set. {_HOW}"
    )


def _pem(
    variables: Mapping[str, str], name: str, *, secret: bool = False
) -> bytes | None:
    path = variables.get(name)
    if not path:
        return None
    data = _read(path, name, secret=secret)
    if b"-----BEGIN " not in data:
        raise ValueError(f"{name} names {path!r}, which is no PEM file.")
    return data


def _read(path: str, name: str, *, secret: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if secret and os.name == "posix" and mode & 0o007:
                raise PermissionError(
                    f"{name} names {path!r}, which every user of this machine may "
                    f"read (mode {mode:04o}). Forbid it: chmod 600 {path}, and make a "
                    "new one if the machine is not yours alone."
                )
            return file.read(1 << 20)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name} names {path!r}, and there is no such file."
        ) from error


_logger = logging.getLogger("replicax")


_POLL_SECONDS = 0.05


_LINKS = os.path.isdir("/proc/self/fd")  # Linux, where they say what is a socket.


_DESCRIPTORS = "/proc/self/fd" if _LINKS else "/dev/fd"


_BYTES_RECEIVED = 128  # Where the kernel's tcp_info has their number.


_MINUTE = 60.0


_SHOWN = 8  # Addresses in a summary.


Peer = tuple[str, int]


def peer_of(text: str) -> str:
    """A peer as gRPC writes it, as `host:port`.

    Example:
        >>> peer_of("ipv4:192.0.2.7:50062"), peer_of("ipv6:%5B::1%5D:50062")
        ('192.0.2.7:50062', '[::1]:50062')
    """
    return _shown(_parse(text))


def host_of(peer: str) -> str:
    """The host of what `peer_of` returned.

    Example:
        >>> host_of("192.0.2.7:50062"), host_of("[::1]:50062")
        ('192.0.2.7', '::1')
    """
    return peer.rpartition(":")[0].strip("[]")


@functools.lru_cache(4096)  # Each call asks.
def _parse(text: str) -> Peer:
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    """One spelling for each address: IPv4 inside IPv6 as IPv4, without a zone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)


def _shown(peer: Peer) -> str:
    host, port = peer
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class LimitedLog:
    """Warnings of the `replicax` logger, of which a flood cannot fill a disk.

    Each kind of warning may be written `per_minute` times, and from one address a
    quarter of that: a flood of one kind, or from one address, hides no other. What is
    left out is counted by both.

    Example:
        >>> log = LimitedLog(per_minute=8)
        >>> for _ in range(5):
        ...     log.warn("idle connections", "192.0.2.7", "closed one from 192.0.2.7")
        >>> log.unwritten
        3
    """

    def __init__(
        self, per_minute: int = 60, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = per_minute
        self._now = now
        self._lock = threading.Lock()
        self._minute_began = now()
        self._written: Counter[tuple[str, ...]] = Counter()
        self._left_out: Counter[tuple[str, str]] = Counter()

    @property
    def unwritten(self) -> int:
        """How many warnings of this minute were left out."""
        return self._left_out.total()

    def warn(self, kind: str, address: str, message: str) -> None:
        """Write a warning that an address caused, or count it; `kind` is a plural."""
        self.tick()
        with self._lock:
            of_address = self._written[kind, address]
            write = self._written[(kind,)] < self._per_minute and of_address < max(
                1, self._per_minute // 4
            )
            if write:
                self._written.update([(kind,), (kind, address)])
            else:
                self._left_out[kind, address] += 1
        if write:
            _logger.warning("%s", message)

    def tick(self) -> None:
        """Begin a new minute, if it is time; to be called now and then."""
        with self._lock:
            late = self._now() - self._minute_began >= _MINUTE
            if late:
                self._minute_began = self._now()
                self._written.clear()
        if late:
            self.flush()

    def flush(self) -> None:
        """Write how many warnings were only counted, by kind and address."""
        with self._lock:
            counts, self._left_out = self._left_out, Counter()
        if not counts:
            return
        most = counts.most_common(_SHOWN)
        shown = [f"{n} {kind} of {who}" for (kind, who), n in most]
        if rest := counts.total() - sum(n for _, n in most):
            shown.append(f"{rest} others")
        _logger.warning("Warnings that were left out: %s.", ", ".join(shown))


class UnauthenticatedConnections:
    """Watches the connections to one port of this process.

    One on which no call has shown the token may stay for `limit_seconds` and send
    `limit_bytes`. The time is counted in looks: one for which this process was stopped,
    or had no processor, is nobody's fault.
    """

    def __init__(
        self,
        port: int,
        log: LimitedLog,
        *,
        limit_seconds: float = 10.0,
        limit_bytes: int = 5 << 20,
    ) -> None:
        self._port = port
        self._log = log
        self._limit_looks = limit_seconds / _POLL_SECONDS
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._accepted: set[Peer] = set()
        self._looks: Counter[Peer] = Counter()  # At each of the others.
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"replicax-ps-connections-{port}", daemon=True
        )

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def accept(self, peer: str) -> None:
        """A call with the right token came over this connection."""
        with self._lock:
            self._accepted.add(_parse(peer))

    def report(self, what: str) -> None:
        """Say that a call without the right token was refused, and whose it was.

        Flight does not tell whose. It is one of the connections not accepted so far.
        """
        peers = []
        for peer, sock in _connections(self._port):
            sock.close()
            if not self._is_accepted(peer):
                peers.append(peer)
        text = " or ".join(_shown(peer) for peer in peers[:_SHOWN])
        if len(peers) > _SHOWN:
            text += f" or {len(peers) - _SHOWN} others"
        hosts = {host for host, _ in peers}
        self._log.warn(
            "calls without the right token",
            hosts.pop() if len(hosts) == 1 else "one of several addresses",
            f"{what} Refused; it came from {text or 'an unknown address'}.",
        )

    def disconnect(self) -> None:
        """End all connections to the port, whatever goes on in them."""
        for _, sock in _connections(self._port):
            _end(sock)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._log.flush()

    def _is_accepted(self, peer: Peer) -> bool:
        with self._lock:
            return peer in self._accepted

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self._look()
            self._log.tick()

    def _look(self) -> None:
        with self._lock:
            before = set(self._accepted)  # Those that are gone now have ended.
        present = set()
        for peer, sock in _connections(self._port):
            present.add(peer)
            if self._is_accepted(peer):
                sock.close()
            else:
                self._judge(peer, sock)
        with self._lock:
            self._accepted -= before - present
        for peer in self._looks.keys() - present:
            del self._looks[peer]

    def _judge(self, peer: Peer, sock: socket.socket) -> None:
        self._looks[peer] += 1
        looks, size = self._looks[peer], _bytes_received(sock)
        if looks <= self._limit_looks and size <= self._limit_bytes:
            sock.close()
            return
        _end(sock)
        self._log.warn(
            "connections that stayed or sent without a token",
            peer[0],
            f"Closed the connection from {_shown(peer)} to port {self._port}: it sent "
            f"{size} bytes in {looks * _POLL_SECONDS:.1f} s and no valid token.",
        )


def _connections(port: int) -> Iterator[tuple[Peer, socket.socket]]:
    """This process's connections to its own port, each as a second descriptor."""
    for name in os.listdir(_DESCRIPTORS):
        if _LINKS:
            try:
                link = os.readlink(f"{_DESCRIPTORS}/{name}")
            except OSError:  # Closed since.
                continue
            if not link.startswith("socket:"):
                continue
        if (found := _connection(int(name), port)) is not None:
            yield found


def _connection(descriptor: int, port: int) -> tuple[Peer, socket.socket] | None:
    try:
        copy = os.dup(descriptor)
    except OSError:  # Closed since.
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # Not a socket.
        os.close(copy)
        return None
    try:
        is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and sock.getsockname()[1] == port:
            host, peer_port = sock.getpeername()[:2]
            return (_plain(host), peer_port), sock
    except OSError:  # It listens, or is no longer connected.
        pass
    sock.close()
    return None


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side was faster.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _bytes_received(sock: socket.socket) -> int:
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, 256)
    except OSError:
        return 0
    if len(info) < _BYTES_RECEIVED + 8:
        return 0
    return struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
