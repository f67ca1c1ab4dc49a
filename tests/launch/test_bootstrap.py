"""The guard: what it kills when the starter of a cluster is gone."""

import os
import subprocess
import sys

import pytest

from replicax.launch import bootstrap

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]


def run_guard(announced: bytes, said: bytes, folder: str = "") -> None:
    """Let a guard hear this, and wait for its end."""
    reading, writing = os.pipe()
    os.write(writing, announced)
    os.close(writing)
    try:
        subprocess.run(
            [
                *(sys.executable, "-I", "-S", bootstrap.__file__),
                *("guard", str(reading), folder),
            ],
            input=said,
            pass_fds=(reading,),
            timeout=20,
            check=True,
        )
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("announced", "said", "killed"),
    [
        (b"+%d\n", b"", True),
        (b"", b"+%d\n", True),
        (b"+%d\n", b"+%d\n", True),
        (b"", b"+%d\n-%d\n", False),
        (b"+%d\n", b"+%d\n-%d\n", False),
    ],
)
def test_the_guard_kills_running_tasks(
    announced: bytes, said: bytes, killed: bool
) -> None:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        number = b"%d" % process.pid
        run_guard(announced.replace(b"%d", number), said.replace(b"%d", number))
        if killed:
            assert process.wait(10) == -9
        else:
            assert process.poll() is None
        process.kill()


def test_the_guard_applies_a_start_before_its_end() -> None:
    """Many lines at once, in both pipes: none that has ended stays known."""
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        number = b"%d" % process.pid
        run_guard(b"+%s\n" % number * 2000, b"+%s\n-%s\n" % (number, number) * 2000)
        assert process.poll() is None
        process.kill()
