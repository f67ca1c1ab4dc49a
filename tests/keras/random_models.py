"""Random models, data and arguments of `fit`, equal for equal seeds.

It imports no replicax: a process of plain Keras runs the same cases as an oracle.
"""

import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics, ops, optimizers

ACTIVATIONS = ["relu", "tanh", "gelu", "softplus", "linear"]
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]


class AddsLoss(layers.Layer):
    """Adds a loss of its inputs, and has a weight of its own."""

    def build(self, input_shape):
        self.scale = self.add_weight((input_shape[-1],), "ones", name="scale")

    def call(self, x):
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return x * self.scale


class Draw:
    """Draws the parts of a case; `in_shares`: for workers that know only their rows."""

    def __init__(self, seed: int, in_shares: bool) -> None:
        self._random = np.random.RandomState(seed)
        self.in_shares = in_shares
        # A worker needs a row of each batch.
        self.batch_size = self.number(2, 16)
        self.num_rows = self.batch_size * self.number(1, 4) + self.number(2, 9)
        if in_shares and self.num_rows % self.batch_size == 1:
            self.num_rows += 1

    def number(self, least: int, end: int) -> int:
        return int(self._random.randint(least, end))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices))]

    def normal(self, *shape: int) -> np.ndarray:
        return self._random.normal(size=shape).astype("float32")

    def uniform(self, *shape: int) -> np.ndarray:
        return self._random.uniform(0.1, 2.0, size=shape).astype("float32")

    def integers(self, end: int, *shape: int) -> np.ndarray:
        return self._random.randint(0, end, shape).astype("int32")


def _dense(draw: Draw, units: int) -> keras.Layer:
    return layers.Dense(
        units,
        activation=draw.one_of(*ACTIVATIONS),
        kernel_regularizer=draw.one_of(None, "l2", keras.regularizers.L1(1e-3)),
        activity_regularizer=draw.one_of(None, None, "l2"),
        kernel_constraint=draw.one_of(None, None, "max_norm", "unit_norm"),
        trainable=draw.number(0, 6) > 0,
    )


def _vectors(draw: Draw) -> tuple[Any, Any, Any]:
    """Inputs `[6]`, their data, and the features of a model."""
    inputs = features = keras.Input((6,))
    for _ in range(draw.number(1, 4)):
        features = _dense(draw, draw.one_of(4, 6, 8))(features)
        normalization = draw.one_of(
            layers.LayerNormalization, layers.RMSNormalization, AddsLoss, layers.Flatten
        )
        features = normalization()(features)
    return inputs, draw.normal(draw.num_rows, 6), features


def _images(draw: Draw) -> tuple[Any, Any, Any]:
    inputs = features = keras.Input((6, 6, 2))
    for _ in range(draw.number(1, 3)):
        layer = draw.one_of(
            layers.Conv2D(4, 3, padding="same", strides=draw.one_of(1, 2)),
            layers.SeparableConv2D(4, 3, padding="same"),
            layers.DepthwiseConv2D(3, padding="same", activation="relu"),
        )
        pooling = draw.one_of(layers.MaxPooling2D, layers.AveragePooling2D)
        features = pooling(2, padding="same")(layer(features))
    features = draw.one_of(layers.GlobalAveragePooling2D, layers.Flatten)()(features)
    return inputs, draw.normal(draw.num_rows, 6, 6, 2), features


def _words(draw: Draw) -> tuple[Any, Any, Any]:
    inputs = keras.Input((5,), dtype="int32")
    features = layers.Embedding(11, 6, mask_zero=bool(draw.number(0, 2)))(inputs)
    layer = draw.one_of(layers.LSTM, layers.GRU, layers.SimpleRNN)
    return inputs, draw.integers(11, draw.num_rows, 5), layer(5)(features)


def _named(draw: Draw) -> tuple[Any, Any, Any]:
    inputs = {"a": keras.Input((6,)), "b": keras.Input((3,), dtype="int32")}
    embedded = layers.Flatten()(layers.Embedding(9, 3)(inputs["b"]))
    features = layers.Concatenate()([_dense(draw, 5)(inputs["a"]), embedded])
    rows = draw.num_rows
    return inputs, {"a": draw.normal(rows, 6), "b": draw.integers(9, rows, 3)}, features


