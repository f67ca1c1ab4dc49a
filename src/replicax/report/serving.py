"""Serves the page of a running training, to this machine's browsers only."""

import hashlib
import http.server
import re
import secrets
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

from replicax.report.journal import folder_of, number_of
from replicax.report.page import page_of
from replicax.report.runs import read_run

__all__ = ["ReportServer"]

_HOST = "127.0.0.1"
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_TIMEOUT_S = 10.0
_REFRESH_S = 15


class ReportServer(http.server.ThreadingHTTPServer):
    """An HTTP server on the loopback address for one page, rendered on request.

    It accepts requests from this machine only, with a `Host` that names this machine.
    """

    daemon_threads = True

    def __init__(self, page: Path, port: int = 0) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._state: object = None
        self._made: tuple[bytes, str, str] = b"", "", ""
        super().__init__((_HOST, port), _Handler)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.port}/"

    def is_addressed(self, host: str) -> bool:
        """Whether a request's `Host` names this machine; else it is DNS rebinding.

        Another site's name may resolve to this machine, but the browser sends that
        site's name as `Host`. The port may differ, as behind a tunnel.
        """
        return _LOCAL.fullmatch(host) is not None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections; print other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def content(self) -> tuple[bytes, str, str]:
        """Render the page if need be; return it, its ETag and its security policy."""
        with self._lock:
            # The page shows the time since the last event, so it is renewed regularly.
            state = self._files(), int(time.monotonic() / _REFRESH_S)
            if state != self._state:
                self._made, self._state = self._make(), state
            return self._made

    def _files(self) -> tuple[tuple[str, int, int], ...]:
        folder = folder_of(self._page)
        if not folder.is_dir():
            return ()
        found = []
        for file in sorted(folder.iterdir()):
            if number_of(file) is not None:
                about = file.stat()
                found.append((file.name, about.st_size, about.st_mtime_ns))
        return tuple(found)

    def _make(self) -> tuple[bytes, str, str]:
        nonce = secrets.token_urlsafe(16)
        page = page_of(read_run(self._page), nonce=nonce).encode()
        tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
            f"script-src 'nonce-{nonce}'; frame-ancestors 'none'; base-uri 'none'"
        )
        return page, tag, policy


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = _TIMEOUT_S
    server_version = "replicax"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    @property
    def _report(self) -> ReportServer:
        assert isinstance(self.server, ReportServer)
        return self.server

    def _answer(self, *, with_body: bool) -> None:
        if not self._report.is_addressed(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "Ask for 127.0.0.1 or localhost.")
        elif self.path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "There is only one page, /.")
        else:
            self._send_page(with_body)

    def _send_page(self, with_body: bool) -> None:
        try:
            page, tag, policy = self._report.content()
        except OSError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"Not readable: {error}")
            return
        is_known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if not is_known:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if with_body and not is_known:
            self.wfile.write(page)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        body = f"{reason}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a browser sends a request every few seconds."""
