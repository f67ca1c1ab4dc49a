"""Every loss and metric of Keras, and kinds that users write, by the targets they need.

Each entry is `(kind of targets, loss or metric)`, made anew by a function.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import losses, metrics, ops

NUM_CLASSES = 4

Entry = tuple[str, Callable[[], Any]]

# Kinds: "numbers", "positive", "signs", "binary" and "shares" (sigmoid), "one_hot"
# (softmax), "classes" (softmax), "logits" (of classes), "sequence" (for CTC),
# "vectors", "image" (sigmoid).


def centered(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p - ops.mean(y - p, axis=0)))


def contrastive(y: Any, p: Any) -> Any:
    similarity = ops.matmul(p, ops.transpose(p)) / 0.5
    return losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(p)[0]), similarity, from_logits=True
    )


def halves(y: Any, p: Any) -> Any:
    n = ops.shape(p)[0] // 2
    return ops.mean(ops.square(p[:n] - p[n : 2 * n]))


def flipped(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(p - ops.flip(p, axis=0))) + ops.mean(
        ops.abs(p - ops.roll(p, 1, axis=0))
    )


def segments(y: Any, p: Any) -> Any:
    group = ops.cast(y[:, 0] > 0, "int32")
    return ops.sum(ops.square(ops.segment_sum(p, group, num_segments=2)))


def of_positive(y: Any, p: Any) -> Any:
    count = ops.cast(ops.maximum(ops.count_nonzero(y > 0), 1), "float32")
    return ops.sum(ops.square(y - p) * ops.cast(y > 0, "float32")) / count


def class_weighted(y: Any, p: Any) -> Any:
    share = ops.mean(y, axis=0, keepdims=True)
    return ops.mean(-y * ops.log(p + 1e-6) / (share + 0.1))


def reciprocal(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p)) * ops.reciprocal(1.0 + ops.sum(ops.abs(y)))


def ranked(y: Any, p: Any) -> Any:
    return ops.sum(
        ops.relu(1 - ops.sign(y - ops.transpose(y)) * (p - ops.transpose(p)))
    )


def quantile(y: Any, p: Any) -> Any:
    return ops.sort(ops.square(y - p)[:, 0])[-1]


class SumOverBatch(losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sum(ops.abs(y_true - y_pred)) / 16


class SquaresOfSubclass(losses.MeanSquaredError):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sqrt(ops.mean(super().call(y_true, y_pred)) + 1.0)


class OwnCall(losses.Loss):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        error = ops.abs(y_true - y_pred)
        return ops.max(error) + ops.sum(error) / ops.cast(ops.size(error), "float32")


LOSSES: dict[str, Entry] = {
    "BinaryCrossentropy": ("shares", losses.BinaryCrossentropy),
    "BinaryFocalCrossentropy": ("shares", losses.BinaryFocalCrossentropy),
    "CTC": ("sequence", losses.CTC),
    "CategoricalCrossentropy": ("one_hot", losses.CategoricalCrossentropy),
    "CategoricalFocalCrossentropy": ("one_hot", losses.CategoricalFocalCrossentropy),
    "CategoricalGeneralizedCrossEntropy": (
        "classes",
        losses.CategoricalGeneralizedCrossEntropy,
    ),
    "CategoricalHinge": ("one_hot", losses.CategoricalHinge),
    "Circle": ("classes_of_vectors", losses.Circle),
    "CosineSimilarity": ("vectors", losses.CosineSimilarity),
    "Dice": ("image", losses.Dice),
    "Hinge": ("signs", losses.Hinge),
    "Huber": ("numbers", losses.Huber),
    "KLDivergence": ("one_hot", losses.KLDivergence),
    "LogCosh": ("numbers", losses.LogCosh),
    "MeanAbsoluteError": ("numbers", losses.MeanAbsoluteError),
    "MeanAbsolutePercentageError": ("positive", losses.MeanAbsolutePercentageError),
    "MeanSquaredError": ("numbers", losses.MeanSquaredError),
    "MeanSquaredLogarithmicError": ("positive", losses.MeanSquaredLogarithmicError),
    "Poisson": ("positive", losses.Poisson),
    "SparseCategoricalCrossentropy": ("classes", losses.SparseCategoricalCrossentropy),
    "SquaredHinge": ("signs", losses.SquaredHinge),
    "Tversky": ("image", losses.Tversky),
    "Dice of examples": ("image", lambda: losses.Dice(axis=(1, 2))),
    "Dice over rows": ("image", lambda: losses.Dice(axis=0)),
    "Cosine over rows": ("vectors", lambda: losses.CosineSimilarity(axis=0)),
    "summed": ("numbers", lambda: losses.MeanSquaredError(reduction="sum")),
    "ignored class": (
        "classes",
        lambda: losses.SparseCategoricalCrossentropy(ignore_class=1),
    ),
    "a name": ("image", lambda: "dice"),
    "a function of Keras": ("numbers", lambda: losses.mean_squared_error),
    "sum over batch": ("numbers", SumOverBatch),
    "subclass": ("numbers", SquaresOfSubclass),
    "own __call__": ("numbers", OwnCall),
    "mean": ("numbers", lambda: lambda y, p: ops.mean(ops.square(y - p))),
    "sum": ("numbers", lambda: lambda y, p: ops.sum(ops.square(y - p))),
    "rmse": ("numbers", lambda: lambda y, p: ops.sqrt(ops.mean(ops.square(y - p)))),
    "each": ("numbers", lambda: lambda y, p: ops.square(y - p)),
    "std": ("numbers", lambda: lambda y, p: ops.std(y - p)),
    "centered": ("numbers", lambda: centered),
    "contrastive": ("vectors", lambda: contrastive),
    "halves": ("vectors", lambda: halves),
    "flips and rolls": ("vectors", lambda: flipped),
    "segments": ("numbers", lambda: segments),
    "per positive": ("numbers", lambda: of_positive),
    "class weights": ("one_hot", lambda: class_weighted),
    "reciprocal": ("numbers", lambda: reciprocal),
    "ranking": ("numbers", lambda: ranked),
    "largest": ("numbers", lambda: quantile),
}

# From Keras 3.16 on.
if hasattr(losses, "SparseCategoricalFocalCrossentropy"):
    LOSSES["SparseCategoricalFocalCrossentropy"] = (
        "classes",
        losses.SparseCategoricalFocalCrossentropy,
    )


class State(metrics.Metric):
    """Changes a state and a count by a rule."""

    def __init__(self, rule: Callable[..., None]) -> None:
        super().__init__(name=rule.__name__)
        self.rule = rule
        self.state = self.add_variable((), "zeros", name="state")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.rule(self.state, self.count, ops.abs(y - p))

    def result(self) -> Any:
        return self.state + 0.001 * self.count


def num(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], "float32")


def running_mean(s: Any, n: Any, e: Any) -> None:
    n.assign_add(num(e))
    s.assign_add((ops.mean(e) - s) * num(e) / n)


def ratio(s: Any, n: Any, e: Any) -> None:
    s.assign((s * n + ops.sum(e)) / (n + num(e)))
    n.assign_add(num(e))


def moving_average(s: Any, n: Any, e: Any) -> None:
    s.assign(0.9 * s + 0.1 * ops.mean(e))
    n.assign_add(1)


def largest(s: Any, n: Any, e: Any) -> None:
    s.assign(ops.maximum(s, ops.max(e)))


def largest_by_cond(s: Any, n: Any, e: Any) -> None:
    s.assign(ops.cond(ops.mean(e) > s.value, lambda: ops.mean(e), lambda: s.value))


def product(s: Any, n: Any, e: Any) -> None:
    s.assign((s + 1) * (1 + ops.mean(e)) - 1)


def sum_of_roots(s: Any, n: Any, e: Any) -> None:
    s.assign_add(ops.sqrt(ops.mean(e)))


def last(s: Any, n: Any, e: Any) -> None:
    s.assign(ops.mean(e))


def first(s: Any, n: Any, e: Any) -> None:
    s.assign(ops.where(n.value == 0, e[0, 0], s.value))
    n.assign_add(1)


def spread(s: Any, n: Any, e: Any) -> None:
    s.assign_add(ops.std(e))


def sums(s: Any, n: Any, e: Any) -> None:
    s.assign_add(ops.sum(e))
    n.assign_add(num(e))


class SumLoss(metrics.Metric):
    """Calls a loss of Keras with `reduction="sum"`."""

    def __init__(self) -> None:
        super().__init__(name="sum_loss")
        self.total = self.add_variable((), "zeros", name="total")
        self.loss = losses.MeanSquaredError(reduction="sum")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(self.loss(y, p, sample_weight))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.total)


RULES = (
    running_mean,
    ratio,
    moving_average,
    largest,
    largest_by_cond,
    product,
    sum_of_roots,
    last,
    first,
    spread,
    sums,
)

METRICS: dict[str, Entry] = {
    "AUC": ("binary", metrics.AUC),
    "Accuracy": ("rounded", metrics.Accuracy),
    "BinaryAccuracy": ("binary", metrics.BinaryAccuracy),
    "BinaryCrossentropy": ("shares", metrics.BinaryCrossentropy),
    "BinaryIoU": ("binary", metrics.BinaryIoU),
    "CategoricalAccuracy": ("one_hot", metrics.CategoricalAccuracy),
    "CategoricalCrossentropy": ("one_hot", metrics.CategoricalCrossentropy),
    "CategoricalHinge": ("one_hot", metrics.CategoricalHinge),
    "ConcordanceCorrelation": ("vectors", metrics.ConcordanceCorrelation),
    "CosineSimilarity": ("vectors", metrics.CosineSimilarity),
    "F1Score": ("one_hot", metrics.F1Score),
    "FBetaScore": ("one_hot", lambda: metrics.FBetaScore("micro", 2.0)),
    "FalseNegatives": ("binary", metrics.FalseNegatives),
    "FalsePositives": ("binary", metrics.FalsePositives),
    "Hinge": ("signs", metrics.Hinge),
    "IoU": ("rounded", lambda: metrics.IoU(4, [0, 1])),
    "KLDivergence": ("one_hot", metrics.KLDivergence),
    "LogCoshError": ("numbers", metrics.LogCoshError),
    "MeanAbsoluteError": ("numbers", metrics.MeanAbsoluteError),
    "MeanAbsolutePercentageError": ("positive", metrics.MeanAbsolutePercentageError),
    "MeanIoU": ("rounded", lambda: metrics.MeanIoU(4)),
    "MeanSquaredError": ("numbers", metrics.MeanSquaredError),
    "MeanSquaredLogarithmicError": ("positive", metrics.MeanSquaredLogarithmicError),
    "OneHotIoU": ("one_hot", lambda: metrics.OneHotIoU(NUM_CLASSES, [0, 1])),
    "OneHotMeanIoU": ("one_hot", lambda: metrics.OneHotMeanIoU(NUM_CLASSES)),
    "PearsonCorrelation": ("vectors", metrics.PearsonCorrelation),
    "Poisson": ("positive", metrics.Poisson),
    "Precision": ("binary", metrics.Precision),
    "PrecisionAtRecall": ("binary", lambda: metrics.PrecisionAtRecall(0.5)),
    "R2Score": ("numbers", metrics.R2Score),
    "Recall": ("binary", metrics.Recall),
    "RecallAtPrecision": ("binary", lambda: metrics.RecallAtPrecision(0.5)),
    "RootMeanSquaredError": ("numbers", metrics.RootMeanSquaredError),
    "SensitivityAtSpecificity": (
        "binary",
        lambda: metrics.SensitivityAtSpecificity(0.5),
    ),
    "SparseCategoricalAccuracy": ("classes", metrics.SparseCategoricalAccuracy),
    "SparseCategoricalCrossentropy": (
        "classes",
        metrics.SparseCategoricalCrossentropy,
    ),
    "SparseTopKCategoricalAccuracy": (
        "classes",
        lambda: metrics.SparseTopKCategoricalAccuracy(2),
    ),
    "SpecificityAtSensitivity": (
        "binary",
        lambda: metrics.SpecificityAtSensitivity(0.5),
    ),
    "SquaredHinge": ("signs", metrics.SquaredHinge),
    "TopKCategoricalAccuracy": (
        "one_hot",
        lambda: metrics.TopKCategoricalAccuracy(2),
    ),
    "TrueNegatives": ("binary", metrics.TrueNegatives),
    "TruePositives": ("binary", metrics.TruePositives),
    "Pearson over rows": ("vectors", lambda: metrics.PearsonCorrelation(axis=0)),
    "Concordance over rows": (
        "vectors",
        lambda: metrics.ConcordanceCorrelation(axis=0),
    ),
    "a name": ("classes", lambda: "accuracy"),
    "rmse": ("numbers", lambda: lambda y, p: ops.sqrt(ops.mean(ops.square(y - p)))),
    "covariance": ("numbers", lambda: lambda y, p: ops.mean(y * p) - ops.mean(p)),
    "each": ("numbers", lambda: lambda y, p: ops.abs(y - p)),
    "dice": ("image", lambda: losses.dice),
    "sum loss": ("numbers", SumLoss),
    **{rule.__name__: ("numbers", lambda rule=rule: State(rule)) for rule in RULES},
}
"""`Mean` and `Sum` take values, not targets and outputs."""

UNITS = {
    "numbers": (1, "linear"),
    "positive": (1, "softplus"),
    "signs": (1, "tanh"),
    "binary": (1, "sigmoid"),
    "shares": (3, "sigmoid"),
    "one_hot": (NUM_CLASSES, "softmax"),
    "classes": (NUM_CLASSES, "softmax"),
    "classes_of_vectors": (3, "linear"),
    "rounded": (1, "softplus"),
    "sequence": (24, "linear"),
    "vectors": (3, "linear"),
    "image": (6, "sigmoid"),
}
"""The number of outputs for each kind of targets, and their activation."""


def output(kind: str, x: Any, name: str) -> Any:
    """An output of a model for a kind of targets."""
    units, activation = UNITS[kind]
    seed = keras.initializers.GlorotUniform(sum(map(ord, name)))
    dense = keras.layers.Dense(units, activation, kernel_initializer=seed)
    shape = {"sequence": (6, 4), "image": (2, 3)}.get(kind)
    x = dense(x)
    if kind == "rounded":
        x = keras.ops.round(x)
    return keras.layers.Reshape(shape or (units,), name=name)(x)


def targets(kind: str, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Targets of a kind, `[num_rows, ...]`."""
    classes = rng.integers(0, NUM_CLASSES, num_rows)
    if kind in ("classes", "classes_of_vectors"):
        return classes.astype("int32")
    if kind == "one_hot":
        return np.eye(NUM_CLASSES, dtype="float32")[classes]
    if kind == "sequence":  # Labels from 1: 0 is CTC's blank.
        return rng.integers(1, 4, (num_rows, 2)).astype("int32")
    if kind == "rounded":
        return rng.integers(0, 4, (num_rows, 1)).astype("float32")
    shape = (num_rows, 2, 3) if kind == "image" else (num_rows, UNITS[kind][0])
    values = rng.normal(size=shape).astype("float32")
    if kind == "positive":
        return np.abs(values) + 0.1
    if kind == "signs":
        return np.sign(values)
    if kind in ("binary", "shares", "image"):
        return (values > 0).astype("float32")
    return values
