"""Base of canned estimators: network parts, an optimizer for each, and a head."""

import abc
import copy
import os
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias, TypedDict, Unpack

import jax
import keras

from replicax_estimator.arguments import require_instance
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
    "CannedOptions",
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


class CannedOptions(TypedDict, total=False):
    """Arguments of all canned estimators, as `LinearRegressor` describes them."""

    weight_column: WeightColumn
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
        foreign = ("n_classes", "label_vocabulary")
        if self._is_classifier:
            foreign = ("label_dimension",)
        for name in foreign:
            if name in options:
                raise TypeError(f"{type(self).__name__}: has no argument {name!r}.")
        words = options.get("label_vocabulary")
        if isinstance(words, str):
            raise TypeError(
                f"label_vocabulary: must be a list of strings; got the string {words!r}"
            )
        label_dimension = options.get("label_dimension", 1)
        self.preprocessor = Preprocessor(
            tuple(dict.fromkeys(column for part in parts for column in part.columns)),
            None if words is None else tuple(words),
            n_classes,
            label_dimension,
            weight_column_of(options.get("weight_column")),
        )
        weights = self.preprocessor.weight_column
        reduction = options.get("loss_reduction", "sum_over_batch_size")
        head = head_of(n_classes, label_dimension, reduction)

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
    """Return a factory of the optimizer; a `model_fn` calls it on each trace.

    The factory copies a Keras optimizer with its present settings. A name of an
    optimizer (in any case) gets the `learning_rate`. Errors call the argument `name`.
    """
    if isinstance(optimizer, str):
        cls = _optimizer_class(optimizer, name)
        return lambda: cls(learning_rate=learning_rate)
    if isinstance(optimizer, keras.Optimizer):
        return _copier_of(optimizer)
    if not callable(optimizer):
        raise TypeError(
            f"{name}: must be the name of a Keras optimizer, such as 'Adam', a Keras "
            f"optimizer or a function that returns one; got {optimizer!r}."
        )

    def make() -> keras.Optimizer:
        return require_instance(
            optimizer(), keras.optimizers.Optimizer, f"{name}: the function's result"
        )

    return make


def _optimizer_class(identifier: str, name: str) -> Callable[..., keras.Optimizer]:
    for class_name, cls in vars(keras.optimizers).items():
        is_optimizer = isinstance(cls, type) and issubclass(cls, keras.Optimizer)
        if is_optimizer and class_name.lower() == identifier.lower():
            return cls
    raise ValueError(
        f"{name}: there is no Keras optimizer {identifier!r}. Give another name, such "
        "as 'SGD', 'Adagrad', 'Adam', 'RMSProp' or 'Ftrl', or a Keras optimizer."
    )


def _copier_of(optimizer: keras.Optimizer) -> Callable[[], keras.Optimizer]:
    # A model_fn must not read the learning rate, a variable from outside: read it now.
    config = _remove_names(copy.deepcopy(optimizer.get_config()))
    from_config = type(optimizer).from_config
    # Keras changes the config that it reads.
    return lambda: from_config(copy.deepcopy(config))


def _remove_names(config: JSONObject) -> JSONObject:
    """Remove the numbered names that Keras gives: checkpoints contain them."""
    config.pop("name", None)
    inner = config.get("inner_optimizer")
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        _remove_names(inner["config"])
    return config
