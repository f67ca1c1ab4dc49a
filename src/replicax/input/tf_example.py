"""Decodes `tf.train.Example`, the message in most TFRecord files.

An example is a map from names to features; a feature is a list of bytes, of float32 or
of int64 numbers.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from replicax.errors import InputError

__all__ = ["Feature", "decode", "example_class", "parsed_features"]

Feature: TypeAlias = "DTypeLike | tuple[DTypeLike, Sequence[int]]"
"""The dtype of a single value, or a dtype and a shape; -1 in it is any length."""

_LISTS = {"S": "bytes_list", "f": "float_list", "i": "int64_list"}
_KINDS = {"u": "i", "b": "i"}


def parsed_features(
    features: Mapping[str, Feature],
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Convert features to dtypes and shapes.

    Raises:
        TypeError: If a dtype is neither a number nor `bytes`.
    """
    parsed = {}
    for name, feature in features.items():
        dtype, shape = feature if isinstance(feature, tuple) else (feature, ())
        dtype = np.dtype(dtype)
        if _KINDS.get(dtype.kind, dtype.kind) not in _LISTS:
            raise TypeError(
                f"tf_records: feature {name!r} has dtype {dtype}; expected a dtype of "
                "numbers, such as 'int64' or 'float32', or bytes."
            )
        parsed[name] = dtype, tuple(shape)
    return parsed


def decode(
    data: bytes, features: Mapping[str, tuple[np.dtype, tuple[int, ...]]], place: str
) -> dict[str, Any]:
    """Decode an example's features; `place` names the example in errors.

    Raises:
        InputError: If the data are no example, or a feature differs from its dtype or
            shape.
    """
    from google.protobuf.message import DecodeError

    try:
        entries = example_class().FromString(data).features.feature
    except DecodeError as error:
        raise InputError(
            f"{place}, is not a tf.train.Example: {error}. Read the bytes with "
            "features=None, and decode them with `map`."
        ) from error
    stored = {entry.key: entry.value for entry in entries}
    return {
        name: _values(stored, name, dtype, shape, place)
        for name, (dtype, shape) in features.items()
    }


def _values(
    stored: Mapping[str, Any],
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    place: str,
) -> Any:
    fields = stored[name].ListFields() if name in stored else []
    kind, values = (
        (fields[0][0].name, fields[0][1].value) if fields else ("nothing", [])
    )
    expected = _LISTS[_KINDS.get(dtype.kind, dtype.kind)]
    is_bytes = dtype.kind == "S"
    is_empty_allowed = not fields and -1 in shape
    try:
        if kind != expected and not is_empty_allowed:
            raise ValueError("wrong kind of list")
        array = np.array(list(values), object if is_bytes else dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        has = f"{len(values)} values in {kind}" if fields else "no value"
        raise InputError(
            f"{place}: feature {name!r} has {has}; expected {expected} for dtype "
            f"{dtype} and shape {shape} ({error}). The record has the features "
            f"{sorted(stored)}. Change `features`; a shape (-1,) is for any number."
        ) from error
    return array.item() if is_bytes and not shape else array


@functools.cache
def example_class() -> Any:
    """Make the class of messages, in a pool that TensorFlow does not use."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    one, several = field_type.LABEL_OPTIONAL, field_type.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(
        name="replicax/example.proto", package="replicax", syntax="proto3"
    )

    def add(message: str, **fields: tuple[int, int | str]) -> None:
        """Add a message; a field is its label and its type, or another message."""
        added = file.message_type.add(name=message)
        for number, (name, (label, kind)) in enumerate(fields.items(), 1):
            field: Any = added.field.add(name=name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = field_type.TYPE_MESSAGE, kind
            else:
                field.type = kind

    add("BytesList", value=(several, field_type.TYPE_BYTES))
    add("FloatList", value=(several, field_type.TYPE_FLOAT))
    add("Int64List", value=(several, field_type.TYPE_INT64))
    add(
        "Feature",
        bytes_list=(one, "BytesList"),
        float_list=(one, "FloatList"),
        int64_list=(one, "Int64List"),
    )
    add("Entry", key=(one, field_type.TYPE_STRING), value=(one, "Feature"))
    add("Features", feature=(several, "Entry"))
    add("Example", features=(one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("replicax.Example")
    )
