"""Saves and restores an estimator's checkpoints, and warm-starts from others."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from replicax._private.keras import reference_of
from replicax.checkpoint import Checkpoint, CheckpointError, CheckpointManager, storage
from replicax.checkpoint.entries import bind
from replicax.checkpoint.restore import RestoreStatus, compare, write_existing
from replicax.checkpoint.storage import Contents
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


class _TrainingState:
    """A training's `Checkpoint`, which is restored completely or not at all."""

    def __init__(self, model: EstimatorModel, position: InputPosition) -> None:
        self._model = model
        self._checkpoint = Checkpoint(
            variables=model.variables(), global_step=model.global_step, input=position
        )
        self.save_counter = 0

    def contents(self) -> Contents | None:
        return self._checkpoint.contents()

    def apply(self, contents: Contents, path: str) -> RestoreStatus:
        saved = {name for name in contents.arrays if name.startswith(_VARIABLES)}
        named = self._model.variables()
        state = {
            _VARIABLES + n for n, v in named.items() if reference_of(v) is not None
        }
        own = {_VARIABLES + name for name in named}
        # A number in one script may be a schedule in the next.
        missing, unused = (
            {name for name in names if not name.endswith("/learning_rate")}
            for names in (own - saved, saved - own)
        )
        if missing and missing == state:
            # A checkpoint of a parameter-server training has no slots.
            _logger.warning(
                "Estimator: %s has no optimizer slots; they start from zero.", path
            )
            missing = set()
        if not self._model.strategy.home.keeps_slots:
            unused = set()
        try:
            entries = bind("variables", named).entries
            compare(entries, contents, path).expect_partial()
            status = RestoreStatus(path, sorted(missing), sorted(unused))
            status.assert_consumed()
        except CheckpointError as error:
            raise _other_model(path, error) from None
        # The script's learning rate overrides the checkpoint's.
        rates = [(v, v.numpy()) for v in self._model.learning_rates()]
        status = self._checkpoint.apply(contents, path).expect_partial()
        for variable, value in rates:
            variable.assign(value)
        return status


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
        self._manager = CheckpointManager(
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
    contents = storage.read(Path(path))
    slots = [
        *bind("variables", model.variables()).entries,
        *bind("global_step", model.global_step).entries,
    ]
    try:
        write_existing(slots, contents, path)
    except CheckpointError as error:
        raise _other_model(path, error) from None
    return int(contents.arrays["global_step"])


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
        except CheckpointError:
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
    arrays = storage.read(Path(path)).arrays
    return {
        name.removeprefix(_VARIABLES): value
        for name, value in arrays.items()
        if name.startswith(_VARIABLES) or name == "global_step"
    }


def warm_start(
    model: EstimatorModel, values: Mapping[str, np.ndarray], path: str
) -> list[str]:
    """Initialize a model's variables from another training's; return their names.

    The optimizer's slots and counts, and the global step, start from zero.
    """
    own = model.variables()
    kept = {id(v) for op in model.spec.train_ops for v in op.optimizer.variables}
    taken = [n for n in own if n in values and id(own[n]) not in kept]
    wrong = [
        f"{n}: {values[n].shape} saved, {tuple(own[n].shape)} here"
        for n in taken
        if tuple(own[n].shape) != values[n].shape
    ]
    if wrong or not taken:
        raise CheckpointError(
            f"Estimator: warm_start_from={path!r} does not fit the model: "
            + ("; ".join(wrong) or f"it has {sorted(values)}, the model {sorted(own)}")
            + "."
        )
    for name in taken:
        own[name].assign(values[name])
    return taken


def _other_model(path: str, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"Estimator: the model_dir holds {path}, which is of another model or "
        f"optimizer. Give a new model_dir, or the old layers and optimizer. {error}"
    )
