"""Base of canned estimators: network parts, an optimizer for each, and a head."""

import abc
import copy
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import keras

from replicax_estimator.estimator import Estimator
from replicax_estimator.feature_column import Column
from replicax_estimator.feature_column.numeric import NumericColumn
from replicax_estimator.heads import head_of
from replicax_estimator.preprocessing import Preprocessor, weight_column_of
from replicax_estimator.run_config import RunConfig
from replicax_estimator.spec import EstimatorSpec, ModeKeys, TrainOp, minimize
from replicax_estimator.types import Features, JSONObject, Labels, Predictions

__all__ = [
    "CannedEstimator",
    "NetworkPart",
    "OptimizerLike",
    "WeightColumn",
    "optimizer_maker",
]

OptimizerLike: TypeAlias = str | keras.Optimizer | Callable[[], keras.Optimizer]
"""A Keras optimizer, its name, or a function that returns one."""

WeightColumn: TypeAlias = str | NumericColumn | None
"""The feature of the examples' weights, or a `numeric_column` of it."""


class NetworkPart(abc.ABC):
    """A part of a network; the network's logits are the sum of its parts' logits.

    Attributes:
        columns: The feature columns of its input.
        optimizer: Returns a new optimizer for its variables.
    """

    columns: tuple[Column, ...]
    optimizer: Callable[[], keras.Optimizer]

    @abc.abstractmethod
    def logits(
        self, features: dict[str, jax.Array], units: int, *, training: bool
    ) -> tuple[jax.Array, list[keras.Variable]]:
        """Call new layers; return logits `[b, units]` and the trainable variables."""


class CannedEstimator(Estimator):
    """An `Estimator` of network parts and a head: a classifier if `n_classes` is given.

    Attributes:
        preprocessor: Preprocesses each batch on the host.
    """

    _needs_labels = True

    def __init__(
        self,
        parts: Sequence[NetworkPart],
        weight_column: WeightColumn,
        loss_reduction: str,
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: str | os.PathLike[str] | None = None,
        *,
        label_dimension: int = 1,
        n_classes: int | None = None,
        label_vocabulary: Sequence[str] | None = None,
    ) -> None:
        if isinstance(label_vocabulary, str):
            raise TypeError(
                "label_vocabulary: must be a list of strings; got the string "
                f"{label_vocabulary!r}."
            )
        self.preprocessor = Preprocessor(
            tuple(dict.fromkeys(column for part in parts for column in part.columns)),
            None if label_vocabulary is None else tuple(label_vocabulary),
            n_classes,
            label_dimension,
            weight_column_of(weight_column),
        )
        weights = self.preprocessor.weight_column
        head = head_of(n_classes, label_dimension, loss_reduction)

        def model_fn(
            features: dict[str, jax.Array], labels: jax.Array, mode: ModeKeys
        ) -> EstimatorSpec:
            is_training = mode == ModeKeys.TRAIN
            outputs = [
                part.logits(features, head.logits_dimension, training=is_training)
                for part in parts
            ]

            def train_op(loss: jax.Array) -> list[TrainOp]:
                return [
                    minimize(part.optimizer(), loss, variables)
                    for part, (_, variables) in zip(parts, outputs, strict=True)
                ]

            factors = None
            if weights is not None and mode != ModeKeys.PREDICT:
                factors = features[weights.outputs[0]]
            logits = sum((logits for logits, _ in outputs[1:]), start=outputs[0][0])
            return head.spec(mode, logits, labels, factors, train_op)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)

    def _prepare(self, features: Features, labels: Labels) -> tuple[Features, Labels]:
        return self.preprocessor.prepare(features, labels)

    def _postprocess(self, predictions: Predictions) -> Predictions:
        return self.preprocessor.finish(predictions)


def optimizer_maker(
    optimizer: OptimizerLike, learning_rate: float, name: str = "optimizer"
) -> Callable[[], keras.Optimizer]:
    """Return a factory of the optimizer; a `model_fn` calls it on each trace.

    The factory copies a Keras optimizer with its present settings. A name of an
    optimizer (in any case) gets the `learning_rate`. Errors call the argument `name`.
    """
    if isinstance(optimizer, str):
        _named(optimizer, learning_rate, name)
        return lambda: _named(optimizer, learning_rate, name)
    if isinstance(optimizer, keras.Optimizer):
        return _copies_of(optimizer, name)
    if not callable(optimizer):
        raise TypeError(
            f"{name}: must be the name of a Keras optimizer, such as 'Adam', a Keras "
            f"optimizer or a function that returns one; got {optimizer!r}."
        )

    def make() -> keras.Optimizer:
        instance = optimizer()
        if not isinstance(instance, keras.Optimizer):
            raise TypeError(
                f"{name}: the function's result must be a Keras optimizer; got "
                f"{instance!r}."
            )
        return instance

    return make


def _named(identifier: str, learning_rate: float, name: str) -> keras.Optimizer:
    config = {"learning_rate": learning_rate}
    # In whatever case, as estimators have it; Keras 3.16 does not know "ADAM".
    names = {x.lower(): x for x in dir(keras.optimizers)}
    class_name = names.get(identifier.lower(), identifier)
    cause = None
    try:
        # For other names than optimizers' it returns something else, or raises.
        instance = keras.optimizers.deserialize(
            {"class_name": class_name, "config": config}
        )
    except (TypeError, ValueError) as error:
        instance, cause = None, error
    if not isinstance(instance, keras.Optimizer):
        raise ValueError(
            f"{name}: there is no Keras optimizer {identifier!r} that a learning rate "
            "is enough for. Give another name, such as 'SGD', 'Adagrad', 'Adam', "
            "'RMSProp' or 'Ftrl', or a Keras optimizer."
        ) from cause
    return instance


def _copies_of(optimizer: keras.Optimizer, name: str) -> Callable[[], keras.Optimizer]:
    # Read now: in the model_fn its learning rate would be a variable from outside.
    config = _unnamed(copy.deepcopy(optimizer.get_config()))
    from_config = type(optimizer).from_config

    def make() -> keras.Optimizer:
        try:
            # Keras changes the argument.
            return from_config(copy.deepcopy(config))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: {type(optimizer).__name__}.from_config(get_config()) does "
                "not make the optimizer again. Give a function that returns it: "
                f"{name}=lambda: ..."
            ) from error

    make()
    return make


def _unnamed(config: JSONObject) -> JSONObject:
    """Remove names from a config: Keras numbers them, and checkpoints have them."""
    config.pop("name", None)
    inner = config.get("inner_optimizer")
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        _unnamed(inner["config"])
    return config
