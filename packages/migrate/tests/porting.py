"""Ports a text as every script must be ported, and runs it."""

from typing import Any

from replicax_migrate import port


def ported(source: str) -> tuple[str, list[str]]:
    """The ported text, and what is left; it compiles, and a second port is the same."""
    result = port(f"{source}\n".encode())
    compile(result.source, "ported", "exec")
    assert port(result.source).source == result.source
    return result.source.decode(), [finding.reason for finding in result.left]


def executed(text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """All names of a text that was run; `names` are there before."""
    names = {} if names is None else names
    exec(text, names)
    return names


def run(source: str) -> dict[str, Any]:
    """The names of a script, once it is ported and run; nothing is left by hand."""
    text, left = ported(source)
    assert left == []
    assert "tensorflow" not in text
    return executed(text)
