"""SidecarEvaluator: evaluates checkpoints while another process trains."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from replicax.checkpoint import CheckpointError, storage
from replicax.checkpoint.checkpoint import compare
from replicax.checkpoint.manager import FINISHED, numbered_checkpoints
from replicax.checkpoint.slots import ArraySlot, bind

__all__ = ["SidecarEvaluator"]

_POLL_SECONDS = 0.5


class SidecarEvaluator:
    """Evaluates each new checkpoint of a run that trains in another process.

    (TF: `tf.keras.utils.SidecarEvaluator`.) Takes the model from checkpoints of
    `CheckpointManager(Checkpoint(model=...), ...)`, or of
    `BackupAndRestore(..., delete_checkpoint=False)` with `checkpoint_name="backup"`.
    It skips checkpoints that are older than one it has evaluated, or deleted before it
    has read them, and always evaluates the last one of a run that says it has ended.

    Args:
        model: A compiled and built model like the one that is trained.
        data: What `model.evaluate` takes as `x`, or a tuple `(x, y)` or
            `(x, y, sample_weight)`.
        checkpoint_dir: The folder of the checkpoints.
        steps: Number of batches of each evaluation; None: all of the data.
        max_evaluations: Stop after so many; None: when the training has ended.
        callbacks: Keras callbacks for `model.evaluate`.
        log_dir: Folder of `metrics.jsonl`, which gets a line for each evaluation;
            defaults to `eval` beside `checkpoint_dir`.
        checkpoint_name: Beginning of the checkpoints' names.
        timeout_seconds: How long to wait for the next checkpoint.

    Raises:
        ValueError: If `max_evaluations` is less than 1.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        checkpoint_name: str = "ckpt",
        timeout_seconds: float = 3600.0,
    ) -> None:
        if max_evaluations is not None and max_evaluations < 1:
            raise ValueError(
                "SidecarEvaluator: max_evaluations must be at least 1, or None for no "
                f"limit; got {max_evaluations!r}."
            )
        self._model = model
        self._data = data
        self._directory = Path(checkpoint_dir)
        self._steps = steps
        self._max_evaluations = max_evaluations
        self._callbacks = list(callbacks or [])
        self._log_dir = Path(log_dir or self._directory.absolute().parent / "eval")
        self._name = checkpoint_name
        self._timeout_seconds = timeout_seconds
        self._evaluated: str | None = None

    def start(self) -> None:
        """Evaluate until the training has ended, or `max_evaluations` were made.

        Raises:
            CheckpointError: If no new checkpoint comes in time, if the last one is
                damaged, or if it is not of this model.
        """
        number = 0
        while self._max_evaluations is None or number < self._max_evaluations:
            contents = self._next()
            if contents is None:
                return
            path = os.fspath(self._directory / str(self._evaluated))
            self._restore(contents, path)
            self._evaluate(path)
            number += 1

    def _restore(self, contents: storage.Contents, path: str) -> None:
        """Take the model from a checkpoint, which has more: its optimizer for one."""
        slots = bind("model", self._model).slots
        compare(slots, contents, path).assert_existing_objects_matched()
        for slot in slots:
            if isinstance(slot, ArraySlot):
                slot.write(contents.arrays[slot.name])

    def _next(self) -> storage.Contents | None:
        """The newest checkpoint that was not evaluated; None when there will be none.

        The end is looked for first: what is there then is all there is.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            last = self._last_of_finished_run()
            paths = numbered_checkpoints(self._directory, self._name)
            newest = paths[-1].name if paths else None
            if last is not None and self._evaluated == last.get("checkpoint"):
                return None
            if newest is not None and newest != self._evaluated:
                try:
                    contents = storage.read(self._directory / newest)
                except CheckpointError:
                    # Deleted in the meantime. If it is damaged, it will still be.
                    if last is not None and (self._directory / newest).exists():
                        raise
                else:
                    self._evaluated = newest
                    return contents
            elif last is not None:
                return None
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"SidecarEvaluator: no new checkpoint {self._name}-* came to "
                    f"{self._directory} within {self._timeout_seconds:.0f} s, nor the "
                    f"file {FINISHED}. The last one evaluated was {self._evaluated}. "
                    "See whether the training runs, or give timeout_seconds=..."
                )
            time.sleep(_POLL_SECONDS)

    def _last_of_finished_run(self) -> dict[str, Any] | None:
        try:
            return json.loads((self._directory / FINISHED).read_text())
        except FileNotFoundError:
            return None

    def _evaluate(self, path: str) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._data)
        results = self._model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            steps=self._steps,
            callbacks=self._callbacks or None,
            verbose=0,
            return_dict=True,
        )
        results = {name: float(value) for name, value in results.items()}
        line = {"checkpoint": path, "time": time.time(), **results}
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
        print(f"{path}: {numbers}", flush=True)
