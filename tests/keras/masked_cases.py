"""Models whose losses and metrics depend on masks and weights, and their results."""

from typing import Any

import keras
import numpy as np
from keras import layers

NUM_ROWS, BATCH_SIZE, NUM_STEPS, NUM_CLASSES = 9, 4, 6, 5  # The last batch has 1 row.


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
