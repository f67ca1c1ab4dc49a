"""The output of many tasks on one terminal or in one file."""

import sys
import threading
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.text import Text

__all__ = ["TaskConsole"]

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_LONGEST_LINE_BYTES = 1 << 24  # A task that never ends its line must not fill memory.


class TaskConsole:
    """Writes whole lines, each behind the name of the task it comes from.

    Lines come out as the tasks wrote them, byte by byte, and never one inside another.
    Prefixes are coloured on a terminal only.

    Args:
        names: The names of all tasks.
        stream: Where to write to; None: `sys.stdout`.

    Attributes:
        error: Why nothing can be written any more, such as a terminal that was closed.
            From then on output is dropped.
    """

    def __init__(self, names: Sequence[str], stream: IO[bytes] | None = None) -> None:
        self.error: OSError | None = None
        self._stream = sys.stdout.buffer if stream is None else stream
        self._lock = threading.Lock()
        self._begun = {name: bytearray() for name in names}
        self._prefixes = _prefixes(names)

    def take(self, name: str, chunk: bytes) -> None:
        """Write the lines that are complete with what a task has written now.

        Args:
            name: The task's name.
            chunk: What it wrote; nothing at the end, which ends a line too.
        """
        begun = self._begun[name]
        if not chunk:
            lines = bytes(begun)
        elif b"\n" in chunk or len(begun) > _LONGEST_LINE_BYTES:
            head, newline, tail = chunk.rpartition(b"\n")
            lines = b"".join((begun, head, newline) if newline else (begun, tail))
            chunk = tail if newline else b""
        else:
            begun += chunk
            return
        begun[:] = chunk
        prefix = self._prefixes[name]
        self._write(
            b"".join(
                prefix + line if line.endswith(b"\n") else prefix + line + b"\n"
                for line in _lines(lines)
            )
        )

    def say(self, message: str) -> None:
        """Write a message of the launcher itself, on stderr."""
        text = "".join(f"replicax: {line}\n" for line in message.splitlines())
        with self._lock:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except OSError as error:
                self.error = error

    def _write(self, text: bytes) -> None:
        with self._lock:
            if self.error is not None:
                return
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError as error:
                self.error = error


def _lines(text: bytes) -> list[bytes]:
    # Not `splitlines`: a carriage return is part of a line.
    lines = [line + b"\n" for line in text.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _prefixes(names: Sequence[str]) -> dict[str, bytes]:
    console = Console(highlight=False, soft_wrap=True)
    width = max(map(len, names))
    prefixes = {}
    for i, name in enumerate(names):
        with console.capture() as capture:
            text = Text(f"{name:{width}} | ", _STYLES[i % len(_STYLES)])
            console.print(text, end="")
        prefixes[name] = capture.get().encode()
    return prefixes
