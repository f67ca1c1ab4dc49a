"""Ports a text as every script must be ported."""

from replicax.migrate import port


def ported(source: str) -> tuple[str, list[str]]:
    """The ported text, and what is left; it compiles, and a second port is the same."""
    result = port(f"{source}\n".encode())
    compile(result.source, "ported", "exec")
    assert port(result.source).source == result.source
    return result.source.decode(), [finding.reason for finding in result.left]
