"""A chief that is killed when the servers know that its script has ended."""

import time

import pytest
from tests.launch.jobs import HEAD
from typer.testing import CliRunner

from replicax.cli import app

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(100)]

KILLED = """
if name == "worker:0" and attempt == 0:
    mark("over")
    {before}
    os.kill(os.getpid(), signal.SIGKILL)
"""
# The restarted chief finds no server, and waits for it.
CODE = """
if name == "worker:0":
    print("again")
    time.sleep(100)
wait_for("over")
{server}
"""
OPTIONS = ("--workers", "2", "--ps", "2", "--backoff-seconds", "0.1")


@pytest.mark.parametrize(
    ("before", "server", "output"),
    [
        # It dies after the servers.
        ("time.sleep(3)", "", ""),
        # The servers end while it waits for its restart, or tries to join.
        ("", "time.sleep(2)", "worker:0 | again"),
        # One server was killed before it could end as well.
        ("", "time.sleep(2 if name != 'ps:0' else 100)", "worker:0 | again"),
    ],
    ids=["after", "before", "one_killed"],
)
@pytest.mark.slow(but=["before"])
def test_the_job_is_done(tmp_path, before, server, output):
    script = tmp_path / "train.py"
    script.write_text(HEAD + KILLED.format(before=before) + CODE.format(server=server))
    began = time.monotonic()
    result = CliRunner().invoke(
        app, ["run", *OPTIONS, "--grace-seconds", "3", str(script), str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == output
    assert "worker:0 was killed by SIGKILL" in result.stderr
    assert time.monotonic() - began < 40
