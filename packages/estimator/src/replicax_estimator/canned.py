"""Base of canned estimators: network parts, an optimizer for each, and a head."""

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypedDict, Unpack

import jax
import keras

from replicax_estimator.estimator import Estimator
from replicax_estimator.feature_column import Column, numeric_column
from replicax_estimator.heads import head_of
from replicax_estimator.preprocessing import Preprocessor
from replicax_estimator.run_config import RunConfig
from replicax_estimator.spec import EstimatorSpec, ModeKeys, TrainOp, minimize
from replicax_estimator.types import Features, JSONObject, Labels, Predictions

__all__ = [
    "CannedEstimator",
    "CannedOptions",
    "LogitsAndVariables",
    "NetworkPart",
    "OptimizerLike",
    "optimizer_maker",
]

OptimizerLike: TypeAlias = str | keras.Optimizer | Callable[[], keras.Optimizer]
"""A Keras optimizer, its name, or a function that returns one."""

LogitsAndVariables: TypeAlias = tuple[jax.Array, list[keras.Variable]]
"""Logits `[b, units]`, and the trainable variables of the layers."""


@dataclasses.dataclass(frozen=True)
class NetworkPart:
    """One of the parts whose logits are summed, such as the linear part.

    Attributes:
        columns: The feature columns of its input.
        optimizer: Returns a new optimizer for its variables.
        logits: Makes and calls layers; arguments are the features, the number of
            `units` of the logits, and whether the model trains.
    """

    columns: tuple[Column, ...]
    optimizer: Callable[[], keras.Optimizer]
    logits: Callable[[dict[str, jax.Array], int, bool], LogitsAndVariables]


class CannedOptions(TypedDict, total=False):
    """Arguments of all canned estimators, as `LinearRegressor` describes them."""

    weight_column: str | None
    config: RunConfig | None
    warm_start_from: str | os.PathLike[str] | None
    loss_reduction: str
    label_dimension: int  # Of regressors.
    n_classes: int  # Of classifiers.
    label_vocabulary: Sequence[str] | None  # Of classifiers.


class CannedEstimator(Estimator):
    """An `Estimator` of network parts and a head.

    Attributes:
        preprocessor: Preprocesses each batch on the host.
    """

    _is_classifier: ClassVar[bool] = False
    _needs_labels = True

    def __init__(
        self,
        parts: Sequence[NetworkPart],
        model_dir: str | os.PathLike[str] | None,
        **options: Unpack[CannedOptions],
    ) -> None:
        n_classes = options.get("n_classes", 2) if self._is_classifier else None
        unsupported = {"n_classes", "label_vocabulary"}
        if self._is_classifier:
            unsupported = {"label_dimension"}
        supported = CannedOptions.__optional_keys__ - unsupported
        for name in sorted(set(options) - supported):
            raise TypeError(f"{type(self).__name__}: has no argument {name!r}.")
        vocabulary = options.get("label_vocabulary")
        if isinstance(vocabulary, str):
            raise TypeError(
                "label_vocabulary: must be a list of strings; got the string "
                f"{vocabulary!r}."
            )
        label_dimension = options.get("label_dimension", 1)
        weight_name = options.get("weight_column")
        weight_column = None if weight_name is None else numeric_column(weight_name)
        self.preprocessor = Preprocessor(
            tuple(dict.fromkeys(column for part in parts for column in part.columns)),
            None if vocabulary is None else tuple(vocabulary),
            n_classes,
            label_dimension,
            weight_column,
        )
        reduction = options.get("loss_reduction", "sum_over_batch_size")
        head = head_of(n_classes, label_dimension, reduction)

        def model_fn(
            features: dict[str, jax.Array], labels: jax.Array, mode: ModeKeys
        ) -> EstimatorSpec:
            is_training = mode == ModeKeys.TRAIN
            outputs = [
                part.logits(features, head.logits_dimension, is_training)
                for part in parts
            ]

            def train_op(loss: jax.Array) -> list[TrainOp]:
                return [
                    minimize(part.optimizer(), loss, variables)
                    for part, (_, variables) in zip(parts, outputs, strict=True)
                ]

            example_weights = None
            if weight_column is not None and mode != ModeKeys.PREDICT:
                example_weights = features[weight_column.outputs[0]]
            logits = sum((logits for logits, _ in outputs[1:]), start=outputs[0][0])
            return head.spec(mode, logits, labels, example_weights, train_op)

        super().__init__(
            model_fn,
            model_dir,
            options.get("config"),
            warm_start_from=options.get("warm_start_from"),
        )

    def _prepare(self, features: Features, labels: Labels) -> tuple[Features, Labels]:
        return self.preprocessor.prepare(features, labels)

    def _postprocess(self, predictions: Predictions) -> Predictions:
        return self.preprocessor.add_class_names(predictions)


def optimizer_maker(
    optimizer: OptimizerLike, learning_rate: float, name: str = "optimizer"
) -> Callable[[], keras.Optimizer]:
    """Return a function that makes the optimizer; a `model_fn` calls it on each trace.

    The function copies a Keras optimizer with its present settings. An optimizer given
    by its name gets the `learning_rate`. Error messages call the argument `name`.
    """
    if isinstance(optimizer, str):
        cls: Any = type(keras.optimizers.get(optimizer))
        return lambda: cls(learning_rate=learning_rate)
    if isinstance(optimizer, keras.Optimizer):
        # Read the settings now: the learning rate is a variable, and a model_fn must
        # not read a variable that it has not made.
        config = _remove_names(copy.deepcopy(optimizer.get_config()))
        from_config = type(optimizer).from_config
        # `from_config` changes its argument.
        return lambda: from_config(copy.deepcopy(config))
    if not callable(optimizer):
        raise TypeError(
            f"{name}: must be the name of a Keras optimizer, such as 'Adam', a Keras "
            f"optimizer or a function that returns one; got {optimizer!r}."
        )
    return optimizer


def _remove_names(config: JSONObject) -> JSONObject:
    """Remove names such as `adam_1`, which would become part of variables' names."""
    config.pop("name", None)
    inner = config.get("inner_optimizer")
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        _remove_names(inner["config"])
    return config
