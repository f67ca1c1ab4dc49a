"""What a strategy of one device costs outside of steps, beside plain Keras.

Each call is made by plain Keras and by each strategy in turns, in one process; the
minimum over the rounds of each is compared.

    python benchmarks/outside_steps.py
    python benchmarks/outside_steps.py --only predict --rounds 3
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import replicax as rx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=200, help="timings of each call")
parser.add_argument("--only", help="measure calls with this in their name")
parser.add_argument("--devices", type=int, default=2, help="logical CPU devices")

Call = Callable[[], object]


def calls_of(scope: Any) -> dict[str, Call]:
    """The calls that are measured, on models made in a scope; None: plain Keras."""
    import jax
    import keras

    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 64)).astype("float32")
    y = rng.normal(size=(64, 1)).astype("float32")
    ids = rng.integers(0, 1000, (256, 256))
    classes = rng.integers(0, 10, 256)
    with scope or contextlib.nullcontext():
        mlp = keras.Sequential(
            [
                keras.Input((64,)),
                *[keras.layers.Dense(64, "relu") for _ in range(8)],
                keras.layers.Dense(1),
            ]
        )
        mlp.compile("adam", "mse", metrics=["mae"])
        wide = keras.Sequential(
            [keras.Input((1024,)), keras.layers.Dense(1024), keras.layers.Dense(1)]
        )
        wide.compile("adam", "mse")
        tokens = keras.Sequential(
            [
                keras.Input((256,), dtype="int32"),
                keras.layers.Embedding(1000, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        tokens.compile("sgd", loss)
    weights, large = mlp.get_weights(), wide.get_weights()
    kernel, other = mlp.layers[1].kernel, mlp.layers[2].kernel
    big = wide.layers[0].kernel
    rows = rng.normal(size=(64, 1024)).astype("float32")

    fit: Any = tokens.fit

    def fit_ids() -> None:
        fit(ids, classes, batch_size=32, epochs=4, verbose=0, shuffle=False)

    narrow = ids.astype("int32"), classes.astype("int32")

    def fit_narrow() -> None:
        fit(*narrow, batch_size=32, epochs=4, verbose=0, shuffle=False)

    def assigned(variable: Any, value: object) -> Call:
        def call() -> None:
            variable.assign(value)
            jax.block_until_ready(variable.value)

        return call

    return {
        "set_weights of 18 small variables": lambda: mlp.set_weights(weights),
        "set_weights of 4 MB": lambda: wide.set_weights(large),
        "get_weights": mlp.get_weights,
        "learning_rate = x": lambda: setattr(mlp.optimizer, "learning_rate", 1e-3),
        "variable.assign(other)": assigned(kernel, other),
        "variable.assign(array)": assigned(kernel, weights[2]),
        "variable.assign(4 MB array)": assigned(big, large[0]),
        "train_on_batch": lambda: mlp.train_on_batch(x, y),
        "train_on_batch of 4 MB": lambda: wide.train_on_batch(rows, y),
        "test_on_batch": lambda: mlp.test_on_batch(x, y),
        "predict_on_batch": lambda: mlp.predict_on_batch(x),
        "model(x)": lambda: np.asarray(mlp(x)),
        "train_on_batch of int64": lambda: tokens.train_on_batch(ids, classes),
        "fit of int64": fit_ids,
        "fit of int32": fit_narrow,
    }


def first_predict(scope: Any) -> float:
    """Seconds of the first `predict` of a new MobileNetV2."""
    import keras

    make: Any = keras.applications.MobileNetV2
    with scope or contextlib.nullcontext():
        model = make(weights=None, input_shape=(96, 96, 3))
    began = time.perf_counter()
    model.predict(np.zeros((8, 96, 96, 3), "float32"), verbose=0)
    return time.perf_counter() - began


def seconds(call: Call) -> float:
    """The time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print a table of ratios."""
    options = parser.parse_args()
    rx.set_logical_devices(options.devices)
    strategies = {
        "one device": rx.OneDeviceStrategy("cpu:0"),
        "mirrored on one": rx.MirroredStrategy(["cpu:0"]),
    }
    if options.devices > 1:
        strategies[f"mirrored on {options.devices}"] = rx.MirroredStrategy()
    columns = {"plain Keras": None} | {k: s.scope() for k, s in strategies.items()}
    of_columns = {name: calls_of(scope) for name, scope in columns.items()}
    print(f"| call | plain Keras | {' | '.join(list(columns)[1:])} |")
    print(f"|---|{'---|' * len(columns)}")
    for name in of_columns["plain Keras"]:
        if options.only and options.only not in name:
            continue
        times: dict[str, list[float]] = {column: [] for column in columns}
        rounds = max(5, options.rounds // 10) if "fit" in name else options.rounds
        for number in range(rounds + 2):
            for column, calls in of_columns.items():
                took = seconds(calls[name])
                if number > 1:
                    times[column].append(took)
        print_row(name, {column: min(found) for column, found in times.items()})
    name = "first predict of MobileNetV2"
    if not options.only or options.only in name:
        rounds = range(min(options.rounds, 3))
        found = {k: min(first_predict(s) for _ in rounds) for k, s in columns.items()}
        print_row(name, found)


def print_row(name: str, times: dict[str, float]) -> None:
    """Print one row: plain Keras' time, and the others' over it."""
    plain, *others = times.values()
    ratios = " | ".join(f"{took / plain:.2f}" for took in others)
    print(f"| {name} | {plain * 1e3:.3f} ms | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
