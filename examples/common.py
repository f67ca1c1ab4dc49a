"""What the examples share: options, devices, timing, the report and the picture."""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import keras
from data import Data

__all__ = [
    "EpochTimer",
    "add_replicas",
    "devices",
    "parser",
    "plot_history",
    "print_report",
]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of the examples that train on images; `description`: a docstring."""
    result = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    add_replicas(result)
    result.add_argument(
        "--data",
        metavar="PATH",
        help=".npz file in the layout of keras.datasets; default: the 8x8 digits",
    )
    result.add_argument("--epochs", type=int, default=15, metavar="N")
    result.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="per replica"
    )
    return result


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add the option for `devices`."""
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="number of devices; default: all accelerators, else 2 logical CPU devices",
    )


def devices(num_replicas: int | None) -> list[str] | None:
    """Names of the devices to use; None: all. Must come before anything else of JAX."""
    rx.set_logical_devices(num_replicas or 2)  # Unused where there is an accelerator.
    if num_replicas is None:
        return None
    return [f"{jax.default_backend()}:{i}" for i in range(num_replicas)]


class EpochTimer(keras.callbacks.Callback):
    """Measures training speed without the first epoch, in which steps are compiled.

    For `fit` with validation data it is a callback; loops use `with timer.epoch():`.

    Args:
        num_examples: Examples in one epoch.
    """

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self._num_examples = num_examples
        self._seconds: list[float] = []
        self._started = 0.0

    @contextlib.contextmanager
    def epoch(self) -> Iterator[None]:
        self.on_epoch_begin()
        yield
        self._seconds.append(time.perf_counter() - self._started)

    def on_epoch_begin(self, epoch: int = 0, logs: Any = None) -> None:
        self._started = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        jax.block_until_ready([v.value for v in self.model.trainable_variables])
        self._seconds.append(time.perf_counter() - self._started)

    def __str__(self) -> str:
        later = self._seconds[1:]
        if not later:
            return "not measured: the first epoch compiles, train for two or more"
        speed = self._num_examples * len(later) / sum(later)
        epochs = f"epochs 2 to {len(self._seconds)}" if len(later) > 1 else "epoch 2"
        return f"{speed:,.0f} examples/s  ({epochs})"


def print_report(
    strategy: rx.Strategy, data: Data, batch_size: int, timer: EpochTimer, accuracy: Any
) -> None:
    """Print the block at the end of a run; `batch_size` is the global one."""
    num_replicas = strategy.num_replicas_in_sync
    print()
    print(f"data               {data.name}, {len(data.x_train):,} training examples")
    print(f"replicas           {num_replicas}  {strategy!r}")
    print(f"global batch       {batch_size}  ({batch_size // num_replicas} a replica)")
    print(f"throughput         {timer}")
    print(f"held-out accuracy  {accuracy:.2%}  ({len(data.x_test):,} examples)")


def plot_history(history: dict[str, list[float]], title: str, path: str) -> None:
    """Draw loss and accuracy over epochs, on training and held-out data, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, name in zip(panels, ("loss", "accuracy"), strict=True):
        for key, label, style in (
            (name, "training (mean over the epoch)", "--"),
            (f"val_{name}", "held out (after the epoch)", "-"),
        ):
            values = history[key]
            panel.plot(
                range(1, len(values) + 1), values, style, marker=".", label=label
            )
        panel.set_xlabel("epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss (cross-entropy)")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    panels[1].set_ylabel("accuracy")
    panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    print(f"training curve     {path}")
