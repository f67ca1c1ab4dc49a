"""Parses the addresses of tasks, `host:port`."""

import ipaddress
import re
from typing import NamedTuple

__all__ = ["Address", "parse_address"]

_PORT = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"[\w.-]+")
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_EXAMPLE = "such as 'host1:2222' or '[fd00::1]:2222'"


class Address(NamedTuple):
    """Host and port that a task listens on.

    Attributes:
        host: A name in lower case or an IP address in its shortest form, without
            brackets.
        port: 1 to 65535.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether `host` is a loopback address, which no other machine can reach."""
        try:
            ip = ipaddress.ip_address(self.host)
        except ValueError:
            name = self.host.removesuffix(".")
            return name in _LOOPBACK_NAMES or name.endswith(".localhost")
        return ip.is_loopback or ip.is_unspecified


def parse_address(text: object) -> Address:
    """Parse the address of a task.

    Args:
        text: `"host:port"`; an IPv6 address in brackets.

    Raises:
        ValueError: If `text` is no address; the message does not show `text`.

    Example:
        >>> parse_address("Host1:2222")
        Address(host='host1', port=2222)
        >>> parse_address("[::0001]:2222").is_loopback
        True
    """
    if not isinstance(text, str):
        raise ValueError(f"it is not a string {_EXAMPLE}")
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
    if not _HOST.fullmatch(text):
        raise ValueError(
            f"{text!r} is no host name: only letters, digits, '-', '_' and '.' are "
            "allowed, and an IPv6 address needs brackets, such as '[fd00::1]:2222'"
        )
    return text.lower()
