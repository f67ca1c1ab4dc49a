"""Canned estimators that add up a linear model and one with hidden layers."""

import os
from collections.abc import Callable, Sequence

import jax

from replicax.estimator.canned import (
    CannedClassifier,
    CannedRegressor,
    NetworkPart,
    OptimizerLike,
    WeightColumn,
)
from replicax.estimator.dnn import DNNPart
from replicax.estimator.feature_column.column import Columns
from replicax.estimator.linear import LinearPart
from replicax.estimator.run_config import RunConfig

__all__ = ["DNNLinearCombinedClassifier", "DNNLinearCombinedRegressor"]


class DNNLinearCombinedRegressor(CannedRegressor):
    """A linear model and a network of dense layers, added up, that predict numbers.

    (TF: `tf.estimator.DNNLinearCombinedRegressor`.) Both are trained at once, each by
    its own optimizer. Results of `evaluate` and `predict` are those of
    `LinearRegressor`.

    Args:
        model_dir: See `Estimator`.
        linear_feature_columns: As for `LinearRegressor`; None: no linear model.
        linear_optimizer: As for `LinearRegressor`.
        dnn_feature_columns: As for `DNNRegressor`; None: no hidden layers.
        dnn_optimizer: As for `DNNRegressor`.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: As for `DNNRegressor`.
        dnn_dropout: As for `DNNRegressor`.
        label_dimension: As for `LinearRegressor`.
        weight_column: As for `LinearRegressor`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.
        batch_norm: As for `DNNRegressor`.
        linear_sparse_combiner: As for `LinearRegressor`.

    Raises:
        ValueError: For arguments out of range, or columns for neither part.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> x = np.linspace(-1, 1, 64, dtype="float32")
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.DNNLinearCombinedRegressor(
        ...     linear_feature_columns=columns,
        ...     dnn_feature_columns=columns,
        ...     dnn_hidden_units=[8],
        ... )
        >>> estimator = estimator.train(lambda: ({"x": x}, x**2), steps=10)
        >>> next(estimator.predict(lambda: {"x": x}))["predictions"].shape
        (1,)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike | None = None,
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: str | Callable[[jax.Array], jax.Array] = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        parts = _parts(
            linear_feature_columns,
            linear_optimizer,
            linear_sparse_combiner,
            dnn_feature_columns,
            dnn_hidden_units,
            dnn_optimizer,
            dnn_activation_fn,
            dnn_dropout,
            batch_norm,
        )
        super().__init__(
            parts,
            label_dimension,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )


class DNNLinearCombinedClassifier(CannedClassifier):
    """A linear model and a network of dense layers, added up, that predict classes.

    (TF: `tf.estimator.DNNLinearCombinedClassifier`.) Both are trained at once, each by
    its own optimizer. Results of `evaluate` and `predict` are those of
    `LinearClassifier`.

    Args:
        model_dir: See `Estimator`.
        linear_feature_columns: As for `LinearClassifier`; None: no linear model.
        linear_optimizer: As for `LinearClassifier`.
        dnn_feature_columns: As for `DNNClassifier`; None: no hidden layers.
        dnn_optimizer: As for `DNNClassifier`.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: As for `DNNClassifier`.
        dnn_dropout: As for `DNNClassifier`.
        n_classes: As for `LinearClassifier`.
        weight_column: As for `LinearRegressor`.
        label_vocabulary: As for `LinearClassifier`.
        config: See `Estimator`.
        warm_start_from: See `Estimator`.
        loss_reduction: As for `LinearRegressor`.
        batch_norm: As for `DNNClassifier`.
        linear_sparse_combiner: As for `LinearClassifier`.

    Raises:
        ValueError: For arguments out of range, or columns for neither part.
        TypeError: For arguments of the wrong kind.

    Example:
        >>> import numpy as np, replicax as rx
        >>> day = rx.feature_column.categorical_column_with_identity("day", 7)
        >>> estimator = rx.estimator.DNNLinearCombinedClassifier(
        ...     linear_feature_columns=[day],
        ...     dnn_feature_columns=[rx.feature_column.embedding_column(day, 2)],
        ...     dnn_hidden_units=[8],
        ... )
        >>> days = np.arange(7)
        >>> estimator = estimator.train(lambda: ({"day": days}, days >= 5), steps=10)
        >>> next(estimator.predict(lambda: {"day": days}))["probabilities"].shape
        (2,)
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike | None = None,
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: str | Callable[[jax.Array], jax.Array] = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        parts = _parts(
            linear_feature_columns,
            linear_optimizer,
            linear_sparse_combiner,
            dnn_feature_columns,
            dnn_hidden_units,
            dnn_optimizer,
            dnn_activation_fn,
            dnn_dropout,
            batch_norm,
        )
        super().__init__(
            parts,
            n_classes,
            label_vocabulary,
            weight_column,
            loss_reduction,
            model_dir,
            config,
            warm_start_from,
        )


def _parts(
    linear_columns: Columns | None,
    linear_optimizer: OptimizerLike | None,
    combiner: str,
    dnn_columns: Columns | None,
    hidden_units: Sequence[int] | None,
    dnn_optimizer: OptimizerLike,
    activation_fn: str | Callable[[jax.Array], jax.Array],
    dropout: float | None,
    batch_norm: bool,
) -> list[NetworkPart]:
    """The parts that there are columns for."""
    parts: list[NetworkPart] = []
    if dnn_columns is not None and dnn_columns not in ([], ()):
        settings = (dnn_optimizer, activation_fn, dropout, batch_norm)
        parts.append(DNNPart(dnn_columns, hidden_units, *settings, prefix="dnn_"))
    elif hidden_units:
        raise ValueError(
            f"dnn_hidden_units={hidden_units!r} were given, but dnn_feature_columns="
            f"{dnn_columns!r}. Give both, or neither."
        )
    if linear_columns is not None and linear_columns not in ([], ()):
        parts.append(LinearPart(linear_columns, linear_optimizer, combiner, "linear_"))
    if not parts:
        raise ValueError(
            "linear_feature_columns and dnn_feature_columns: there are none. Give "
            "columns for one of the parts, or for both."
        )
    return parts
