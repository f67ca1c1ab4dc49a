"""Preprocesses batches of canned estimators on the host: raw features become numbers.

A saved model stores the preprocessor in its manifest, beside the program.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from replicax_estimator.arguments import require_count
from replicax_estimator.feature_column import Column, features_of
from replicax_estimator.feature_column.config import from_config, to_config
from replicax_estimator.feature_column.numeric import NumericColumn
from replicax_estimator.feature_column.raw import rows_of
from replicax_estimator.types import Features, JSONObject, Labels

__all__ = ["ROWS", "Preprocessor", "preprocessor_config", "saved_preprocessor"]

ROWS = "rows"
"""Name of the input of a model without columns: zeros `float32[b]`."""

_NUM_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Preprocessor:
    """Converts a canned estimator's batches of `b` examples to arrays of numbers.

    A model without columns gets the input `ROWS`. `n_classes` is None for regression.
    The features named in `in_program` pass unchanged: the program transforms them.
    """

    columns: tuple[Column, ...]
    label_vocabulary: tuple[str, ...] | None = None
    n_classes: int | None = None
    label_dimension: int = 1
    weight_column: NumericColumn | None = None
    in_program: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_count(self.label_dimension, "label_dimension")
        require_count(self.n_classes, "n_classes", 2, or_none=True)
        names = self.label_vocabulary
        if names is None:
            return
        are_strings = all(isinstance(name, str) for name in names)
        if not are_strings or not len(set(names)) == len(names) == self.n_classes:
            raise ValueError(
                f"label_vocabulary: must have n_classes={self.n_classes} different "
                f"strings; got {names[:_NUM_SHOWN]}."
            )

    def prepare(
        self, features: Features, labels: Labels = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Convert a batch of raw features and labels to arrays of numbers.

        Labels `[b]`, `[b, 1]` or `[b, label_dimension]` become `float32[b,
        label_dimension]` for regression, `float32[b, 1]` for two classes, `int32[b, 1]`
        for more. For prediction labels are None, and weights are not needed.
        """
        arrays = {name: np.asarray(features[name]) for name in self.in_program}
        if self.columns:
            arrays |= features_of(self.columns, features)
        elif not arrays:
            if not isinstance(features, Mapping):
                features = {"features": features}
            rows = rows_of(features, "a model without feature columns")
            arrays[ROWS] = np.zeros(rows, "float32")
        if labels is None:
            return arrays, None
        if self.weight_column is not None:
            arrays |= self._weights(self.weight_column, features)
        return arrays, self._labels(labels)

    def add_class_names(
        self, predictions: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Add `classes` and `all_classes`, strings, to a classifier's predictions."""
        outputs = dict(predictions)
        if self.n_classes is not None:
            for name in ("class", "all_class"):
                if f"{name}_ids" in outputs:
                    outputs[f"{name}es"] = self._names[outputs[f"{name}_ids"]]
        return outputs

    @functools.cached_property
    def _names(self) -> np.ndarray:
        names = self.label_vocabulary or map(str, range(self.n_classes or 0))
        return np.array(list(names))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.label_vocabulary or ())}

    def _weights(
        self, column: NumericColumn, features: Features
    ) -> dict[str, np.ndarray]:
        arrays = features_of([column], features)
        weights = arrays[column.outputs[0]]
        wrong = weights[~(weights >= 0)]
        if wrong.size:
            raise ValueError(
                f"weight_column {column.key!r}: weights must not be negative or NaN; "
                f"got {wrong[0]}. Use 0 to ignore an example."
            )
        return arrays

    def _labels(self, labels: Labels) -> np.ndarray:
        if isinstance(labels, Mapping | tuple):
            raise TypeError(
                f"labels: must be one array; got a {type(labels).__name__}. Pick one of"
                " its arrays in the input function."
            )
        array = np.asarray(labels)
        size = self.label_dimension if self.n_classes is None else 1
        if array.ndim == 1 and size == 1:
            array = array.reshape(-1, 1)
        if array.ndim != 2 or array.shape[1] != size:
            raise ValueError(
                f"labels: must have the shape [b, {size}], or [b] for size 1; got "
                f"{list(array.shape)}. Reshape them, or give a regressor another "
                "label_dimension."
            )
        # Labels of two classes may be probabilities.
        dtype = "float32" if (self.n_classes or 2) == 2 else "int32"
        if self.label_vocabulary is not None:
            return self._class_ids(array).astype(dtype)
        is_number = jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
        if not is_number or array.dtype.kind == "c":
            raise TypeError(
                f"labels: must be numbers; got dtype {array.dtype}. A classifier of "
                "strings needs label_vocabulary=[...]."
            )
        if self.n_classes is not None:
            self._require_ids(array)
        return array.astype(dtype)

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

    def _class_ids(self, array: np.ndarray) -> np.ndarray:
        names = [
            x.decode("utf-8", "surrogateescape") if isinstance(x, bytes) else x
            for x in array.ravel().tolist()
        ]
        unknown = next((name for name in names if name not in self._ids), None)
        if unknown is not None:
            raise ValueError(
                f"labels: {unknown!r} is not in the label_vocabulary, which begins "
                f"with {list(self._ids)[:_NUM_SHOWN]}. Leave out label_vocabulary if "
                "labels are ids."
            )
        return np.array([self._ids[name] for name in names]).reshape(array.shape)


def preprocessor_config(preprocessor: Preprocessor) -> JSONObject:
    """Serialize a preprocessor as JSON.

    A numeric column with a `normalizer_fn` is left to the program, which reads the raw
    feature. ValueError: Another column, such as a cross, contains a `normalizer_fn`.
    """
    columns: list[JSONObject] = []
    in_program = list(preprocessor.in_program)
    for column in dict.fromkeys(column.reader for column in preprocessor.columns):
        if isinstance(column, NumericColumn) and column.normalizer_fn is not None:
            if column.dtype == "float64":  # Programs have no float64.
                raise ValueError(
                    f"export_saved_model: the normalizer_fn of {column.title} becomes "
                    "part of the program, which has no float64. Give the column the "
                    "dtype 'float32'."
                )
            in_program.append(column.key)
        else:
            columns.append(to_config(column))
    n_classes = preprocessor.n_classes
    return {
        "columns": columns,
        "in_program": in_program,
        "label_vocabulary": preprocessor.label_vocabulary,
        "n_classes": None if n_classes is None else int(n_classes),
    }


def saved_preprocessor(config: JSONObject) -> Preprocessor:
    """Make the preprocessor of a saved model from a `preprocessor_config`."""
    names = config["label_vocabulary"]
    return Preprocessor(
        columns=tuple(map(from_config, config["columns"])),
        label_vocabulary=None if names is None else tuple(names),
        n_classes=config["n_classes"],
        in_program=tuple(config["in_program"]),
    )
