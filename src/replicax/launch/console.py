"""Writes the output of many tasks to one terminal or file, with their progress below.

Each line has the name of its task as a prefix; its bytes are unchanged. On a terminal
the last lines show the progress of each task in one line, updated in place.
"""

import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

__all__ = ["TaskConsole"]

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_LONGEST_LINE_BYTES = 1 << 24  # A line without an end must not fill the memory.
_KEPT_LINES = 100
_REFRESH_S = 0.5


class TaskConsole:
    """The stream that all tasks and the launcher write to.

    Args:
        names: The names of all tasks.
        stream: The stream to write to; None: `sys.stdout`.

    Attributes:
        error: The error of a failed write, such as to a closed terminal. The console
            drops the tasks' later output.
    """

    def __init__(self, names: Sequence[str], stream: IO[bytes] | None = None) -> None:
        self.error: OSError | None = None
        self._stream = sys.stdout.buffer if stream is None else stream
        self._lock = threading.Lock()
        self._unfinished = dict.fromkeys(names, b"")
        self._last_lines = {name: deque[bytes](maxlen=_KEPT_LINES) for name in names}
        self._prefixes = _prefixes(names)
        self._live: Live | None = None
        self._refresh_at = 0.0

    def pop_last_lines(self, name: str) -> list[str]:
        """Return and clear the last lines of a task's output, at most a hundred."""
        lines = [line.decode(errors="replace") for line in self._last_lines[name]]
        self._last_lines[name].clear()
        return [line.rstrip() for line in lines]

    def write(self, name: str, chunk: bytes) -> None:
        """Write a chunk of a task's output, line by line; `b""` ends the output."""
        text = self._unfinished[name] + chunk
        flush_rest = not chunk or len(text) > _LONGEST_LINE_BYTES
        # Not `splitlines`: a carriage return is part of a line.
        *lines, rest = text.split(b"\n")
        if flush_rest and rest:
            lines, rest = [*lines, rest], b""
        self._unfinished[name] = rest
        self._last_lines[name].extend(line[:1000] for line in lines)
        self._write(b"".join(self._prefixes[name] + line + b"\n" for line in lines))

    def say(self, message: str) -> None:
        """Write a message of the launcher to stderr."""
        text = "".join(f"replicax: {line}\n" for line in message.splitlines())
        with self._writing():
            if self._live is not None and sys.stderr.isatty():
                self._write_above(self._live, text)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()

    @contextlib.contextmanager
    def display(self, rows: Callable[[], Sequence[Sequence[str]]]) -> Iterator[None]:
        """On a terminal, show one row per task until the context exits."""
        console = Console(highlight=False)
        is_terminal = console.is_terminal and not console.is_dumb_terminal
        if self._stream is sys.stdout.buffer and is_terminal:
            self._live = Live(
                console=console,
                get_renderable=lambda: _grid(rows()),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with self._writing():
                self._live.start(refresh=True)
        try:
            yield
        finally:
            live, self._live = self._live, None
            if live is not None:
                with self._writing():
                    live.stop()

    def refresh(self) -> None:
        """Update the display, at most twice a second."""
        now = time.monotonic()
        if self._live is not None and self.error is None and now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_S
            with self._writing():
                self._live.refresh()

    def _write(self, text: bytes) -> None:
        with self._writing():
            if self.error is not None:
                return
            if self._live is not None:
                self._write_above(self._live, text.decode(errors="replace"))
            else:
                self._stream.write(text)
                self._stream.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock during a write; store an `OSError` in `error`."""
        with self._lock:
            try:
                yield
            except OSError as error:
                self.error = error

    def _write_above(self, live: Live, text: str) -> None:
        # Do not wrap or style the text: it may contain the task's own colors.
        live.console.print(Segments([Segment(text)]), soft_wrap=True, end="")


def _grid(rows: Sequence[Sequence[str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def _prefixes(names: Sequence[str]) -> dict[str, bytes]:
    console = Console(highlight=False, soft_wrap=True)
    width = max(map(len, names))
    prefixes = {}
    for name, color in zip(names, itertools.cycle(_COLORS)):
        with console.capture() as capture:
            console.print(Text(f"{name:{width}} | ", color), end="")
        prefixes[name] = capture.get().encode()
    return prefixes
