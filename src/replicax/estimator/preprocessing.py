"""The host's half of a canned estimator: strings and raw features as numbers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.estimator.feature_column import Column, features_of, numeric_column
from replicax.estimator.feature_column.numeric import NumericColumn
from replicax.estimator.feature_column.raw import rows_of

__all__ = ["ROWS", "HostSide", "weight_column_of"]

ROWS = "rows"
"""The feature `float32[b]` of zeros that a model without columns gets."""

_NUM_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class HostSide:
    """What a canned estimator does on the host with a batch of `b` examples.

    Args:
        columns: The columns that the model takes; without any it gets `ROWS`.
        label_vocabulary: The classes, if labels are strings.
        n_classes: Number of classes; None for regression.
        label_dimension: Numbers that a label of a regression has.
        weight_column: Where examples' weights are.

    Raises:
        ValueError: For less than two classes, a vocabulary that does not fit them, or
            a `label_dimension` below 1.
        TypeError: If the vocabulary has something else than strings.
    """

    columns: tuple[Column, ...]
    label_vocabulary: tuple[str, ...] | None = None
    n_classes: int | None = None
    label_dimension: int = 1
    weight_column: NumericColumn | None = None

    def __post_init__(self) -> None:
        _require_integer("label_dimension", self.label_dimension, 1)
        if self.n_classes is not None:
            _require_integer("n_classes", self.n_classes, 2)
        words = self.label_vocabulary
        if words is None:
            return
        for word in words:
            if not isinstance(word, str):
                raise TypeError(
                    f"label_vocabulary: must have strings; got {word!r}. Labels that "
                    "are ids from 0 to n_classes - 1 need no vocabulary."
                )
        if len(words) != self.n_classes or len(set(words)) != len(words):
            raise ValueError(
                f"label_vocabulary: must have n_classes={self.n_classes} strings, each "
                f"once; got {len(words)}, {len(set(words))} of them different."
            )

    def prepare(
        self, features: Any, labels: Any = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """A batch as arrays of numbers.

        Args:
            features: Raw features by name.
            labels: `[b]`, `[b, 1]`, or `[b, label_dimension]`. None for prediction,
                which needs no weights either.

        Returns:
            The arrays of the columns, and labels: `float32[b, label_dimension]` of a
            regression, `float32[b, 1]` of two classes, `int32[b, 1]` of more.

        Raises:
            ValueError: If a feature is missing; for wrong shapes; for labels that are
                unknown or out of range; for negative weights.
            TypeError: For features or labels of another dtype.
        """
        arrays: dict[str, np.ndarray] = {}
        if self.columns:
            arrays |= features_of(self.columns, features)
        else:
            arrays[ROWS] = np.zeros(_num_rows(features), "float32")
        if labels is None:
            return arrays, None
        if self.weight_column is not None:
            arrays |= self._weights(self.weight_column, features)
        numbers = self._labels(labels)
        rows = {len(array) for array in arrays.values()}
        if rows != {len(numbers)}:
            raise ValueError(
                f"labels: there are {len(numbers)} for features of {sorted(rows)} "
                "rows. Each example needs one label, and one weight if there is a "
                "weight_column."
            )
        return arrays, numbers

    def finish(self, predictions: Mapping[str, Any]) -> dict[str, Any]:
        """Predictions `[b, ...]` with the classes as strings, for a classifier.

        Args:
            predictions: NumPy arrays by name.

        Returns:
            Those, with `classes` and `all_classes` for `class_ids` and `all_class_ids`.
        """
        finished = dict(predictions)
        if self.n_classes is None:
            return finished
        for name in ("class", "all_class"):
            if f"{name}_ids" in finished:
                finished[f"{name}es"] = self._names[np.asarray(finished[f"{name}_ids"])]
        return finished

    @functools.cached_property
    def _names(self) -> np.ndarray:
        names = self.label_vocabulary or map(str, range(self.n_classes or 0))
        return np.array(list(names))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.label_vocabulary or ())}

    def _weights(self, column: NumericColumn, features: Any) -> dict[str, np.ndarray]:
        arrays = features_of([column], features)
        weights = arrays[column.outputs[0]]
        wrong = weights[~(weights >= 0)]
        if wrong.size:
            raise ValueError(
                f"weight_column {column.key!r}: weights must not be negative or NaN; "
                f"got {wrong[0]}. Give 0 to examples that are not to count."
            )
        return arrays

    def _labels(self, labels: Any) -> np.ndarray:
        array = _label_array(labels)
        size = self.label_dimension if self.n_classes is None else 1
        if array.ndim == 1 and size == 1:
            array = array.reshape(-1, 1)
        if array.ndim != 2 or array.shape[1] != size:
            also = " or [b]" if size == 1 else ""
            raise ValueError(
                f"labels: must have the shape [b, {size}]{also}; got "
                f"{list(array.shape)}."
                + (" Give label_dimension=..." if self.n_classes is None else "")
            )
        if self.label_vocabulary is not None:
            return self._looked_up(array).astype(self._label_dtype)
        is_number = jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
        if not is_number or array.dtype.kind == "c":
            raise TypeError(
                f"labels: must be numbers; got dtype {array.dtype}. "
                + (
                    "Convert them with .astype('float32')."
                    if self.n_classes is None
                    else "For strings give label_vocabulary=[...]."
                )
            )
        if self.n_classes is not None:
            self._require_ids(array)
        return array.astype(self._label_dtype)

    @property
    def _label_dtype(self) -> str:
        # Labels of two classes may be probabilities.
        return "float32" if (self.n_classes or 2) == 2 else "int32"

    def _require_ids(self, array: np.ndarray) -> None:
        last = (self.n_classes or 0) - 1
        is_integer = jnp.issubdtype(array.dtype, np.integer) or array.dtype == bool
        if last > 1 and not is_integer:
            raise TypeError(
                f"labels: must be integers for n_classes={self.n_classes}; got dtype "
                f"{array.dtype}. Convert them with .astype('int32')."
            )
        wrong = array[~((array >= 0) & (array <= last))]
        if wrong.size:
            raise ValueError(
                f"labels: ids must be from 0 to n_classes - 1 = {last}; got "
                f"{wrong[0]}. Raise n_classes, or give label_vocabulary."
            )

    def _looked_up(self, array: np.ndarray) -> np.ndarray:
        words = [_word(value) for value in array.ravel().tolist()]
        unknown = next((word for word in words if word not in self._ids), None)
        if unknown is not None:
            known = ", ".join(repr(word) for word in [*self._ids][:_NUM_SHOWN])
            more = len(self._ids) - _NUM_SHOWN
            raise ValueError(
                f"labels: {unknown!r} is not in the label_vocabulary, which has "
                f"{known}" + (f" and {more} more." if more > 0 else ".")
            )
        return np.array([self._ids[word] for word in words]).reshape(array.shape)


def weight_column_of(weight_column: Any) -> NumericColumn | None:
    """The column of examples' weights, from an argument `weight_column`.

    Args:
        weight_column: A feature's name, a `numeric_column`, or None.

    Raises:
        TypeError: If it is something else.
        ValueError: If the column has more than one number a row.
    """
    if weight_column is None:
        return None
    if isinstance(weight_column, str):
        return numeric_column(weight_column)
    if not isinstance(weight_column, NumericColumn):
        raise TypeError(
            "weight_column: must be a feature's name or a numeric_column; got "
            f"{weight_column!r}."
        )
    if weight_column.shape != (1,):
        raise ValueError(
            "weight_column: must have one weight an example, shape (1,); got "
            f"{weight_column.shape}."
        )
    return weight_column


def _require_integer(name: str, value: Any, least: int) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(
            f"{name}: must be an integer and at least {least}; got {value!r}."
        )


def _num_rows(features: Any) -> int:
    named = features if isinstance(features, Mapping) else {"features": features}
    return rows_of(named, "a model without feature columns")


def _label_array(labels: Any) -> np.ndarray:
    if isinstance(labels, Mapping | tuple):
        raise TypeError(
            f"labels: must be one array; got a {type(labels).__name__}. Pick one of "
            "its arrays in the input function."
        )
    try:
        return np.asarray(labels)
    except ValueError as error:
        raise ValueError(f"labels: are no array: {error}.") from error


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        raise TypeError(
            f"labels: must be strings, as there is a label_vocabulary; got {value!r} "
            f"of type {type(value).__name__}. Leave label_vocabulary out for ids."
        )
    return value
