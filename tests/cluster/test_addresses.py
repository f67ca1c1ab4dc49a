"""Addresses of tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a:1", "a", 1),
        ("Node_1.Example.COM:65535", "node_1.example.com", 65535),
        ("10.0.0.1:2222", "10.0.0.1", 2222),
        ("[fd00:0::1]:2222", "fd00::1", 2222),
        ("[fe80::1%eth0]:2222", "fe80::1%eth0", 2222),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("host", "no port"),
        ("[fd00::1]", "no port"),
        ("", "no port"),
        (":2222", "no host"),
        ("a:", "port ''"),
        ("a:0", "port '0'"),
        ("a:65536", "port '65536'"),
        ("a:-1", "port '-1'"),
        ("a:٣", "port '٣'"),
        ("a: 1", "port ' 1'"),
        ("a:" + "9" * 5000, "is not a number"),
        ("fd00::1:2222", "needs brackets"),
        ("[a]:1", "'a' is no IPv6 address"),
        ("[]:1", "'' is no IPv6 address"),
        ("http://a:1", "'http://a' is no host name"),
        ("a b:1", "'a b' is no host name"),
        ("user@a:1", "'user@a' is no host name"),
        (1, "not a string"),
        (None, "not a string"),
    ],
)
def test_what_is_no_address(text: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("db.localhost", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("[::1]", True),
        ("[0:0:0:0:0:0:0:1]", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127host", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert parse_address(f"{host}:1").is_loopback is loopback


@given(st.text())
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert address.host
    assert 1 <= address.port <= 65535
