"""A client of Google Cloud's metadata server, with a deadline for each question.

JAX's own asks six times for an attribute that a machine does not have, which takes 3 s,
and waits for a slow answer without end.
"""

import contextlib
import http.client
import os
import socket
import threading
import time
from typing import NoReturn

from replicax._util.waiting import wait_for

__all__ = ["instance_attribute", "metadata_server"]

# The server's fixed address: its name would go through DNS, which has no deadline.
_ADDRESS = "169.254.169.254"
_PATH = "/computeMetadata/v1/instance/attributes/"
_PAUSES = (0.25, 0.25)


def metadata_server() -> str:
    """Where the metadata server is: `"host"` or `"host:port"`.

    `GCE_METADATA_IP` names another one, as it does for JAX.
    """
    return os.environ.get("GCE_METADATA_IP", "") or _ADDRESS


def instance_attribute(name: str, timeout_seconds: float) -> str | None:
    """One of the machine's custom attributes; None if it has no such one.

    Args:
        name: Such as `"agent-worker-number"`.
        timeout_seconds: How long to wait in all. A server that is busy is asked again.

    Raises:
        OSError: If there is no answer by then, or one that is no metadata server's.
    """
    deadline = time.monotonic() + timeout_seconds

    def answer() -> tuple[int, str] | None:
        status, text = _get(_PATH + name, deadline, timeout_seconds)
        return None if status >= 500 else (status, text)

    def late() -> NoReturn:
        raise TimeoutError(f"nothing within {timeout_seconds:g} s")

    status, text = wait_for(answer, timeout_seconds, late=late, pauses=_PAUSES)
    if status == 404:
        return None
    if status != 200:
        raise OSError(f"it answered with HTTP status {status}")
    return text


def _get(path: str, deadline: float, timeout_seconds: float) -> tuple[int, str]:
    """Status and body of an answer that has come by the deadline."""
    left = deadline - time.monotonic()
    error: Exception | None = None
    if left > 0:
        try:
            answer = _ask(path, deadline, left)
            if time.monotonic() < deadline:
                return answer
        except (OSError, http.client.HTTPException) as failure:
            error = failure
    if time.monotonic() >= deadline or isinstance(error, TimeoutError):
        raise TimeoutError(f"nothing within {timeout_seconds:g} s") from error
    raise OSError(f"{type(error).__name__}: {error}") from error


def _ask(path: str, deadline: float, timeout_seconds: float) -> tuple[int, str]:
    """Status and body of an answer.

    A socket's own timeout begins again with each byte that comes, so the connection is
    shut down when the time is over.
    """
    connection = http.client.HTTPConnection(metadata_server(), timeout=timeout_seconds)
    try:
        connection.connect()
        left = max(0.0, deadline - time.monotonic())
        end = threading.Timer(left, _cut_off, [connection.sock])
        end.daemon = True
        end.start()
        try:
            connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            end.cancel()
            end.join()
    finally:
        connection.close()


def _cut_off(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side may have been first.
        connection.shutdown(socket.SHUT_RDWR)
