"""`PreemptionCheckpointHandler`: saves a custom training loop on preemption."""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.manager import CheckpointManager
from replicax.cluster import workers
from replicax.cluster.failure import ExitCode
from replicax.cluster.resolvers import ClusterResolver

__all__ = ["PreemptionCheckpointHandler"]

_logger = logging.getLogger("replicax")

P = ParamSpec("P")
T = TypeVar("T")


class PreemptionCheckpointHandler:
    """Runs the steps of a loop; on SIGTERM all workers save after the same step.

    Then every process exits with status 138, which requests a restart. In the restarted
    process the handler restores the newest checkpoint, and `total_run_calls` is the
    number of finished steps. In `fit`, `rx.BackupAndRestore` does the same.
    (TF: `tf.distribute.experimental.PreemptionCheckpointHandler`.)

    Args:
        cluster_resolver: Ignored: the strategy has joined the cluster. Pass None.
        checkpoint_or_checkpoint_manager: The checkpoint to save, or its manager. Other
            saves of this manager need the same numbers:
            `manager.save(handler.total_run_calls)`.
        checkpoint_dir: The folder for a `Checkpoint`, shared by all workers.

    Raises:
        ValueError: If `checkpoint_dir` is missing for a checkpoint, or given for a
            manager.
        CheckpointError: If a checkpoint in the folder cannot be restored.

    Example:
        >>> import tempfile
        >>> import replicax as rx
        >>> checkpoint = rx.Checkpoint(total=0)
        >>> folder = tempfile.mkdtemp()
        >>> with PreemptionCheckpointHandler(None, checkpoint, folder) as handler:
        ...     while handler.total_run_calls < 3:
        ...         checkpoint.total += handler.run(lambda x: 2 * x, 5)
        >>> checkpoint.total
        30
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        target = checkpoint_or_checkpoint_manager
        if isinstance(target, CheckpointManager) != (checkpoint_dir is None):
            raise ValueError(
                "PreemptionCheckpointHandler: a Checkpoint needs checkpoint_dir, and a "
                f"CheckpointManager has a folder of its own; got {target!r} and "
                f"checkpoint_dir={checkpoint_dir!r}."
            )
        if isinstance(target, CheckpointManager):
            self._manager = target
        else:
            self._manager = CheckpointManager(target, checkpoint_dir or "", 1)
        self._stop = workers.current().stop
        self._open = contextlib.ExitStack()
        restored = self._manager.restore_or_initialize()
        self._num_calls = int(restored.rpartition("-")[2]) if restored else 0
        self._open.enter_context(self._stop.on_sigterm())

    def __enter__(self) -> "PreemptionCheckpointHandler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the previous handler of SIGTERM."""
        self._open.close()

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, in earlier processes too."""
        return self._num_calls

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn`, one step; after a preemption save and end the process.

        Returns:
            The result of `fn`.

        Raises:
            SystemExit: With `ExitCode.RETRY`, after a SIGTERM in any worker. All
                workers exit after the same step.
        """
        result = fn(*args, **kwargs)
        self._num_calls += 1
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Save and end the process after a preemption; `run` calls it.

        Raises:
            SystemExit: See `run`.
        """
        if not self._stop.reached(self._num_calls):
            return
        path = self._manager.save(self._num_calls)
        self._manager.close()
        _logger.warning(
            "told to stop; saved after step %d in %s. Start the same script again to "
            "continue.",
            self._num_calls,
            path,
        )
        raise SystemExit(int(ExitCode.RETRY))
