"""Files that Keras' callbacks write: those of the chief."""

import os
import re
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import keras

from replicax.cluster.failure import REPORT_DIR

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
    found = [
        (callback, name)
        for callback in callbacks
        for kind, name in _PATHS.items()
        if isinstance(callback, kind)
    ]
    if not found:
        yield
        return
    # There the launcher deletes what a worker that is killed leaves.
    parent = os.environ.get(REPORT_DIR)
    with tempfile.TemporaryDirectory(prefix="replicax-", dir=parent) as folder:
        given = [(callback, name, getattr(callback, name)) for callback, name in found]
        for number, (callback, name, path) in enumerate(given):
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
