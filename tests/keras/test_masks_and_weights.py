"""Masks and weights count the same under every strategy as on one device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

NUM_ROWS, BATCH_SIZE, NUM_STEPS, NUM_CLASSES = 9, 4, 6, 5  # The last batch has 1 row.


def cpus(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


def split_model() -> rx.ModelParallelStrategy:
    layouts = {".*embeddings": (None, "model"), ".*gru.*|.*lstm.*": (None, "model")}
    return rx.ModelParallelStrategy(layouts, 2, devices=cpus(4))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: rx.MirroredStrategy(cpus(2)),
    "mirrored_4": lambda: rx.MirroredStrategy(cpus(4)),
    "shard_update": lambda: rx.MirroredStrategy(cpus(2), shard_update=True),
    "virtual": lambda: rx.MirroredStrategy(cpus(1), replicas_per_device=2),
    "fully_sharded": lambda: rx.FullyShardedStrategy(cpus(2)),
    "model_parallel": split_model,
    "central_storage": lambda: rx.CentralStorageStrategy(cpus(2), "cpu:4"),
}


def tokens() -> tuple[Any, Any]:
    """Sequences of other lengths, padded with zeros, and a class for each token."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 40, (NUM_ROWS, NUM_STEPS))
    x[np.arange(NUM_STEPS) >= rng.integers(1, NUM_STEPS + 1, (NUM_ROWS, 1))] = 0
    return x, (x * 7 // 3) % NUM_CLASSES


def embedding() -> tuple[Any, Any, Any]:
    model = keras.Sequential(
        [
            keras.Input((NUM_STEPS,), dtype="int32"),
            layers.Embedding(40, 32, mask_zero=True),
            layers.LSTM(32, return_sequences=True),
            layers.TimeDistributed(layers.Dense(NUM_CLASSES)),
        ]
    )
    return model, *tokens()


def masking() -> tuple[Any, Any, Any]:
    model = keras.Sequential(
        [
            keras.Input((NUM_STEPS, 2)),
            layers.Masking(),
            layers.GRU(32),
            layers.Dense(NUM_CLASSES),
        ]
    )
    x, y = tokens()
    return model, np.stack([x, x], -1).astype("float32") / 40, y[:, 0]


def weights_of(kind: str, y: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    match kind:
        case "no weights":
            return {}
        case "row weights":
            return {"sample_weight": rng.uniform(0, 2, (NUM_ROWS, 1)).astype("float32")}
        case "step weights":
            return {"sample_weight": rng.uniform(0, 2, y.shape).astype("float32")}
        case "class weights":
            return {"class_weight": {c: 0.5 + c for c in range(NUM_CLASSES)}}
    raise ValueError(kind)


CASES = {
    "masked steps": (embedding, "no weights"),
    "masked, weighted steps": (embedding, "step weights"),
    "masked steps of weighted rows": (embedding, "row weights"),
    "masked inputs": (masking, "no weights"),
    "weighted rows": (masking, "row weights"),
    "weighted classes": (masking, "class weights"),
}


def compiled(case: str) -> tuple[Any, Any, Any]:
    make, _ = CASES[case]
    model, x, y = make()
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return model, x, y


def in_loops(case: str, batch_size: int = BATCH_SIZE) -> dict[str, Any]:
    """What `fit`, `evaluate` and `predict` give."""
    model, x, y = compiled(case)
    weights = weights_of(CASES[case][1], y)
    seen = {k: v for k, v in weights.items() if k == "sample_weight"}
    options = {"batch_size": batch_size, "verbose": 0}
    return {
        "first": model.evaluate(x, y, **seen, **options, return_dict=True),
        "fit": model.fit(
            x,
            y,
            **weights,
            **options,
            shuffle=False,
            validation_data=(x, y, *seen.values()),
        ).history,
        "evaluate": model.evaluate(x, y, **seen, **options, return_dict=True),
        "predict": model.predict(x, **options),
        "weights": model.get_weights(),
    }


def on_batches(case: str) -> dict[str, Any]:
    """What `train_on_batch` and the like give, of several rows and of one."""
    model, x, y = compiled(case)
    seen = weights_of(CASES[case][1], y)
    found = {}
    for rows in (slice(4), slice(1)):
        of_rows = {k: v if k == "class_weight" else v[rows] for k, v in seen.items()}
        train, test = model.train_on_batch, model.test_on_batch
        found[f"train {rows}"] = train(x[rows], y[rows], **of_rows, return_dict=True)
        of_rows.pop("class_weight", None)
        found[f"test {rows}"] = test(x[rows], y[rows], **of_rows, return_dict=True)
        found[f"predict {rows}"] = model.predict_on_batch(x[rows])
    return {**found, "weights": model.get_weights()}


def outcome(work: Callable[[str], Any], case: str, scope: Any) -> Any:
    keras.utils.set_random_seed(1)
    with scope:
        return work(case)


@functools.cache
def expected(work: Callable[[str], Any], case: str) -> Any:
    return outcome(work, case, contextlib.nullcontext())


QUICK = ("mirrored_2", "weighted classes")
HARDEST = "masked steps of weighted rows"
"""Masks and weights of two shapes: what any other case needs of a strategy."""
PAIRS = [(n, c) for n in STRATEGIES for c in CASES if n == "mirrored_2" or c == HARDEST]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(*pair, marks=[] if pair == QUICK else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_in_loops(name: str, case: str, assert_same: Any) -> None:
    actual = outcome(in_loops, case, STRATEGIES[name]().scope())
    assert_same(actual, expected(in_loops, case))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_on_batches(name: str, case: str, assert_same: Any) -> None:
    actual = outcome(on_batches, case, STRATEGIES[name]().scope())
    assert_same(actual, expected(on_batches, case))


def own_metrics(model: Any, data: Any, y_pred: Any) -> Any:
    logs = model.compute_metrics(*data[:2], y_pred, data[2])
    del logs["loss"]  # The step does not update it.
    return logs


class Taped(keras.Sequential):
    """As tf.keras has it: a mask stays attached from the tape to the metrics."""

    def train_step(self, data: Any) -> Any:
        x, y, weights = data
        with rx.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, weights)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return own_metrics(self, data, y_pred)


class Functional(keras.Sequential):
    """The same with the functional way, where it comes with the loss."""

    def train_step(self, data: Any) -> Any:
        x, y, weights = data

        def loss_of() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(x, y, y_pred, weights), y_pred

        (_, y_pred), grads = rx.value_and_grad(
            loss_of, self.trainable_variables, has_aux=True
        )()
        self.optimizer.apply(grads)
        return own_metrics(self, data, y_pred)


@pytest.mark.slow(but=["Taped-mirrored_2", "Functional-fully_sharded"])
@pytest.mark.parametrize("name", ["mirrored_2", "fully_sharded"])
@pytest.mark.parametrize("kind", [Taped, Functional])
def test_own_train_steps(name: str, kind: Any, assert_same: Any) -> None:
    """The metrics of a step are those of `evaluate` on the weights it began with."""

    def work() -> tuple[Any, Any]:
        _, x, y = embedding()
        model = kind(
            [
                keras.Input((NUM_STEPS,), dtype="int32"),
                layers.Embedding(40, 32, mask_zero=True),
                layers.TimeDistributed(layers.Dense(NUM_CLASSES)),
            ]
        )
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
        seen = weights_of("step weights", y)
        before = model.evaluate(x, y, **seen, verbose=0, return_dict=True)
        during = model.fit(x, y, **seen, verbose=0, shuffle=False).history
        return {name: [before[name]] for name in during}, during

    with STRATEGIES[name]().scope():
        before, during = work()
    assert_same(during, before)
