"""Grain datasets of the records in files, with random access: lines of text.

An index of offsets is made once. So Grain can shuffle all records, and `fit` can resume
an epoch, without reading the files in order.
"""

import functools
import glob
import importlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np

from replicax._util.listing import listed
from replicax.errors import InputError

if TYPE_CHECKING:
    import grain

__all__ = ["Bytes", "Paths", "Records", "file_list", "require_package", "text_lines"]

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""A path or a pattern such as `"train-*.csv"`, or a sequence of them."""

Bytes: TypeAlias = bytes | mmap.mmap

T_co = TypeVar("T_co", covariant=True)

_SEARCHED_AT_ONCE = 2**24


def file_list(paths: Paths, caller: str) -> list[str]:
    """Expand the patterns in `paths`; the files of a pattern are sorted by name.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    files: list[str] = []
    for path in [os.fspath(path) for path in several]:
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path))
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            remedy = f"Pass {path}/*" if os.path.isdir(path) else "Check the path"
            raise FileNotFoundError(
                f"{caller}: {path!r} matches no file. {remedy}; files of a remote "
                "store must be copied or mounted."
            )
        files += matches
    if not files:
        raise FileNotFoundError(f"{caller}: got no paths: {paths!r}.")
    return files


def require_package(name: str, caller: str) -> None:
    """Raise an `ImportError` with the remedy if a package is not installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{caller}: the package {name} cannot be imported here ({error}). Install "
            "it: pip install 'replicax[files]'."
        ) from error


class Records(ABC, Generic[T_co]):
    """A random-access source for Grain, whose checkpoints contain its `repr`.

    Attributes:
        caller: Name of the public function, for errors.
        files: The files' paths.
    """

    caller: str

    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)
        self._modified = [os.stat(file).st_mtime_ns for file in self.files]
        contents = map(_contents, self.files, self._modified)
        self._spans = list(map(self._index, self.files, contents))
        self._first = np.cumsum([0, *map(len, self._spans)])

    @abstractmethod
    def _index(self, file: str, contents: Bytes) -> np.ndarray:
        """Return the records' first and last offsets in a file, `int64[N, 2]`."""

    @abstractmethod
    def _decode(self, contents: Bytes, start: int, end: int, place: str) -> T_co:
        """Decode the record `contents[start:end]`; `place` names it in errors."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> T_co:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        file, row = self.files[number], int(index - self._first[number])
        start, end = self._spans[number][row].tolist()
        contents = _contents(file, self._modified[number])
        place = f"{self.caller}: {file}, record {row + 1}, at byte {start}"
        return self._decode(contents, start, end, place)

    def __repr__(self) -> str:
        return f"{self.caller}({listed(self.files, most=3)}: {len(self)} records)"


@functools.lru_cache(maxsize=256)  # A process may open a limited number of files.
def _contents(file: str, modified: int) -> Bytes:
    with open(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        if status.st_mtime_ns != modified:
            raise InputError(
                f"{file} has changed since its records were indexed. Make the dataset "
                "again, and write new data to a new file."
            )
        if not status.st_size:
            return b""
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def text_lines(paths: Paths) -> "grain.MapDataset[str]":
    r"""Make a Grain dataset of the lines of text files.

    Args:
        paths: Paths of UTF-8 files, or patterns such as `"*.txt"`.

    Returns:
        A `grain.MapDataset` of strings without their line ends, `\n` or `\r\n`.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        InputError: While reading, if a line is not UTF-8.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp(), "poem.txt")
        >>> _ = file.write_text("Tyger Tyger\nburning bright\n")
        >>> list(text_lines(file).map(str.upper))
        ['TYGER TYGER', 'BURNING BRIGHT']
    """
    import grain  # A late import: it takes long.

    return grain.MapDataset.source(_Lines(file_list(paths, "text_lines")))


class _Lines(Records[str]):
    caller = "text_lines"

    def _index(self, file: str, contents: Bytes) -> np.ndarray:
        ends = [np.zeros(0, "int64")]
        for start in range(0, len(contents), _SEARCHED_AT_ONCE):
            part = np.frombuffer(contents[start : start + _SEARCHED_AT_ONCE], "uint8")
            ends.append(start + np.flatnonzero(part == ord("\n")))
        if len(contents) and contents[-1:] != b"\n":
            ends.append(np.array([len(contents)]))
        all_ends = np.concatenate(ends)
        starts = np.concatenate([[0], all_ends[:-1] + 1])[: len(all_ends)]
        return np.stack([starts, all_ends], 1)

    def _decode(self, contents: Bytes, start: int, end: int, place: str) -> str:
        try:
            return contents[start:end].removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place}, is not UTF-8: {error}. Convert the file, such as with "
                "`iconv -t UTF-8`."
            ) from error
