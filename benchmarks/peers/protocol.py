"""What a worker of a parameter-server benchmark does: it trains when it is told to.

The same model, data and optimizer everywhere. Lines on standard input say how many
steps to do; the answer is the time they took and the loss.

BENCH_MODEL is `mlp` (784-2048-2048-10, or BENCH_WIDTH in place of 2048), `cnn` (the one
of TensorFlow's tutorials on MNIST) or `embedding` (4,096 ids a batch, each of one of 10
classes, and a table of 5,000,000 rows of 16). BENCH_DATA is an `.npz` file of images
and labels as Keras keeps MNIST; without it data are random. BENCH_SEED is that of the
initial weights.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODEL = os.environ.get("BENCH_MODEL", "mlp")
WIDTH = int(os.environ.get("BENCH_WIDTH", "2048"))
IS_EMBEDDING = MODEL == "embedding"
BATCH = int(os.environ.get("BENCH_BATCH", "4096" if IS_EMBEDDING else "256"))
SHAPE = {"mlp": (784,), "cnn": (28, 28, 1), "embedding": (1,)}[MODEL]
"""Of one example."""
DTYPE = "int32" if IS_EMBEDDING else "float32"
ROWS, DIM = 5_000_000, 16
_KERNELS: list[tuple[int, ...]] = {
    "mlp": list(itertools.pairwise((784, WIDTH, WIDTH, 10))),
    "cnn": [(3, 3, 1, 32), (13 * 13 * 32, 64), (64, 10)],
    "embedding": [(DIM, 10)],
}[MODEL]

_rng = np.random.default_rng(int(os.environ.get("BENCH_SEED", "0")))
if "BENCH_DATA" in os.environ:
    with np.load(os.environ["BENCH_DATA"]) as _data:
        X = (_data["x_train"] / np.float32(255)).reshape(-1, *SHAPE)
        Y = _data["y_train"].astype("int32")
else:
    if IS_EMBEDDING:
        X = _rng.integers(0, ROWS, (BATCH * 20, *SHAPE)).astype(DTYPE)
    else:
        X = _rng.normal(size=(BATCH * 20, *SHAPE)).astype(DTYPE)
    Y = _rng.integers(0, 10, BATCH * 20).astype("int32")
WEIGHTS = [
    (
        (_rng.normal(size=k) * np.sqrt(2 / np.prod(k[:-1]))).astype("float32"),
        np.zeros(k[-1], "float32"),
    )
    for k in _KERNELS
]
"""Kernels and biases that every peer starts from."""


def set_weights(model: Any) -> None:
    """Give a model's layers these kernels and biases."""
    with_kernels = [layer for layer in model.layers if hasattr(layer, "kernel")]
    for layer, pair in zip(with_kernels, WEIGHTS, strict=True):
        layer.set_weights(pair)


def optimizer(library: Any) -> Any:
    """The optimizer, of Keras' or tf_keras' `optimizers`."""
    if IS_EMBEDDING:  # One that changes only the rows that it has gradients for.
        return library.Adagrad(0.1)
    return library.Adam(1e-3, epsilon=1e-8)


def layers(library: Any, embedding: Any) -> list[Any]:
    """The model's layers, of Keras' or tf_keras' `layers`, and of a class of tables."""
    if IS_EMBEDDING:
        rows = embedding(ROWS, DIM, name="rows")
        return [rows, library.Flatten(), library.Dense(10)]
    if MODEL == "mlp":
        return [library.Dense(n, "relu") for n in (WIDTH, WIDTH)] + [library.Dense(10)]
    return [
        library.Conv2D(32, 3, activation="relu"),
        library.MaxPooling2D(),
        library.Flatten(),
        library.Dense(64, "relu"),
        library.Dense(10),
    ]


def serve(train: Callable[[int, int], object]) -> None:
    """Answer the driver until it closes the pipe.

    Args:
        train: Does steps `start` to `start + count - 1`, waits for them, and returns
            their mean loss; or a text that begins with it.
    """
    print("ready", flush=True)
    start = 0
    for line in sys.stdin:
        count = int(line)
        begin = time.perf_counter()
        loss = train(start, count)
        print(f"took {time.perf_counter() - begin} {loss}", flush=True)
        start += count
