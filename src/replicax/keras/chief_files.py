"""Files that Keras' callbacks write: those of the chief."""

import re
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import keras

__all__ = ["discarded_files"]

_PATHS: dict[type[keras.callbacks.Callback], str] = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
}
"""The attribute with the path of the file that a callback writes."""


@contextmanager
def discarded_files(
    callbacks: Iterable[keras.callbacks.Callback],
) -> Generator[None]:
    """Let callbacks write to a folder that is deleted at the end.

    Workers of a cluster have the same paths, and what two write at once is damaged. The
    others go on as the chief does, as reading weights may need all workers.

    Args:
        callbacks: Of a worker that is not the chief.
    """
    given = []
    with tempfile.TemporaryDirectory(prefix="replicax-") as folder:
        for number, callback in enumerate(callbacks):
            for kind, name in _PATHS.items():
                if isinstance(callback, kind):
                    path = getattr(callback, name)
                    given.append((callback, name, path))
                    setattr(callback, name, _path_in(Path(folder, str(number)), path))
        try:
            yield
        finally:
            for callback, name, path in given:
                setattr(callback, name, path)


def _path_in(folder: Path, path: str) -> str:
    """A path in a folder, with the end of another one, and the same in each epoch."""
    folder.mkdir()
    return str(folder / re.sub(r"\{.*?\}", "0", Path(path).name))
