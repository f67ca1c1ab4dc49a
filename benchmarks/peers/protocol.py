"""What a worker does for `parameter_servers.py`: it trains when it is told to.

The same MLP, data and optimizer everywhere: 784-2048-2048-10, Adam. Lines on standard
input say how many steps to do; the answer is the time they took and the last loss.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable

import numpy as np

WIDTH = int(os.environ.get("BENCH_WIDTH", "2048"))
SIZES = (784, WIDTH, WIDTH, 10)
BATCH = int(os.environ.get("BENCH_BATCH", "256"))
LEARNING_RATE = 1e-3

_rng = np.random.default_rng(0)
X = _rng.normal(size=(BATCH * 20, SIZES[0])).astype("float32")
Y = _rng.integers(0, SIZES[-1], BATCH * 20).astype("int32")
WEIGHTS = [
    (
        (_rng.normal(size=(a, b)) * np.sqrt(2 / a)).astype("float32"),
        np.zeros(b, "float32"),
    )
    for a, b in itertools.pairwise(SIZES)
]
"""Kernels and biases that every peer starts from."""


def serve(train: Callable[[int, int], object]) -> None:
    """Answer the driver until it closes the pipe.

    Args:
        train: Does steps `start` to `start + count - 1`, waits for them, and returns
            the last one's global loss; or a text that begins with it.
    """
    print("ready", flush=True)
    start = 0
    for line in sys.stdin:
        count = int(line)
        begin = time.perf_counter()
        loss = train(start, count)
        print(f"took {time.perf_counter() - begin} {loss}", flush=True)
        start += count
