"""`replicax monitor`: one page, for this machine alone, that follows a training."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.test_runs import begin, epoch
from typer.testing import CliRunner

from replicax.cli import app
from replicax.report.journal import Journal
from replicax.report.serving import ReportServer


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


@pytest.fixture
def server(page: Path) -> Iterator[ReportServer]:
    with ReportServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=10)
    assert not thread.is_alive()


def ask(server, path="/", method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        sent = {"Host": host or f"127.0.0.1:{server.port}"} | headers
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_the_page_grows(server, page) -> None:
    assert "Nothing is here yet" in ask(server)[2]
    journal = Journal(page, 0, fresh=True, clears=True)
    journal.begin(begin(model="digits"))
    assert "No epoch has ended yet" in ask(server)[2]
    journal.add(epoch(0))
    status, headers, text = ask(server)
    assert status == 200
    assert "Training report: digits" in text
    assert "Numbers" in text
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    nonce = re.search(r'<script nonce="([^"]+)"', text)
    assert nonce is not None
    assert f"'nonce-{nonce[1]}'" in headers["Content-Security-Policy"]
    assert not page.exists()  # It is not the monitor's to write.


def test_what_the_browser_has_is_not_sent_again(server, page, monkeypatch) -> None:
    monkeypatch.setattr("replicax.report.serving._REFRESH_S", 1e6)
    journal = Journal(page, 0, fresh=True, clears=True)
    journal.begin(begin())
    tag = ask(server)[1]["ETag"]
    status, _, text = ask(server, **{"If-None-Match": tag})
    assert (status, text) == (304, "")
    journal.add(epoch(0))
    assert ask(server, **{"If-None-Match": tag})[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.test", "evil.test:{port}", "localhost.evil.test", "x@localhost:{port}", ""],
)
def test_other_hosts_are_refused(server, host) -> None:
    host = host.format(port=server.port) or " "
    status, _, text = ask(server, host=host)
    assert (status, "<html" in text) == (403, False)


@pytest.mark.parametrize("host", ["localhost:{port}", "localhost:1", "LOCALHOST"])
def test_localhost_is_this_machine(server, host) -> None:
    """By any port, as that of a tunnel may be another one."""
    assert ask(server, host=host.format(port=server.port))[0] == 200


def test_a_browser_that_goes_is_no_error(server, capfd) -> None:
    for error in (BrokenPipeError(), ConnectionResetError()):
        try:
            raise error
        except ConnectionError:
            server.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/report.html", "/worker-0.jsonl", "/?x=1"]
)
def test_there_is_one_page(server, page, path) -> None:
    page.write_text("secret")
    status, _, text = ask(server, path)
    assert status == 404
    assert "secret" not in text


def test_nothing_can_be_sent(server) -> None:
    assert ask(server, method="POST")[0] == 501
    status, headers, text = ask(server, method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 0


def test_a_file_that_cannot_be_read_is_said(server, page) -> None:
    journal = Journal(page, 0, fresh=True, clears=True)
    journal.path.unlink()
    journal.path.mkdir()
    status, _, text = ask(server)
    assert status == 500
    assert "Not readable" in text


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["monitor", "r.html", "--port", port])
    assert result.exit_code == 2
    assert "cannot be used" in " ".join(result.output.replace("│", " ").split())


def test_a_folder_is_no_page(tmp_path) -> None:
    Journal(tmp_path / "a.html", 0, fresh=True, clears=True)
    result = CliRunner().invoke(app, ["monitor", str(tmp_path)])
    assert result.exit_code == 2
    text = "".join(result.output.replace("│", " ").split())
    assert "isafolder" in text
    assert f"givenit:{tmp_path / 'a.html'}." in text


@pytest.mark.multiprocess
def test_ctrl_c_ends_it(page) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from replicax.cli import main; main()",
            "monitor",
            page,
        ],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert re.search(r"http://127\.0\.0\.1:\d+/ ", first)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            killer.cancel()
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "waiting for it" in errors
