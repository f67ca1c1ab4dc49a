"""The output of several tasks on one stream."""

import fcntl
import io
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.launch.console import TaskConsole

NAMES = ["worker:0", "evaluator:0"]
PREFIXES = [b"worker:0    | ", b"evaluator:0 | "]


def written(chunks: list[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    console = TaskConsole(NAMES, stream)
    for name, chunk in chunks:
        console.write(name, chunk)
    return stream.getvalue()


def test_lines_are_whole_and_prefixed() -> None:
    chunks = [
        (NAMES[0], b"a\nb"),
        (NAMES[1], b"x\r50%\ry\n"),
        (NAMES[0], b"c\n\n"),
        (NAMES[1], b"\xff[red]"),
        (NAMES[0], b""),
        (NAMES[1], b""),
    ]
    assert written(chunks) == (
        b"worker:0    | a\n"
        b"evaluator:0 | x\r50%\ry\n"
        b"worker:0    | bc\n"
        b"worker:0    | \n"
        b"evaluator:0 | \xff[red]\n"
    )


@given(st.lists(st.binary(), min_size=2, max_size=2), st.integers())
def test_every_byte_comes_through(outputs: list[bytes], seed: int) -> None:
    """However the outputs are cut and mixed, each can be told from the other."""
    choose = random.Random(seed)
    rest = dict(zip(NAMES, outputs, strict=True))
    chunks = []
    while any(rest.values()):
        name = choose.choice([name for name in NAMES if rest[name]])
        cut = choose.randint(1, len(rest[name]))
        chunks.append((name, rest[name][:cut]))
        rest[name] = rest[name][cut:]
    text = written([*chunks, *((name, b"") for name in NAMES)])
    for output, prefix in zip(outputs, PREFIXES, strict=True):
        lines = text.split(b"\n")
        got = b"".join(
            line.removeprefix(prefix) + b"\n"
            for line in lines
            if line.startswith(prefix)
        )
        assert got == (
            output if output.endswith(b"\n") or not output else output + b"\n"
        )


def test_a_line_without_end_is_cut_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicax.launch.console._LONGEST_LINE_BYTES", 10)
    chunks = [(NAMES[0], b"x" * 8), (NAMES[0], b"x" * 8), (NAMES[0], b"yz")]
    assert written([*chunks, (NAMES[0], b"")]) == (
        PREFIXES[0] + b"x" * 16 + b"\n" + PREFIXES[0] + b"yz\n"
    )


def test_prefixes_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert written([(NAMES[0], b"a\n")]) == b"\x1b[36mworker:0    | \x1b[0ma\n"


def test_a_broken_stream_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.BytesIO):
        def write(self, text: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    console = TaskConsole(NAMES, Broken())
    assert console.error is None
    console.write(NAMES[0], b"a\nb\n")
    assert isinstance(console.error, BrokenPipeError)
    console.write(NAMES[0], b"c\n")
    console.say("one\ntwo")
    assert capsys.readouterr().err == "replicax: one\nreplicax: two\n"


DISPLAY = """
import time
from replicax.launch.console import TaskConsole
console = TaskConsole(["worker:0", "ps:0"])
steps = 0
with console.display(lambda: [("worker:0", "running", f"{steps} steps")]):
    console.write("worker:0", b"first\\n")
    for steps in range(3):
        console._refresh_at = 0.0
        console.refresh()
        console.write("ps:0", b"x" * 150 + b" line %d\\n" % steps)
    console.say("a message")
    steps = 1710
console.write("worker:0", b"over\\n")
"""


def test_the_display_stays_below_the_lines_of_a_terminal() -> None:
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", DISPLAY],
        stdout=side,
        stderr=side,
        env={**os.environ, "TERM": "xterm"},
    )
    assert process.wait(30) == 0
    os.close(side)
    text = os.read(main, 1 << 16).decode()
    os.close(main)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    # Each line is whole, though longer than the terminal is wide.
    assert "ps:0     | " + "x" * 150 + " line 2" in lines
    assert "replicax: a message" in lines
    displays = [line for line in lines if re.match(r"worker:0 +running", line)]
    assert {"0 steps", "1 steps", "2 steps"} <= {d[-7:] for d in displays}
    assert len(displays) > 7, "the display is drawn again below each line"
    assert displays[-1].endswith("1710 steps")
    assert lines[-1] == "worker:0 | over"
    assert "\x1b[1A" in text or "\x1b[2K" in text, "it is updated in place"


def test_plain_lines_without_a_terminal() -> None:
    process = subprocess.run(
        [sys.executable, "-c", DISPLAY],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "steps" not in process.stdout
    assert process.stderr.splitlines() == ["replicax: a message"]
