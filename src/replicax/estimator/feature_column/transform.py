"""Transforms a batch of raw features into the arrays of columns."""

from collections.abc import Iterable, Mapping

import jax
import jax.core
import keras
import numpy as np
from numpy.typing import ArrayLike

from replicax.estimator.feature_column.column import (
    Arrays,
    Column,
    Columns,
    RawFeatures,
)

__all__ = ["arrays_for", "as_columns", "features_of", "prepared"]


def as_columns(columns: Columns, caller: str) -> tuple[Column, ...]:
    """Columns as a tuple; raises ValueError for none, or for anything else."""
    if isinstance(columns, Column):
        return (columns,)
    if isinstance(columns, Mapping | str) or not isinstance(columns, Iterable):
        raise ValueError(f"{caller}: needs a list of feature columns; got {columns!r}.")
    made = tuple(columns)
    for column in made:
        if not isinstance(column, Column):
            raise ValueError(
                f"{caller}: needs feature columns; got {column!r} among them. Make one "
                "with rx.feature_column.numeric_column or another of its functions."
            )
    if not made:
        raise ValueError(f"{caller}: needs at least one feature column; got none.")
    return made


def features_of(columns: Columns, features: RawFeatures) -> dict[str, np.ndarray]:
    """Transform a batch on the host, for columns to be used in a traced function.

    Call it in the input function, once a batch: strings become ids there. The results
    go into `DenseFeatures`, `LinearModel` or `input_layer` in place of raw features.

    Args:
        columns: A feature column, or several.
        features: Raw features by name, each `[B]` or `[B, k]`. Others than the columns
            need may be there.

    Returns:
        Arrays by names of their own, see `Column.outputs`. Numbers `float32[B, ...]`,
        ids `int32[B, k]` with -1 where there is none, weights `float32[B, k]`.

    Raises:
        ValueError: If a feature is missing, its shape is wrong, it has values that its
            column does not allow, or features have different numbers of rows.
        TypeError: If a feature's dtype is wrong.

    Example:
        >>> from replicax import feature_column as fc
        >>> city = fc.categorical_column_with_vocabulary_list("city", ["Bonn", "Ulm"])
        >>> columns = [fc.numeric_column("age"), fc.indicator_column(city)]
        >>> batch = fc.features_of(columns, {"age": [20, 30], "city": ["Ulm", "Bonn"]})
        >>> sorted((array.dtype.name, array.shape) for array in batch.values())
        [('float32', (2, 1)), ('int32', (2, 1))]
    """
    hosts = _host_columns(as_columns(columns, "features_of"), "features_of")
    _require_mapping(features, "features_of")
    arrays: dict[str, np.ndarray] = {}
    for host in hosts:
        arrays |= host.transform(features)
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"features_of: all features must have the same number of rows; got {rows}."
        )
    return arrays


def _require_mapping(features: object, caller: str) -> None:
    """Raise TypeError unless features come by name."""
    if not isinstance(features, Mapping):
        raise TypeError(
            f"{caller}: features must be a dict of arrays by name; got a "
            f"{type(features).__name__}."
        )


def prepared(
    columns: tuple[Column, ...], features: RawFeatures, caller: str
) -> dict[str, ArrayLike]:
    """What `arrays_for` needs of a batch; raw features that JAX traces stay raw.

    Raises what `features_of` does, and TypeError for traced features of a column that
    works on the host.
    """
    _require_mapping(features, caller)
    ready: dict[str, ArrayLike] = {}
    for host in _host_columns(columns, caller):
        if all(name in features for name in host.outputs):
            ready |= {name: features[name] for name in host.outputs}
        elif any(_is_traced(features.get(key)) for key in host.keys):
            if host.untraceable:
                host.trace(features)  # Raises.
            ready |= {key: features[key] for key in host.keys if key in features}
        else:
            ready |= host.transform(features)
    return ready


def arrays_for(
    columns: tuple[Column, ...], features: Arrays, caller: str
) -> dict[str, jax.Array]:
    """The columns' arrays in a traced function, from the result of `prepared`."""
    arrays = dict(features)
    for host in _host_columns(columns, caller):
        if not all(name in arrays for name in host.outputs):
            arrays |= host.trace(features)
    return arrays


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer | keras.KerasTensor)


def _host_columns(columns: tuple[Column, ...], caller: str) -> list[Column]:
    """Columns that transform, each once."""
    hosts: dict[tuple[str, ...], Column] = {}
    for column in columns:
        host = column.host
        known = hosts.setdefault(host.outputs, host)
        if known != host:
            raise ValueError(
                f"{caller}: two columns {host.name!r} differ only in a function; got "
                f"{known!r} and {host!r}. Make one column and use it twice, or give "
                "the functions different names."
            )
    return list(hosts.values())
