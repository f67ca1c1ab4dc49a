"""Grain datasets of TFRecord files, without TensorFlow.

A record is: the data's length, `uint64`; a checksum of the length, `uint32`; the data,
usually a `tf.train.Example`; and a checksum of the data, `uint32`.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.errors import InputError
from replicax.input import tf_example
from replicax.input.crc32c import crc32c
from replicax.input.files import Bytes, Paths, Records, file_list

if TYPE_CHECKING:
    import grain

__all__ = ["tf_records"]

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


def tf_records(
    paths: Paths, features: Mapping[str, tf_example.Feature] | None = None
) -> "grain.MapDataset[Any]":
    """Make a Grain dataset of the records in TFRecord files, without TensorFlow.

    Checksums are verified. That is faster with the package google-crc32c.

    Args:
        paths: Paths of files that are not compressed, or patterns such as
            `"train-*.tfrecord"`.
        features: The features of each `tf.train.Example` to decode. A single value has
            a dtype, of numbers or `bytes`. An array has a dtype and a shape, such as
            `("float32", (28, 28))`, in which -1 is any length. None: records are bytes.

    Returns:
        A `grain.MapDataset` of dicts from names to arrays, or `bytes`; of bytes if
        `features` is None.

    Raises:
        FileNotFoundError: If a path or pattern matches no file.
        InputError: If a file is cut short or damaged. While reading, if a record's data
            are damaged, or if they differ from `features`.

    Example:
        >>> import base64, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "train.tfrecord")
        >>> text = "EAAAAAAAAACV+/4YCg4KDAoBeBIHGgUKA+gHB2aGhxo="
        >>> _ = file.write_bytes(base64.b64decode(text))
        >>> [row] = tf_records(file, {"x": ("int64", (-1,))})
        >>> row["x"].tolist()
        [1000, 7]
    """
    import grain  # A late import: it takes long.

    parsed = None if features is None else tf_example.parsed_features(features)
    return grain.MapDataset.source(_TFRecords(file_list(paths, "tf_records"), parsed))


class _TFRecords(Records[Any]):
    caller = "tf_records"

    def __init__(
        self,
        files: Sequence[str],
        features: Mapping[str, tuple[np.dtype, tuple[int, ...]]] | None,
    ) -> None:
        super().__init__(files)
        self._features = features

    def _index(self, file: str, contents: Bytes) -> np.ndarray:
        spans = []
        position, size = 0, len(contents)
        while position < size:
            place = f"tf_records: {file}, record {len(spans) + 1}, at byte {position}"
            start = position + _HEADER.size
            if start > size:
                raise _damaged(place, "is cut short")
            length, checksum = _HEADER.unpack_from(contents, position)
            if checksum != _masked_crc32c(contents[position : position + 8]):
                raise _damaged(place, "has a wrong checksum of its length")
            if (end := start + length) + _CHECKSUM.size > size:
                raise _damaged(place, "is cut short")
            spans.append((start, end))
            position = end + _CHECKSUM.size
        return np.array(spans, "int64").reshape(-1, 2)

    def _decode(self, contents: Bytes, start: int, end: int, place: str) -> Any:
        data = contents[start:end]
        (checksum,) = _CHECKSUM.unpack_from(contents, end)
        if checksum != _masked_crc32c(data):
            raise _damaged(place, "has a wrong checksum of its data")
        if self._features is None:
            return data
        return tf_example.decode(data, self._features, place)


def _masked_crc32c(data: bytes) -> int:
    """Return TFRecord's checksum: a CRC-32C that is rotated, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _damaged(place: str, problem: str) -> InputError:
    return InputError(
        f"{place}, {problem}. The file is damaged, compressed, or not a TFRecord file. "
        "Copy it again, or decompress it."
    )
