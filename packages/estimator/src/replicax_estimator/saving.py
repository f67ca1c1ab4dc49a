"""Saves and restores an estimator's checkpoints, and warm-starts from others."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import keras
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
    "restore",
    "restore_found",
    "saved_variables",
    "step_of",
    "warm_start",
]

CHECKPOINT_NAME = "model.ckpt"

_logger = logging.getLogger("replicax")

_VARIABLES = "variables/"


class InputPosition:
    """A training's position in its input, as part of its checkpoints.

    Attributes:
        num_steps: Steps since the input began; 0 after a training that was not
            interrupted.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_steps = 0
        self._num_replicas = num_replicas

    def get_state(self) -> dict[str, int]:
        """Return the position, for a checkpoint."""
        return {"num_steps": self.num_steps, "num_replicas": self._num_replicas}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Take the position from a checkpoint."""
        # Rounded down for another number of replicas: no step is skipped.
        saved = int(state.get("num_replicas", self._num_replicas))
        self.num_steps = int(state["num_steps"]) * saved // self._num_replicas


class _TrainingState(rx.Checkpoint):
    """A training's checkpoint, which is restored completely or not at all."""

    def __init__(self, model: EstimatorModel, position: InputPosition) -> None:
        super().__init__(
            variables=model.variables(), global_step=model.global_step, input=position
        )
        self._model = model

    def apply(self, contents: storage.Contents, path: str) -> rx.RestoreStatus:
        """Set the state, or raise CheckpointError, which lists what differs."""
        own, saved = self._model.variables(), _variables_in(contents)
        missing = own.keys() - saved.keys()
        state = {n for n, v in own.items() if self._model.is_optimizer_state(v)}
        if missing and missing == state:
            # A checkpoint of a training with parameter servers.
            _logger.warning(
                "Estimator: %s has no optimizer state; it starts from zero.", path
            )
            missing = set()
        unused = saved.keys() - own.keys()
        if self._model.is_asynchronous:  # Parameter servers hold the optimizer state.
            unused = set()
        differences = _wrong_shapes(own, saved)
        differences += [f"{name}: not in the checkpoint" for name in sorted(missing)]
        differences += [f"{name}: in the checkpoint only" for name in sorted(unused)]
        if differences:
            raise _other_model(path, "; ".join(differences))
        return super().apply(contents, path).expect_partial()


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
        # Synchronous workers save together; of asynchronous ones the chief saves.
        self._saves = strategy.is_chief or strategy.workers.count > 1
        self._interval = Interval(
            config.save_checkpoints_steps, config.save_checkpoints_secs, "RunConfig"
        )
        self._interval.restart(0)
        self._saved: tuple[int, int] | None = None

    def restore(self) -> str | None:
        """Restore the newest checkpoint; return its path, None if there is none."""
        path = self._manager.restore_or_initialize()
        if path is not None:
            step = int(self._model.global_step.numpy())
            self._interval.restart(step)
            self._saved = (step, self._position.num_steps)
        return path

    def is_due(self, step: int) -> bool:
        """Whether the save interval has passed, by this process' clock."""
        return self._interval.is_due(step)

    def save(self, step: int, *, wait: bool = False) -> bool:
        """Save the state under a step's number, unless it is saved; return whether."""
        self._interval.restart(step)
        state = (step, self._position.num_steps)
        if state == self._saved or not self._saves:
            return False
        self._saved = state
        self._manager.save(checkpoint_number=step)
        if wait:
            self._manager.wait()
        return True

    def close(self, *, finished: bool = False) -> None:
        """Wait for the last save; `finished` marks the folder for evaluators."""
        if not self._saves:
            return
        if finished:
            self._manager.mark_finished()
        else:
            self._manager.close()


def restore(model: EstimatorModel, path: str) -> int:
    """Restore a model for evaluation or prediction; return its global step.

    Values that only training needs, such as optimizer slots, are ignored.
    """
    checkpoint = rx.Checkpoint(
        variables=model.variables(), global_step=model.global_step
    )
    try:
        checkpoint.restore(path).assert_existing_objects_matched()
    except rx.CheckpointError as error:
        raise _other_model(path, error) from None
    return int(model.global_step.numpy())


def restore_found(
    model: EstimatorModel,
    find_path: Callable[[], str | None],
    initialize: Callable[[EstimatorModel], None],
) -> str:
    """Find and restore a checkpoint, again if another process deletes it; its path.

    If `find_path` finds none it calls `initialize`; the path is "".
    """
    while (path := find_path()) is not None:
        try:
            restore(model, path)
        except rx.CheckpointError:
            if Path(path).exists() or find_path() == path:
                raise
        else:
            return path
    _logger.warning("Estimator: there is no checkpoint: the model is not trained yet.")
    initialize(model)
    return ""


def step_of(path: str) -> int:
    """Return the global step in the name of a numbered checkpoint."""
    return int(path.rpartition("-")[2])


def saved_variables(path: str) -> dict[str, np.ndarray]:
    """Read the variables in a checkpoint by name, with `global_step`."""
    contents = storage.read(Path(path))
    return {
        **_variables_in(contents),
        "global_step": contents.arrays["global_step"],
    }


def _variables_in(contents: storage.Contents) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(_VARIABLES): array
        for name, array in contents.arrays.items()
        if name.startswith(_VARIABLES)
    }


def warm_start(
    model: EstimatorModel, values: Mapping[str, np.ndarray], path: str
) -> list[str]:
    """Initialize a model's variables from another training's; return their names.

    The optimizer state and the global step start from zero.
    """
    optimizers = [op.optimizer for op in model.spec.train_ops]
    left_out = {id(v) for optimizer in optimizers for v in optimizer.variables}
    own = {n: v for n, v in model.variables().items() if id(v) not in left_out}
    names = [name for name in own if name in values]
    wrong = _wrong_shapes(own, values)
    if wrong or not names:
        raise rx.CheckpointError(
            f"Estimator: warm_start_from={path!r} does not fit the model: "
            + ("; ".join(wrong) or f"it has {sorted(values)}, the model {sorted(own)}")
            + "."
        )
    for name in names:
        own[name].assign(values[name])
    return names


def _wrong_shapes(
    variables: Mapping[str, keras.Variable], arrays: Mapping[str, np.ndarray]
) -> list[str]:
    """Describe the variables whose shape in a checkpoint is another one."""
    return [
        f"{name}: {list(arrays[name].shape)} saved, {list(variable.shape)} here"
        for name, variable in variables.items()
        if name in arrays and tuple(variable.shape) != arrays[name].shape
    ]


def _other_model(path: str, difference: object) -> rx.CheckpointError:
    return rx.CheckpointError(
        f"Estimator: the model_dir holds {path}, which is of another model or "
        f"optimizer. Give a new model_dir, or the old layers and optimizer. "
        f"{difference}"
    )
