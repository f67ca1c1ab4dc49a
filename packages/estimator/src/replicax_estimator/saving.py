"""Saves and restores an estimator's checkpoints, and warm-starts from others."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import replicax as rx
from replicax.seams import storage
from replicax_estimator.hooks import Interval
from replicax_estimator.model import EstimatorModel
from replicax_estimator.run_config import RunConfig

__all__ = [
    "CHECKPOINT_NAME",
    "InputPosition",
    "Saver",
    "restore_for_evaluation",
    "saved_variables",
    "warm_start",
]

CHECKPOINT_NAME = "model.ckpt"

_logger = logging.getLogger("replicax")

_VARIABLES = "variables/"


class InputPosition:
    """A training's position in its input, which its checkpoints contain."""

    def __init__(self, num_replicas: int) -> None:
        self.num_steps = 0  # Since the input began; 0 when a training has ended.
        self._num_replicas = num_replicas

    def get_state(self) -> dict[str, int]:
        """Return the number of batches read by all replicas together."""
        return {"num_batches": self.num_steps * self._num_replicas}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Set the position from a checkpoint."""
        # Round down: training repeats batches, and skips none.
        self.num_steps = int(state["num_batches"]) // self._num_replicas


class _TrainingState(rx.Checkpoint):
    """A training's state, which refuses to restore a checkpoint of another model."""

    def __init__(self, model: EstimatorModel, position: InputPosition) -> None:
        super().__init__(
            variables=model.variables(), global_step=model.global_step, input=position
        )
        self._model = model

    def apply(self, contents: storage.Contents, path: str) -> rx.RestoreStatus:
        """Set the state, or raise a CheckpointError that lists the differences."""
        try:
            status = super().apply(contents, path)
            if self._model.is_asynchronous:  # Servers hold the optimizer state.
                status.assert_existing_objects_matched()
            else:
                status.assert_consumed()
        except rx.CheckpointError as error:
            raise _other_model(path, error) from None
        return status.expect_partial()


class Saver:
    """Saves a training's state at the config's interval, and restores it."""

    def __init__(
        self,
        model: EstimatorModel,
        directory: str,
        config: RunConfig,
        position: InputPosition,
    ) -> None:
        self._model = model
        self._position = position
        self._manager = rx.CheckpointManager(
            _TrainingState(model, position),
            directory,
            config.keep_checkpoint_max or None,
            checkpoint_name=CHECKPOINT_NAME,
        )
        strategy = model.strategy
        # Synchronous workers save together; of asynchronous workers, the chief saves.
        self._is_writer = strategy.is_chief or strategy.workers.count > 1
        self.interval = Interval(
            config.save_checkpoints_steps, config.save_checkpoints_secs, "RunConfig"
        )
        self.interval.restart(0)
        self._last_saved: tuple[int, int] | None = None

    def restore(self) -> str | None:
        """Restore the newest checkpoint; return its path, None if there is none."""
        path = self._manager.restore_or_initialize()
        if path is not None:
            step = int(self._model.global_step.numpy())
            self.interval.restart(step)
            self._last_saved = (step, self._position.num_steps)
        return path

    def save(self, step: int, *, wait: bool = False) -> bool:
        """Save the state if it is new; return whether this call has saved it."""
        self.interval.restart(step)
        state = (step, self._position.num_steps)
        if state == self._last_saved or not self._is_writer:
            return False
        self._last_saved = state
        self._manager.save(checkpoint_number=step)
        if wait:
            self._manager.wait()
        return True

    def close(self) -> None:
        """Wait for the last save, and mark it as the last one for evaluators."""
        if self._is_writer:
            self._manager.mark_finished()


def restore_for_evaluation(
    model: EstimatorModel,
    find_path: Callable[[], str | None],
    initialize: Callable[[EstimatorModel], None],
) -> str:
    """Restore the checkpoint at `find_path()` for evaluation; return its path.

    If another process deletes the checkpoint, restore the next one. If there is none,
    call `initialize` and return "". Optimizer state is not restored.
    """
    checkpoint = rx.Checkpoint(
        variables=model.variables(), global_step=model.global_step
    )
    while (path := find_path()) is not None:
        try:
            checkpoint.restore(path).assert_existing_objects_matched()
        except rx.CheckpointError as error:
            if Path(path).exists() or find_path() == path:
                raise _other_model(path, error) from None
        else:
            return path
    _logger.warning("Estimator: there is no checkpoint: the model is not trained yet.")
    initialize(model)
    return ""


def saved_variables(path: str) -> dict[str, np.ndarray]:
    """Read the variables in a checkpoint by name, with `global_step`."""
    return {
        name.removeprefix(_VARIABLES): array.read()
        for name, array in storage.read(Path(path)).arrays.items()
        if name.startswith(_VARIABLES) or name == "global_step"
    }


def warm_start(model: EstimatorModel, path: str) -> None:
    """Initialize a model's variables from a checkpoint, or from the newest in a folder.

    The optimizer state and the global step start from zero.
    """
    path = rx.latest_checkpoint(path, CHECKPOINT_NAME) or path
    values = saved_variables(path)
    state = {id(v) for op in model.spec.train_ops for v in op.optimizer.variables}
    variables = {n: v for n, v in model.variables().items() if id(v) not in state}
    names = [name for name in variables if name in values]
    if not names:
        raise rx.CheckpointError(
            f"Estimator: warm_start_from={path!r} does not fit the model: the "
            f"checkpoint contains {sorted(values)}, the model {sorted(variables)}."
        )
    for name in names:
        variables[name].assign(values[name])
    _logger.info("Estimator: initialized %s from %s.", names, path)


def _other_model(path: str, difference: object) -> rx.CheckpointError:
    return rx.CheckpointError(
        f"Estimator: the checkpoint {path} is of another model or optimizer. Restore "
        "the model_fn's layers and optimizer, or give a new model_dir, and to keep the "
        f"weights warm_start_from=... {difference}"
    )