def _head(draw: Draw, features: Any) -> tuple[Any, np.ndarray, Any, list[Any]]:
    """An output, its targets, loss and metrics."""
    reduction = draw.one_of(*REDUCTIONS[: 2 if draw.in_shares else 3])
    rows = draw.num_rows
    match draw.one_of("numbers", "classes", "yes or no"):
        case "numbers":
            loss = draw.one_of(losses.MeanSquaredError, losses.Huber, losses.LogCosh)
            found = ["mae", metrics.RootMeanSquaredError(), metrics.R2Score()]
            y, output = draw.normal(rows, 2), layers.Dense(2)(features)
            return output, y, loss(reduction=reduction), found
        case "classes":
            loss = losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=reduction
            )
            found = ["accuracy", metrics.SparseTopKCategoricalAccuracy(2)]
            return layers.Dense(4)(features), draw.integers(4, rows), loss, found
        case _:
            loss = losses.BinaryCrossentropy(reduction=reduction)
            found = [metrics.AUC(num_thresholds=20), metrics.Recall(), "accuracy"]
            y = draw.integers(2, rows, 1).astype("float32")
            return layers.Dense(1, activation="sigmoid")(features), y, loss, found


def _optimizer(draw: Draw) -> keras.Optimizer:
    decay = optimizers.schedules.ExponentialDecay(3e-2, 2, 0.7)
    options = {
        draw.one_of("clipnorm", "global_clipnorm", "clipvalue"): 0.3,
        "weight_decay": draw.one_of(None, 1e-2),
        "gradient_accumulation_steps": draw.one_of(None, None, 2, 3),
        "use_ema": draw.one_of(False, False, True),
        "learning_rate": draw.one_of(1e-2, 5e-2, decay),
    }
    # A small epsilon makes much of what float32 rounds.
    kinds: list[Callable[..., keras.Optimizer]] = [
        lambda **given: optimizers.SGD(momentum=0.9, nesterov=True, **given),
        lambda **given: optimizers.Adam(epsilon=1e-2, amsgrad=True, **given),
        lambda **given: optimizers.RMSprop(epsilon=1e-2, momentum=0.5, **given),
        optimizers.Adagrad,
        lambda **given: optimizers.Adamax(epsilon=1e-2, **given),
    ]
    return draw.one_of(*kinds)(**options)


def _batches(x: Any, y: Any, draw: Draw) -> Iterator[tuple[Any, Any]]:
    size = draw.batch_size
    for start in range(0, draw.num_rows, size):
        rows = slice(start, start + size)
        cut: Any = keras.tree.map_structure(lambda a, rows=rows: a[rows], (x, y))
        yield cut


def outcome(seed: int, in_shares: bool = False) -> dict[str, Any]:
    """Train and evaluate the model of a seed, in the scope of a strategy, if any."""
    draw = Draw(seed, in_shares)
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    kinds = [_vectors, _vectors, _images, _named, _words]
    inputs, x, features = draw.one_of(*kinds[: 4 if in_shares else 5])(draw)
    heads = [_head(draw, features) for _ in range(draw.one_of(1, 1, 2))]
    outputs, ys, of_losses, of_metrics = map(list, zip(*heads, strict=True))
    only = len(heads) == 1
    model = keras.Model(inputs, outputs[0] if only else outputs)
    y = ys[0] if only else ys
    model.compile(
        _optimizer(draw),
        of_losses[0] if only else of_losses,
        loss_weights=None if only else [0.3, 2.0],
        **{draw.one_of("metrics", "weighted_metrics"): of_metrics},
        steps_per_execution=1 if in_shares else draw.number(1, 4),
    )
    weights = [draw.uniform(draw.num_rows) for _ in heads]
    data: dict[str, Any] = {"x": x, "y": y, "batch_size": draw.batch_size}
    data["sample_weight"] = draw.one_of(None, weights[0] if only else weights)
    data["shuffle"] = bool(draw.number(0, 2))
    if draw.one_of(True, False, False):
        data = {"x": _batches(x, y, draw), "shuffle": False}
    data["epochs"] = draw.number(1, 4) if "batch_size" in data else 1
    data["validation_data"] = draw.one_of(None, (x, y))
    size = draw.number(3, 20)
    history = model.fit(**data, validation_batch_size=size, verbose=0)
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "evaluated": model.evaluate(x, y, batch_size=size, verbose=0),
        "predicted": model.predict(x, batch_size=size, verbose=0),
    }


if __name__ == "__main__":
    # python random_models.py FILE IN_SHARES SEED...: the outcomes of plain Keras.
    warnings.simplefilter("ignore")
    assert "replicax" not in sys.modules
    file, shares, *seeds = sys.argv[1:]
    found = {int(seed): outcome(int(seed), shares == "True") for seed in seeds}
    with open(file, "wb") as out:
        pickle.dump(found, out)
