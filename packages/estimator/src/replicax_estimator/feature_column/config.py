"""Serializes feature columns to JSON, and deserializes them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from replicax._util import json_codec
from replicax._util.json_codec import MARK
from replicax._util.types import JSON, JSONObject
from replicax_estimator.feature_column.categorical import (
    IdentityColumn,
    VocabularyColumn,
    WeightedColumn,
)
from replicax_estimator.feature_column.column import Column
from replicax_estimator.feature_column.dense import EmbeddingColumn, IndicatorColumn
from replicax_estimator.feature_column.hashing import CrossedColumn, HashedColumn
from replicax_estimator.feature_column.numeric import BucketizedColumn, NumericColumn

__all__ = ["from_config", "to_config"]

_KINDS: dict[str, type[Column]] = {
    "bucketized": BucketizedColumn,
    "crossed": CrossedColumn,
    "embedding": EmbeddingColumn,
    "hashed": HashedColumn,
    "identity": IdentityColumn,
    "indicator": IndicatorColumn,
    "numeric": NumericColumn,
    "vocabulary": VocabularyColumn,
    "weighted": WeightedColumn,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}


def to_config(column: Column) -> JSONObject:
    """Serialize a column as JSON: its `"kind"` and its attributes.

    Keras serializes the initializers. ValueError: The column holds a Python function, a
    `normalizer_fn` or an initializer that is not Keras'.
    """
    kind = _NAMES.get(type(column))
    if kind is None:
        raise TypeError(
            f"to_config: column must be a column of rx.feature_column; got {column!r}."
        )
    config: JSONObject = {"kind": kind}
    for field in dataclasses.fields(column):  # type: ignore[arg-type]
        value = getattr(column, field.name)
        try:
            config[field.name] = json_codec.encode(value, field.name, _encode_part)
        except TypeError as error:
            raise ValueError(
                f"to_config: {column.title} holds {field.name}={value!r}, which JSON "
                "cannot hold. Use a Keras initializer; in place of a normalizer_fn "
                "normalize in the input function or in the model."
            ) from error
    return config


def _encode_part(value: object, what: str) -> JSON:
    if isinstance(value, np.generic):
        return json_codec.encode(value.item(), what)
    if isinstance(value, Column):
        return {MARK: "column", "v": to_config(value)}
    if isinstance(value, keras.initializers.Initializer):
        return {MARK: "initializer", "v": keras.initializers.serialize(value)}
    return None


def from_config(config: JSONObject) -> Column:
    """Deserialize a column from `to_config`: an equal one, with the same `outputs`."""
    attributes = dict(config) if isinstance(config, Mapping) else {}
    cls: Any = _KINDS.get(attributes.pop("kind", ""))
    if cls is None:
        raise ValueError(
            f"from_config: config must have a kind out of {sorted(_KINDS)}; got "
            f"{config!r}."
        )
    names = {field.name for field in dataclasses.fields(cls)}
    if set(attributes) != names:
        raise ValueError(
            f"from_config: a column of kind {config['kind']!r} has the attributes "
            f"{sorted(names)}; got {sorted(attributes)}."
        )
    return cls(
        **{
            name: json_codec.decode(value, _decode_part)
            for name, value in attributes.items()
        }
    )


def _decode_part(sent: JSONObject) -> object:
    if sent[MARK] == "initializer":
        return keras.initializers.deserialize(sent["v"])
    if sent[MARK] == "column":
        return from_config(sent["v"])
    raise ValueError(f"from_config: no part of a column: {sent!r:.80}")
