"""Serializes the columns that transform raw features to JSON, and deserializes them."""

import dataclasses
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

_KINDS = (
    BucketizedColumn,
    CrossedColumn,
    HashedColumn,
    IdentityColumn,
    NumericColumn,
    VocabularyColumn,
    WeightedColumn,
)
_BY_NAME = {kind.__name__: kind for kind in _KINDS}


def to_config(column: Column) -> JSONObject:
    """Serialize a column as JSON: its class as `"kind"`, and its attributes.

    ValueError: The column contains a `normalizer_fn`.
    """
    config: JSONObject = {"kind": type(column).__name__}
    for field in dataclasses.fields(column):  # type: ignore[arg-type]
        value = getattr(column, field.name)
        if callable(value):
            raise ValueError(
                f"to_config: {column.title} contains the function {field.name}="
                f"{value!r}, and JSON contains no functions. Call it in the input "
                "function or in the model."
            )
        config[field.name] = _to_json(value)
    return config


def _to_json(value: object) -> Any:
    if isinstance(value, Column):
        return to_config(value)
    if isinstance(value, tuple):
        return [_to_json(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


def from_config(config: JSONObject) -> Column:
    """Deserialize a column from the result of `to_config`; it equals the original."""
    cls: Any = _BY_NAME[config["kind"]]
    return cls(**{n: _from_json(x) for n, x in config.items() if n != "kind"})


def _from_json(value: Any) -> object:
    if isinstance(value, list):
        return tuple(_from_json(element) for element in value)
    return from_config(value) if isinstance(value, dict) else value
