"""Writes event files for the program TensorBoard, without TensorFlow.

The writers need the package tensorboard: `pip install 'replicax[tensorboard]'`. Its
`EventFileWriter` imports TensorFlow if installed; the parts used here never do.
"""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal, Self

import keras
import numpy as np
from numpy.typing import ArrayLike

from replicax.jax_loops.optax_optimizer import rate_of
from replicax.keras.session import LateCallback
from replicax.strategies.current import get_strategy

__all__ = ["SummaryWriter", "TensorBoard"]

_file_numbers = itertools.count()
Logs = Mapping[str, object] | None


class SummaryWriter:
    """Writes scalars and histograms into an event file for TensorBoard.

    The first value creates the file, under a unique name. `flush` returns when all
    values are in the file. In a cluster write on the chief (`strategy.is_chief`), or
    into a folder for each worker.
    (TF: `tf.summary.create_file_writer`.)

    Args:
        log_dir: The folder; the first value creates it. TensorBoard shows each folder
            below its `--logdir` as a run.

    Raises:
        ImportError: If the package tensorboard is not installed.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with SummaryWriter(folder) as writer:
        ...     for epoch in range(3):
        ...         writer.scalar("loss", 1 / (1 + epoch), step=epoch)
        >>> [name[:19] for name in os.listdir(folder)]
        ['events.out.tfevents']
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.log_dir = os.fspath(log_dir)
        _event_format()  # Not kept: modules cannot be copied, and callbacks are.
        self._records: Any = None

    def scalar(self, name: str, value: ArrayLike, *, step: int | ArrayLike) -> None:
        """Write a number: `name` is its chart, `step` its position there.

        Raises:
            ValueError: If `value` is not one number.
        """
        self._write(_event_format().scalar_pb(name, np.asarray(value)), step)

    def histogram(
        self,
        name: str,
        values: ArrayLike,
        *,
        step: int | ArrayLike,
        buckets: int | None = None,
    ) -> None:
        """Write the histogram of an array's values.

        Args:
            name: The name of its chart.
            values: Numbers, of any shape.
            step: The histogram's position in the chart.
            buckets: Number of buckets of equal width; None: 30.
        """
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":  # Such as bfloat16.
            array = array.astype("float32")
        self._write(_event_format().histogram_pb(name, array, buckets), step)

    def flush(self) -> None:
        """Write buffered values to the file."""
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        """Flush and close the file. Later values go into another file."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def __enter__(self) -> Self:
        """Return the writer; the block's end closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _write(self, summary: object, step: int | ArrayLike) -> None:
        form = _event_format()
        if self._records is None:
            form.gfile.makedirs(self.log_dir)
            name = (
                f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
                f"{os.getpid()}.{next(_file_numbers)}.v2"
            )
            file = form.gfile.GFile(os.path.join(self.log_dir, name), "wb")
            self._records = form.record_writer(file)
            self._add(form.event(wall_time=time.time(), file_version="brain.Event:2"))
        number = int(np.asarray(step))
        self._add(form.event(wall_time=time.time(), step=number, summary=summary))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _event_format() -> SimpleNamespace:
    """Import the used parts of the package tensorboard."""
    try:
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]  # Made on import.
        )
        from tensorboard.compat.tensorflow_stub.io import gfile
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard, SummaryWriter: event files are written with the package "
            f"tensorboard, which cannot be imported here ({error}). Install it: "
            "pip install 'replicax[tensorboard]'."
        ) from error
    return SimpleNamespace(
        event=Event,
        gfile=gfile,
        histogram_pb=histogram_pb,
        scalar_pb=scalar_pb,
        record_writer=RecordWriter,
    )


class TensorBoard(LateCallback):
    """Writes losses, metrics and weights for TensorBoard.

    Charts and folders have the names of Keras' callback, which needs TensorFlow. The
    folders `train` and `validation` have `epoch_loss` and other metrics by epoch, and
    the learning rate; `batch_loss` and others by step; histograms of weights by epoch;
    and `evaluation_loss_vs_iterations` by the optimizer's steps.

    Only the chief writes. In a cluster, pass the callback on all workers: histograms of
    sharded weights need all of them.
    (Keras: `keras.callbacks.TensorBoard`.)

    Args:
        log_dir: The folder for `tensorboard --logdir`. It may be a bucket that fsspec
            supports, such as `"gs://bucket/logs"`.
        histogram_freq: Epochs between two histograms of the weights; 0: never.
        update_freq: Steps between two writes of `batch_loss` and others; `"batch"`:
            1, `"epoch"`: never. To read them, the host waits for the step.

    Raises:
        ImportError: If the package tensorboard is not installed.

    Example:
        >>> import os, tempfile
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, folder = np.ones((8, 2)), tempfile.mkdtemp()
        >>> board = TensorBoard(folder)
        >>> _ = model.fit(x, x[:, :1], callbacks=[board], verbose=0)
        >>> os.listdir(folder)
        ['train']
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        update_freq: int | Literal["batch", "epoch"] = "epoch",
    ) -> None:
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        words = {"batch": 1, "epoch": 0}
        self.update_freq = (
            words[update_freq] if isinstance(update_freq, str) else update_freq
        )
        self._writers = {
            name: SummaryWriter(os.path.join(self.log_dir, name))
            for name in ("train", "validation")
        }
        self._step = self._first_step = 0
        self._logs: Logs = None
        if self.update_freq:
            # `fit` waits for each step's losses if a callback has this method.
            self.on_train_batch_end = self._write_step

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Continue the count of steps from the last epoch."""
        self._first_step = self._step

    def _write_step(self, batch: int, logs: Logs = None) -> None:
        self._step = self._first_step + batch + 1
        if self._step % self.update_freq == 0:
            self._scalars("train", "batch_{}", logs, self._step)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Keep the logs, to which later callbacks may add values."""
        self._logs = logs

    def after_epoch_end(self, epoch: int) -> None:
        """Write the epoch's logs, and histograms at their interval."""
        train: dict[str, object] = {}
        validation: dict[str, object] = {}
        for name, value in (self._logs or {}).items():
            is_own = not name.startswith("val_")
            (train if is_own else validation)[name.removeprefix("val_")] = value
        optimizer: Any = getattr(self.model, "optimizer", None)
        rate = None if optimizer is None else rate_of(optimizer)
        if train and rate is not None:
            train["learning_rate"] = _array(rate)
        self._scalars("train", "epoch_{}", train, epoch)
        self._scalars("validation", "epoch_{}", validation, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._histograms(epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_test_end(self, logs: Logs = None) -> None:
        """Write the results of `evaluate`, by the optimizer's steps."""
        optimizer: Any = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            step = int(_array(optimizer.iterations))
            self._scalars("validation", "evaluation_{}_vs_iterations", logs, step)
            self._writers["validation"].flush()

    def on_train_end(self, logs: Logs = None) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _scalars(self, folder: str, name: str, logs: Logs, step: int) -> None:
        if _writes():
            for key, value in (logs or {}).items():
                if np.ndim(number := np.asarray(value)) == 0:
                    self._writers[folder].scalar(name.format(key), number, step=step)

    def _histograms(self, epoch: int) -> None:
        model: Any = self.model
        for layer in model.layers:
            for weight in layer.weights:
                # On all workers: gathering a sharded weight is a collective.
                values = _array(weight)
                if _writes():
                    name = f"{weight.path.replace(':', '_')}/histogram"
                    self._writers["train"].histogram(name, values, step=epoch)


def _array(value: object) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _writes() -> bool:
    """Whether this process is the chief, and runs its programs."""
    strategy = get_strategy()
    return strategy.is_chief and not strategy.runner.is_dry
