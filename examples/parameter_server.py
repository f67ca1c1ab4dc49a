"""Train a Keras model with parameter servers and workers that need not keep pace.

Every task runs this same script. The launcher starts all tasks on one machine:

    replicax run --workers 3 --ps 2 examples/parameter_server.py

The chief, which is worker 0, reports at the end, and draws how the loss went down and
how stale the gradients of each worker were.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import math
from collections import Counter
from pathlib import Path

import common
import keras
from data import load


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        metavar="PATH",
        help=".npz file in the layout of keras.datasets; default: the 8x8 digits",
    )
    parser.add_argument("--epochs", type=int, default=6, metavar="N")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="of each worker's step"
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        metavar="K",
        help="most updates by others during a worker's step; default: any number",
    )
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="folder for the pictures"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    # In a task of the type "ps" this serves, and ends the process after the training.
    # Large variables are cut, so that every server has about as much to do.
    partitioner = rx.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=64 << 10, max_shards=8
    )
    strategy = rx.ParameterServerStrategy(
        variable_partitioner=partitioner,
        max_staleness=options.max_staleness,
    )
    keras.utils.set_random_seed(0)
    data = load(options.data)
    # The schedule counts the steps of all workers together.
    num_steps = options.epochs * math.ceil(len(data.x_train) / options.batch_size)
    learning_rate = keras.optimizers.schedules.CosineDecay(2e-3, num_steps)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(data.x_train.shape[1:]),
                keras.layers.Flatten(),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(data.num_classes),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    timer = common.EpochTimer(len(data.x_train))
    # All workers pass the same data; each trains on the batches that it was free for.
    # The values are the same for all after an epoch: the chief alone evaluates them.
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(data.x_test, data.y_test) if strategy.is_chief else None,
        callbacks=[timer] if strategy.is_chief else [],
        verbose=2 if strategy.is_chief else 0,
    )
    if not strategy.is_chief:
        return
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    print()
    print(f"data               {data.name}, {len(data.x_train):,} training examples")
    print(f"strategy           {strategy!r}")
    print(f"throughput         {timer}")
    staleness = strategy.staleness()
    for worker, histogram in staleness.items():
        print(f"{worker:18} {describe(histogram)}")
    print(f"held-out accuracy  {accuracy:.2%}  ({len(data.x_test):,} examples)")
    draw(history.history, staleness, data.name, Path(options.out))


def describe(histogram: dict[int, int]) -> str:
    """The staleness of a worker's gradients in a line."""
    total = sum(histogram.values())
    mean = sum(k * count for k, count in histogram.items()) / total
    return f"staleness {mean:.1f} in the mean, {max(histogram)} at most"


def tail_of(counts: dict[int, int]) -> int:
    """The least staleness that at most a hundredth of the gradients reach."""
    left = sum(counts.values())
    most = left / 100
    for k in sorted(counts):
        if left <= most:
            return k
        left -= counts[k]
    return max(counts)


def draw(
    history: dict[str, list[float]],
    staleness: dict[str, dict[int, int]],
    name: str,
    folder: Path,
) -> None:
    """Write `loss_curve.png` and `staleness.png`."""
    try:
        import matplotlib
    except ImportError:
        print("pictures           none: they need `pip install 'replicax[examples]'`")
        return
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{name}: {len(staleness)} workers, asynchronous"
    common.plot_history(history, title, str(folder / "loss_curve.png"))
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    counts = Counter[int]()
    for histogram in staleness.values():
        counts.update(histogram)
    last = tail_of(counts)
    figure, panel = pyplot.subplots(figsize=(8, 4), layout="constrained")
    width = 0.8 / len(staleness)
    for i, (worker, histogram) in enumerate(staleness.items()):
        shares = Counter[int]()
        for k, count in histogram.items():
            shares[min(k, last)] += count / sum(histogram.values())
        shift = (i - (len(staleness) - 1) / 2) * width
        panel.bar(
            [k + shift for k in shares],
            list(shares.values()),
            width,
            label=f"{worker}: {describe(histogram).removeprefix('staleness ')}",
        )
    panel.set_xlabel(
        "staleness: updates made between fetching the values and applying the gradient"
    )
    panel.set_ylabel("share of the worker's gradients")
    ticks = [*range(0, last, 1 + last // 25), last]
    rest = "\nor more" if last < max(counts) else ""
    panel.set_xticks(ticks, [*map(str, ticks[:-1]), f"{last}{rest}"])
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.legend(frameon=False)
    panel.set_title(title)
    path = folder / "staleness.png"
    figure.savefig(path, dpi=150)
    print(f"staleness          {path}")


if __name__ == "__main__":
    main()
