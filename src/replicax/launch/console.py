"""Multiplexes the output of many tasks to one terminal or file, with a table below."""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

__all__ = ["TaskConsole"]

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_LONGEST_LINE_BYTES = 1 << 24  # A task that never ends its line must not fill memory.
_KEPT_LINES = 100


class TaskConsole:
    """Writes complete lines, each prefixed with the name of its task.

    It passes lines through byte by byte and never interleaves them. On a terminal,
    prefixes have colours and a table stays below the lines; elsewhere the table is
    written once, at the end, to stderr.

    Args:
        names: The names of all tasks.
        stream: The stream to write to; None: `sys.stdout`.

    Attributes:
        error: The error of a write, such as a closed terminal. From then on output is
            dropped.
    """

    def __init__(self, names: Sequence[str], stream: IO[bytes] | None = None) -> None:
        self.error: OSError | None = None
        self._stream = sys.stdout.buffer if stream is None else stream
        self._lock = threading.Lock()
        self._begun = {name: bytearray() for name in names}
        self._ended: set[str] = set()
        self._last = {name: deque[bytes](maxlen=_KEPT_LINES) for name in names}
        self._prefixes = _prefixes(names)
        self._live: Live | None = None
        self._table: RenderableType | None = None

    def take(self, name: str, chunk: bytes) -> None:
        """Write the lines that a chunk of a task's output completes.

        An empty chunk is the end of the output, and completes a line too.
        """
        begun = self._begun[name]
        if name in self._ended:  # The first output after a restart.
            self._last[name].clear()
            self._ended.discard(name)
        if not chunk:
            self._ended.add(name)
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
        whole = _lines(lines)
        self._last[name].extend(line[:1000] for line in whole[-_KEPT_LINES:])
        self._write(
            b"".join(
                prefix + line if line.endswith(b"\n") else prefix + line + b"\n"
                for line in whole
            )
        )

    def last_lines(self, name: str) -> list[str]:
        """The last lines of a task's output, at most a hundred."""
        return [line.decode(errors="replace").rstrip() for line in self._last[name]]

    def say(self, message: str) -> None:
        """Write a message of the launcher to stderr."""
        text = "".join(f"replicax: {line}\n" for line in message.splitlines())
        with self._writing():
            if self._live is not None and sys.stderr.isatty():
                self._write_above(self._live, text)
            else:
                sys.stderr.write(text)
                sys.stderr.flush()

    @property
    def shows_tables(self) -> bool:
        """Whether a table can stay below the lines, as on a terminal."""
        console = Console()
        return (
            self._stream is sys.stdout.buffer
            and sys.stdout.isatty()
            and console.is_terminal
            and not console.is_dumb_terminal
        )

    def show(self, table: RenderableType) -> None:
        """Show a table below the lines, replacing the one before.

        Without a terminal it is only kept, for `end_table`.
        """
        with self._writing():
            self._table = table
            if self.error is not None or not self.shows_tables:
                return
            if self._live is None:
                self._live = Live(
                    console=Console(highlight=False),
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                    vertical_overflow="crop",
                )
                self._live.start()
            self._live.update(table, refresh=True)

    def end_table(self, table: RenderableType | None = None) -> None:
        """Print the last table, by default the one shown last, if there was one."""
        with self._writing():
            live, self._live = self._live, None
            if self._table is None or self.error is not None:
                return
            last = table or self._table
            if live is not None:
                live.update(last, refresh=True)
                live.stop()
            else:
                Console(stderr=True, highlight=False).print(last)

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
        """Hold the lock for a write, and keep an `OSError` as `error`."""
        with self._lock:
            try:
                yield
            except OSError as error:
                self.error = error

    def _write_above(self, live: Live, text: str) -> None:
        # Neither wrapped nor styled: tasks may use colours themselves.
        live.console.print(Segments([Segment(text)]), soft_wrap=True, end="")


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
