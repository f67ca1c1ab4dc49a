"""BackupAndRestore: saves the state of `fit`, and resumes it after an interrupt."""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import keras
import numpy as np

from replicax._util import json_codec, random_state
from replicax._util.arguments import require_count, require_flag, require_path
from replicax._util.types import Logs
from replicax.checkpoint.entries import encode
from replicax.checkpoint.fit_state import (
    FitState,
    capture_callbacks,
    restore_callbacks,
)
from replicax.checkpoint.manager import CheckpointManager
from replicax.cluster import workers
from replicax.cluster.failure import ExitCode
from replicax.errors import CheckpointError
from replicax.keras.epochs import Position
from replicax.keras.session import LateCallback, session_of

__all__ = ["BACKUP_NAME", "BackupAndRestore"]

_logger = logging.getLogger("replicax")

BACKUP_NAME = "backup"
"""Prefix of the names of backups in their folder."""


class BackupAndRestore(LateCallback):
    """Saves the state of `fit`, and resumes it at the same example after a restart.

    (Keras: `keras.callbacks.BackupAndRestore`.) Run the same script again after an
    interruption: `fit` continues in the epoch and at the step of the newest backup, and
    ends with the weights of a run that was not interrupted. On SIGTERM it backs up and
    exits with status 138, which requests a restart. In a cluster, pass it on all
    workers, with a folder that all of them see.

    Args:
        backup_dir: The folder of the backups, for this run alone.
        save_freq: `"epoch"`, a number of batches, or False: on SIGTERM only.
        max_to_keep: Number of backups to keep. If the newest is damaged, `fit`
            continues from an older one.
        delete_checkpoint: Whether to delete the backups at the end of `fit`, and then
            the folder if it is empty.

    If a backup cannot be written, for example on a full disk, training continues, and a
    warning at the end of `fit` names the last complete backup.

    Raises:
        ValueError: For another `save_freq`.
        TypeError: If another argument has the wrong type.

    Example:
        >>> import tempfile
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> backup = BackupAndRestore(tempfile.mkdtemp(), save_freq=100)
        >>> x = np.ones((8, 2))
        >>> _ = model.fit(x, x[:, :1], callbacks=[backup], verbose=0)
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | bool = "epoch",
        *,
        max_to_keep: int = 2,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        is_count = isinstance(save_freq, int) and save_freq is not True
        is_mode = save_freq == "epoch" or save_freq is False
        if not is_mode and not (is_count and int(save_freq) > 0):
            raise ValueError(
                "BackupAndRestore: save_freq must be 'epoch', a number of batches, or "
                f"False to save only on SIGTERM; got {save_freq!r}."
            )
        require_path(backup_dir, "BackupAndRestore: backup_dir")
        require_flag(delete_checkpoint, "BackupAndRestore: delete_checkpoint")
        require_count(max_to_keep, "BackupAndRestore: max_to_keep", 1)
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self.delete_checkpoint = delete_checkpoint

    def after_train_begin(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Restore the newest backup, if there is one.

        Raises:
            CheckpointError: If all backups are damaged, or if the newest undamaged one
                is of another model.
            NotImplementedError: For embeddings whose rows are on parameter servers.
        """
        # Read once: each access of `self.model` copies the loop's state into the model.
        model = self.model
        assert model is not None
        session = session_of(model)
        assert session is not None
        assert session.epochs is not None
        self._trained_model = model
        self._session, self._data = session, session.epochs
        # Workers of parameter servers are at different steps of an epoch.
        self._has_servers = session.work is not None
        if self._has_servers:
            self._check_servers()
        self._others = [c for c in callbacks if c is not self]
        self._worker = workers.current()
        self._stop = self._worker.stop
        if not self._has_servers:
            session.enter_context(self._stop.on_sigterm())
        self._saves = not self._has_servers or session.strategy.is_chief
        self._epoch, self._step = 0, 0
        self._total = 0  # Steps (with servers: epochs), also those before a restart.
        self._random_state = random_state.capture()
        self._is_postponed = False
        self._metrics: list[np.ndarray] | None = None
        self._state = FitState(self._trained_model)
        self._manager = CheckpointManager(
            self._state,
            self.backup_dir,
            self.max_to_keep,
            checkpoint_name=BACKUP_NAME,
        )
        if self._saves:
            self._restore()
        self._last_saved = self._total

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """In a resumed epoch, restore the metrics that Keras has just reset."""
        if epoch != self._epoch:
            self._epoch, self._step = epoch, 0
        if self._metrics is not None:
            variables = self._trained_model.metrics_variables
            for variable, value in zip(variables, self._metrics, strict=True):
                variable.assign(value)
            self._metrics = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save if a backup is due, or after a request to stop."""
        if self._has_servers:
            return
        length = self._data.steps_in_epoch()
        done = batch + 1 if length is None else min(batch + 1, length)
        self._total += done - self._step
        self._step = done
        is_to_stop = self._stop.reached(self._total)
        if not (is_to_stop or self._is_due()):
            return
        # Keras cannot resume an epoch that has no steps left: save at the epoch's end.
        if done == length or not self._data.has_more():
            self._is_postponed = True
            return
        if is_to_stop:
            self._save_and_exit()
        self._save()

    def after_epoch_end(self, epoch: int) -> None:
        """Save if a backup is due, or after a request to stop."""
        self._epoch, self._step = epoch + 1, 0
        if self._has_servers:
            self._total += 1
            if self._saves:
                self._save()
            return
        if self._stop.reached(self._total):
            self._save_and_exit()
        if self._is_postponed or self.save_freq == "epoch":
            self._save()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the backups, or mark the run as finished.

        Raises:
            CheckpointError: If the last backup could not be saved and is to be kept.
        """
        if not self._saves:
            return
        if self._stop.reached(self._total):
            self._save_and_exit()  # SIGKILL may follow before the script saves.
        if not self.delete_checkpoint:
            if self._total != self._last_saved:
                self._save()
            self._manager.mark_finished()
            return
        try:
            self._manager.close()
        except CheckpointError as error:  # The next run's backups may fail too: log it.
            wrote_any = self._manager.latest_checkpoint is not None
            _logger.warning(
                "BackupAndRestore: fit has ended, and %s in %s. %s",
                "its last backup failed" if wrote_any else "NO BACKUP WAS WRITTEN",
                self.backup_dir,
                error,
            )
        self._manager.clear()

    def _is_due(self) -> bool:
        every = self.save_freq
        if not isinstance(every, int) or not every:
            return False
        return self._total - self._last_saved >= every

    def _save(self) -> None:
        self._is_postponed = False
        self._last_saved = self._total
        position = self._data.position(self._epoch, self._step)
        callbacks, self._state.best_weights = capture_callbacks(self._others)
        progress = {
            "position": dataclasses.asdict(position),
            "total": self._total,
            "initial": self._random_state,
            "stop_training": bool(self._trained_model.stop_training),
            "callbacks": callbacks,
        }
        self._state.progress = json.dumps(encode(progress, "BackupAndRestore"))
        self._manager.save(self._total)

    def _save_and_exit(self) -> NoReturn:
        self._save()
        self._manager.wait()
        print(
            f"replicax: told to stop; training is saved after step {self._total} in "
            f"{self._manager.latest_checkpoint}. Start the same script again.",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(int(ExitCode.RETRY))

    def _restore(self) -> None:
        path = self._manager.restore_or_initialize()
        if path is None:
            return
        progress = json_codec.decode(json.loads(self._state.progress))
        position = Position(**progress["position"])
        self._epoch, self._step = position.epoch, position.step
        self._total = progress["total"]
        if self._worker.watch is not None:
            self._worker.watch.resume_at(self._total)
        self._random_state = progress["initial"]
        self._data.go_to(position, self._random_state)
        missing = restore_callbacks(
            self._others, progress["callbacks"], self._state.best_weights
        )
        if missing:
            _logger.warning(
                "fit: the interrupted run had the callbacks %s, which this run lacks.",
                missing,
            )
        has_stopped = progress["stop_training"] and not position.step
        epochs = (self.params or {})["epochs"]
        first = max(position.epoch, epochs) if has_stopped else position.epoch
        self._session.restored_epoch = first
        if position.step:
            # Keras resets the metrics at the beginning of an epoch.
            variables = self._trained_model.metrics_variables
            self._metrics = [np.array(v.value) for v in variables]
        _logger.warning(
            "fit: continues in epoch %d, step %d, from %s.",
            position.epoch + 1,
            position.step,
            path,
        )

    def _check_servers(self) -> None:
        """Raise an error for tables whose rows are on parameter servers."""
        tables = [
            v.table_name
            for v in self._trained_model.variables
            if hasattr(v, "table_name")
        ]
        if tables:
            raise NotImplementedError(
                f"BackupAndRestore: backups do not contain the rows of {tables}, which "
                "only parameter servers hold. Use "
                "ParameterServerStrategy(snapshot_dir=...): restarted servers and "
                "workers continue from its snapshots."
            )
        if self.save_freq != "epoch":
            _logger.warning(
                "BackupAndRestore: with parameter servers, fit is backed up after each "
                "epoch, not by save_freq=%r. To resume within an epoch, use "
                "ParameterServerStrategy(snapshot_dir=...).",
                self.save_freq,
            )
