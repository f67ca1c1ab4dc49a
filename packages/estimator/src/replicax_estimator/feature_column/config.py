"""Serializes the columns that transform raw features to JSON, and deserializes them."""

import dataclasses
import math
from typing import Any

import numpy as np

from replicax_estimator.feature_column.categorical import (
    IdentityColumn,
    VocabularyColumn,
    WeightedColumn,
)
from replicax_estimator.feature_column.column import Column
from replicax_estimator.feature_column.hashing import CrossedColumn, HashedColumn
from replicax_estimator.feature_column.numeric import BucketizedColumn, NumericColumn
from replicax_estimator.types import JSONObject

__all__ = ["from_config", "to_config"]

_KINDS: dict[str, type[Column]] = {
    "bucketized": BucketizedColumn,
    "crossed": CrossedColumn,
    "hashed": HashedColumn,
    "identity": IdentityColumn,
    "numeric": NumericColumn,
    "vocabulary": VocabularyColumn,
    "weighted": WeightedColumn,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}


def to_config(column: Column) -> JSONObject:
    """Serialize a column as JSON: its `"kind"` and its attributes.

    ValueError: The column contains a `normalizer_fn`.
    """
    config: JSONObject = {"kind": _NAMES[type(column)]}
    for field in dataclasses.fields(column):  # type: ignore[arg-type]
        value = getattr(column, field.name)
        try:
            config[field.name] = _encoded(value)
        except TypeError as error:
            raise ValueError(
                f"to_config: {column.title} holds {field.name}={value!r}, which JSON "
                "cannot hold. Normalize in the input function or in the model."
            ) from error
    return config


def _encoded(value: object) -> Any:
    if isinstance(value, Column):
        return {"column": to_config(value)}
    if isinstance(value, tuple):
        return [_encoded(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has neither NaN nor infinity.
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is no value of JSON.")


def from_config(config: JSONObject) -> Column:
    """Deserialize a column from `to_config`: an equal one, with the same `outputs`."""
    attributes = dict(config)
    cls: Any = _KINDS[attributes.pop("kind")]
    return cls(**{name: _decoded(value) for name, value in attributes.items()})


def _decoded(value: Any) -> object:
    if isinstance(value, list):
        return tuple(_decoded(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "column" in value:
        return from_config(value["column"])
    return float(value["float"])
