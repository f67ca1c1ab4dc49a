"""Parses and compares the addresses of tasks, `host:port`."""

import ipaddress
import re
import socket
from typing import NamedTuple

__all__ = ["Address", "parse_address"]

_PORT = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"[\w.-]+")
_NUMBERS = re.compile(r"[0-9.]+")
_LOOPBACKS = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))
# As /etc/hosts has them.
_LOOPBACK_NAMES = frozenset(
    f"localhost{n}{domain}" for n in ("", 4, 6) for domain in ("", f".localdomain{n}")
) | {"ip6-localhost", "ip6-loopback"}
_EXAMPLE = "such as 'host1:2222' or '[fd00::1]:2222'"


class Address(NamedTuple):
    """Host and port that a task listens on.

    Attributes:
        host: A name in lower case or an IP address in its shortest form, without
            brackets. Equal for addresses that differ in spelling only.
        port: 1 to 65535.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether `host` is a loopback address, which no other machine can reach."""
        ip = self._ip
        if ip is None:
            name = self.host.removesuffix(".")
            return name in _LOOPBACK_NAMES or name.endswith(".localhost")
        return ip.is_loopback or ip.is_unspecified

    @property
    def endpoint(self) -> "Address":
        """The normalized address, equal for all spellings; without a DNS lookup.

        Example:
            >>> parse_address("localhost.:80").endpoint == (
            ...     parse_address("[::1]:80").endpoint
            ... )
            True
        """
        ip = self._ip
        if ip is None:
            is_local, host = self.is_loopback, self.host.removesuffix(".")
        else:
            is_local, host = ip.is_unspecified or ip in _LOOPBACKS, ip.compressed
        return Address("localhost" if is_local else host, self.port)

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """`host` as an IP address; None for a name."""
        if _NUMBERS.fullmatch(self.host):
            try:
                return ipaddress.IPv4Address(socket.inet_aton(self.host))  # 127.1, say.
            except OSError:
                return None
        try:
            ip = ipaddress.ip_address(self.host)
        except ValueError:
            return None
        return getattr(ip, "ipv4_mapped", None) or ip


def parse_address(text: object) -> Address:
    """Parse the address of a task.

    Args:
        text: `"host:port"`; an IPv6 address in brackets.

    Raises:
        ValueError: If `text` is no address; the message has no "got" part.

    Example:
        >>> parse_address("Host1:2222")
        Address(host='host1', port=2222)
        >>> parse_address("[::0001]:2222").is_loopback
        True
    """
    if not isinstance(text, str):
        raise ValueError(f"it is not a string {_EXAMPLE}")
    if "//" in text:
        raise ValueError(
            f"it has a scheme; expected no more than an address {_EXAMPLE}"
        )
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        raise ValueError(f"it has no port; expected an address {_EXAMPLE}")
    return Address(_host(host), _port(port))


def _port(text: str) -> int:
    port = int(text) if _PORT.fullmatch(text) else 0
    if not 1 <= port <= 65535:
        raise ValueError(f"its port {text!r} is not a number from 1 to 65535")
    return port


def _host(text: str) -> str:
    if not text:
        raise ValueError(f"it has no host; expected an address {_EXAMPLE}")
    if text.startswith("[") and text.endswith("]"):
        try:
            return ipaddress.IPv6Address(text[1:-1]).compressed
        except ValueError as error:
            raise ValueError(f"{text[1:-1]!r} is no IPv6 address") from error
    if ":" in text:
        raise ValueError("an IPv6 address needs brackets, such as '[fd00::1]:2222'")
    if not _HOST.fullmatch(text):
        raise ValueError(
            f"{text!r} is no host name: it has other characters than "
            "letters, digits, '-', '_' and '.'"
        )
    return text.lower()
