"""The half of a saved model that runs on the host: strings to ids, ids to strings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax.estimator.feature_column.column import Column
from replicax.estimator.feature_column.config import from_config, to_config
from replicax.estimator.feature_column.numeric import NumericColumn
from replicax.estimator.preprocessing import HostSide
from replicax.estimator.receivers import ArraySpec

__all__ = ["HostHalf", "host_half_config"]


def host_half_config(
    host_side: HostSide, specs: Mapping[str, ArraySpec]
) -> dict[str, Any]:
    """What a canned estimator does on the host, as what JSON can hold.

    A numeric column with a `normalizer_fn` is left to the program, whose feature goes
    in as it is.

    Args:
        host_side: The estimator's.
        specs: The features.

    Raises:
        ValueError: If a column holds a function that cannot be part of the program.
    """
    columns: list[dict[str, Any]] = []
    in_program: list[str] = []
    for column in dict.fromkeys(column.host for column in host_side.columns):
        if isinstance(column, NumericColumn) and column.normalizer_fn is not None:
            _require_traceable(column, specs)
            in_program.append(column.key)
        else:
            columns.append({"column": _written(column), "outputs": [*column.outputs]})
    words, classes = host_side.label_vocabulary, host_side.n_classes
    return {
        "columns": columns,
        "in_program": in_program,
        "label_vocabulary": None if words is None else list(words),
        "n_classes": None if classes is None else int(classes),
    }


def _written(column: Column) -> dict[str, Any]:
    try:
        return to_config(column)
    except ValueError as error:
        raise ValueError(
            f"export_saved_model: {column.title} works on the host and holds a "
            f"function, which a saved model cannot. {error}"
        ) from error


def _require_traceable(column: NumericColumn, specs: Mapping[str, ArraySpec]) -> None:
    title = f"export_saved_model: the normalizer_fn of {column.title}"
    spec = specs.get(column.key)
    if spec is None:
        raise ValueError(
            f"{title} needs the feature {column.key!r}; the serving_input_receiver_fn "
            f"has {sorted(specs)}."
        )
    if column.dtype == "float64" or spec.dtype == "string":
        raise ValueError(
            f"{title} becomes part of the program, which has no {spec.dtype!r} for a "
            f"column of {column.dtype!r}. Make it a column of 'float32'."
        )
    struct = jax.ShapeDtypeStruct(spec.with_rows(2), spec.in_program().dtype)
    try:
        jax.eval_shape(column.trace, {column.key: struct})
    except Exception as error:
        raise ValueError(
            f"{title} becomes part of the program, but JAX cannot trace it: {error} "
            "Write it with jax.numpy, or normalize in the input function."
        ) from error


@dataclasses.dataclass(frozen=True)
class HostHalf:
    """The host half of a saved model.

    Attributes:
        host_side: What the estimator had, without the columns of the program.
        is_needed: Whether its `prepare` has something to do.
        names: A column's names of its arrays, and those that the program has for them.
            (They were equal where the columns were described; a later version may
            choose others.)
        in_program: The features that go in as they are.
    """

    host_side: HostSide
    is_needed: bool
    names: tuple[tuple[str, str], ...]
    in_program: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "HostHalf":
        """What `host_half_config` described.

        Raises:
            ValueError: If this version cannot read it.
        """
        columns = [from_config(entry["column"]) for entry in config["columns"]]
        names = [
            pair
            for column, entry in zip(columns, config["columns"], strict=True)
            for pair in zip(column.outputs, entry["outputs"], strict=True)
        ]
        words = config["label_vocabulary"]
        host_side = HostSide(
            columns=tuple(columns),
            label_vocabulary=None if words is None else tuple(words),
            n_classes=config["n_classes"],
        )
        in_program = tuple(config["in_program"])
        return cls(host_side, bool(columns or not in_program), tuple(names), in_program)

    def prepare(self, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the program takes, from a batch of raw features."""
        arrays = {name: features[name] for name in self.in_program}
        if not self.is_needed:
            return arrays
        made, _ = self.host_side.prepare(features, None)
        if not self.names:
            return made  # A model without columns.
        return arrays | {name: made[own] for own, name in self.names}

    def finish(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a caller gets, from what the program returned."""
        return self.host_side.finish(outputs)
