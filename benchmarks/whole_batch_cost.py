"""What gathered rows cost a step, beside the same loss on a replica's own rows.

Two models of one case on two devices take turns: the loss of one is a function that
replicax does not know, so that targets and outputs are gathered; that of the other is
the same function, declared `rx.losses.per_example`.

    python benchmarks/whole_batch_cost.py --cases ace --rounds 15
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import replicax as rx

sys.path.insert(0, str(Path(__file__).parent / "bench" / "peers"))

import keras_models
from cases import CASES, Case

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cases", default="ace", help="keys of the benchmarks' cases")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--seconds", type=float, default=1.0, help="of one timing")


def crossentropy(y: Any, logits: Any) -> Any:
    """The loss of the cases, as a function that replicax does not know."""
    import keras

    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def fitter(case: Case, strategy: rx.Strategy, loss: Any) -> Any:
    """A function that makes some steps of `fit` and returns the seconds of one."""
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras_models.build(keras, case)
        model.compile(keras_models.optimizer_of(keras, case), loss)
    x, y = case.data(case.batch)

    def fit(steps: int) -> float:
        rows = np.arange(steps * case.batch) % len(x)
        begin = time.perf_counter()
        model.fit(x[rows], y[rows], batch_size=case.batch, verbose=0, shuffle=False)
        return (time.perf_counter() - begin) / steps

    fit(2)
    return fit


def main(cases: str, rounds: int, seconds: float) -> None:
    """Print the cost for each case."""
    rx.set_logical_devices(2)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    print("| case | ms a step | gathered | ratio, median (min to max) |")
    print("|---|---|---|---|")
    for key in cases:
        losses = (rx.losses.per_example(crossentropy), crossentropy)
        own, whole = (fitter(CASES[key], strategy, loss) for loss in losses)
        steps = max(2, round(seconds / min(own(2), whole(2))))
        pairs = [(own(steps), whole(steps)) for _ in range(rounds)]
        ratios = sorted(b / a for a, b in pairs)
        shown = [min(column) * 1e3 for column in zip(*pairs, strict=True)]
        print(
            f"| {key} | {shown[0]:.2f} | {shown[1]:.2f} | "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main(**vars(parser.parse_args()))
