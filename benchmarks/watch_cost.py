"""What the watch over the workers costs a step: nothing that can be measured?

Two workers on one core each do the same steps with and without it, in turns.

    python benchmarks/watch_cost.py
"""

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

import replicax as rx
from replicax.cluster.watch import Watch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--steps", type=int, default=400, help="steps in one timing")


def measure(rounds: int, steps: int) -> dict[bool, list[float]]:
    """Seconds per step of a small model, with (True) and without the watch."""
    strategy = rx.MultiWorkerMirroredStrategy()
    members = strategy.workers
    os.sched_setaffinity(0, {members.index % (os.cpu_count() or 1)})
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((32,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam()
        model.compile(optimizer, "mse")
    batch = next(
        iter(
            strategy.experimental_distribute_dataset(
                (np.ones((64, 32), "float32"), np.ones((64, 1), "float32")),
                batch_size=64,
            )
        )
    )

    def step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            return keras.ops.mean((model(x) - y) ** 2)

        loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            loss = strategy.run(step, (batch,))
        float(strategy.reduce("sum", loss))
        return (time.perf_counter() - begin) / steps

    run()
    first, times = members.watch, {True: [], False: []}
    if first is None:
        raise RuntimeError("watch_cost: there is one worker only")
    for _ in range(rounds):
        members.watch = None
        first.close()
        times[False].append(run())
        first = members.watch = Watch(
            members.names,
            members.addresses,
            members.index,
            first.store,
            members.timeouts,
            members.stop,
        )
        first.start()
        times[True].append(run())
    return times


if __name__ == "__main__":
    options = parser.parse_args()
    results = rx.testing.run(
        measure,
        num_workers=2,
        args=(options.rounds, options.steps),
        deadline_seconds=600,
    )
    times = results.returned["worker:0"]
    ratios = sorted(a / b for a, b in zip(times[True], times[False], strict=True))
    for kind, name in ((False, "without"), (True, "with")):
        print(f"{name} the watch: {1e6 * statistics.median(times[kind]):.0f} us a step")
    print(
        f"ratio: {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
