"""SidecarEvaluator: evaluates checkpoints while another process trains."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import keras

from replicax._util.arguments import require_count, require_path
from replicax._util.types import PyTree
from replicax.checkpoint.entries import bind
from replicax.checkpoint.evaluation import CheckpointWatch
from replicax.checkpoint.restore import compare, restore_entries
from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.errors import CheckpointError

__all__ = ["SidecarEvaluator"]


class SidecarEvaluator:
    """Evaluates each new checkpoint of a run that trains in another process.

    (TF: `tf.keras.utils.SidecarEvaluator`.) It reads the model from checkpoints of
    `CheckpointManager(Checkpoint(model=...), ...)`, or of
    `BackupAndRestore(..., delete_checkpoint=False)` with `checkpoint_name="backup"`.
    It skips a checkpoint if a newer one is there, and evaluates the last one of a
    finished run.

    Args:
        model: A compiled model like the one in training. If it is not built yet, the
            evaluator builds it from the first batch of the data.
        data: The argument `x` of `model.evaluate`, or a tuple `(x, y)` or
            `(x, y, sample_weight)`.
        checkpoint_dir: The folder of the checkpoints.
        steps: Number of batches of each evaluation; None: all of the data.
        max_evaluations: Number of evaluations; None: until the training ends.
        callbacks: Keras callbacks for `model.evaluate`.
        log_dir: Folder of `metrics.jsonl`, which gets a line for each evaluation;
            defaults to `eval` beside `checkpoint_dir`.
        checkpoint_name: Beginning of the checkpoints' names.
        timeouts: `timeouts.checkpoint` is the longest wait for the next checkpoint.
            Defaults to `rx.Timeouts()`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `max_evaluations` is less than 1.

    Example:
        >>> import tempfile
        >>> import keras, numpy as np, replicax as rx
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> folder = tempfile.mkdtemp() + "/checkpoints"
        >>> with rx.CheckpointManager(rx.Checkpoint(model=model), folder) as manager:
        ...     path = manager.save()  # Usually in the process that trains.
        >>> data = (np.zeros((8, 1)), np.ones((8, 1)))
        >>> rx.SidecarEvaluator(model, data, folder, max_evaluations=1).start()
        ... # doctest: +ELLIPSIS
        /...checkpoints/ckpt-1: loss 1
    """

    def __init__(
        self,
        model: keras.Model,
        data: PyTree,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[PyTree] | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        checkpoint_name: str = "ckpt",
        timeouts: Timeouts | None = None,
    ) -> None:
        if max_evaluations is not None:
            what = "SidecarEvaluator: max_evaluations"
            require_count(max_evaluations, what, 1, otherwise=", or None for no limit")
        timeouts = checked_timeouts(timeouts, "SidecarEvaluator")
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"SidecarEvaluator: model must be a keras.Model; got {model!r}."
            )
        require_path(checkpoint_dir, "SidecarEvaluator: checkpoint_dir")
        require_path(log_dir or checkpoint_dir, "SidecarEvaluator: log_dir")
        self._model = model
        self._data = data
        self._watch = CheckpointWatch(
            Path(checkpoint_dir),
            checkpoint_name,
            timeouts.checkpoint,
            "SidecarEvaluator",
        )
        self._steps = steps
        self._max_evaluations = max_evaluations
        self._callbacks = list(callbacks or [])
        self._log_dir = Path(log_dir or Path(checkpoint_dir).absolute().parent / "eval")

    def start(self) -> None:
        """Evaluate until the training ends, or `max_evaluations` times.

        Raises:
            CheckpointError: If no new checkpoint appears in time, if the last one is
                damaged, or if one is of another model.
        """
        number = 0
        while self._max_evaluations is None or number < self._max_evaluations:
            newer = self._watch.next()
            if newer is None:
                return
            path, contents = newer
            if not self._model.built:  # It has no variables to restore yet.
                self._run(steps=1)
            entries, _ = bind("model", self._model)
            status = compare(entries, contents, os.fspath(path))
            # The checkpoint may have more than the model, such as the optimizer.
            status.assert_existing_objects_matched()
            try:
                restore_entries(entries, contents)
            except CheckpointError:
                if path.exists():
                    raise
                continue  # The training deleted it meanwhile, and has a newer one.
            self._evaluate(os.fspath(path))
            number += 1

    def _evaluate(self, path: str) -> None:
        results = self._run(self._steps, self._callbacks or None)
        results = {name: float(value) for name, value in results.items()}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / "metrics.jsonl").open("a") as stream:
            line = {"checkpoint": path, "time": time.time(), **results}
            stream.write(json.dumps(line) + "\n")
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
        print(f"{path}: {numbers}", flush=True)

    def _run(
        self, steps: int | None, callbacks: Sequence[PyTree] | None = None
    ) -> dict[str, PyTree]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._data)
        evaluate: Callable[..., dict[str, PyTree]] = self._model.evaluate
        return evaluate(
            x,
            y,
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
            verbose=0,
            return_dict=True,
        )
