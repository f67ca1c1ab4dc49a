"""The state of one call of `fit`, for callbacks and parameter servers."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import keras

from replicax.cluster import workers
from replicax.engine.protocols import RecorderLike, StepQueue, StrategyLike
from replicax.keras.epochs import Epochs

__all__ = [
    "FitSession",
    "LateCallback",
    "refuse_callbacks",
    "session_of",
]

_NAME = "_replicax_fit"


class FitSession(ExitStack):
    """One call of `fit`. Contexts that callbacks enter here exit when `fit` ends.

    `first_epoch` is the argument `initial_epoch` of `fit`, `restored_epoch` the epoch
    of a restored backup. `epochs` and `validation` read the data; `fit` sets them.
    `work` is the work queue of parameter servers. If `is_built`, the model has all its
    variables.
    """

    def __init__(self, strategy: StrategyLike, first_epoch: int) -> None:
        super().__init__()
        self.strategy = strategy
        self.first_epoch = first_epoch
        self.restored_epoch: int | None = None
        self.epochs: Epochs | None = None
        self.validation: Epochs | None = None
        self.work: StepQueue | None = None
        self.recorder: RecorderLike | None = None
        self.is_built = False

    def enter_model(self, model: keras.Model) -> None:
        """Make this the model's session until `fit` ends."""
        # Not by `setattr`: Keras looks for layers in a model's attributes.
        attributes = model.__dict__
        self.callback(attributes.__setitem__, _NAME, attributes.get(_NAME))
        attributes[_NAME] = self

    def record_with(self, recorder: RecorderLike) -> None:
        """Record the steps from now on."""
        self.recorder = recorder
        if self.epochs is not None:
            self.epochs.recorder = recorder

    def progress(self, model: keras.Model) -> str:
        """The last step, for messages; empty if this process does not know it."""
        members = workers.current()
        if members.watch is not None:
            return f" after step {members.watch.steps[members.name]}"
        iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
        if self.work is not None or iterations is None:
            return ""
        return f" after step {int(iterations.numpy())}"


def session_of(model: keras.Model | None) -> FitSession | None:
    """The `fit` that trains a model now, or None."""
    return None if model is None else vars(model).get(_NAME)


class LateCallback(keras.callbacks.Callback):
    """A callback with methods that are called after those of all other callbacks."""

    def __init__(self) -> None:
        # The hooks import this module.
        from replicax.keras.hooks import install

        install()
        super().__init__()

    def after_train_begin(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Called after `on_train_begin` of all callbacks."""

    def after_epoch_end(self, epoch: int) -> None:
        """Called after `on_epoch_end` of all callbacks."""


def refuse_callbacks(
    callbacks: Iterable[keras.callbacks.Callback], strategy: StrategyLike
) -> None:
    """Raise for callbacks of Keras that work in a single process only."""
    # Workers of parameter servers are not in `strategy.workers`.
    num_workers = max(strategy.workers.count, strategy.input_shard.num_workers)
    for callback in callbacks:
        if (
            isinstance(callback, keras.callbacks.SwapEMAWeights)
            and not strategy.home.keeps_slots
        ):
            raise NotImplementedError(
                "fit: SwapEMAWeights swaps weights with their averages, which "
                f"{type(strategy).__name__} keeps elsewhere. Leave it out: with "
                "use_ema=True the model has the averages at the end of fit, and with "
                "ema_overwrite_frequency also within it."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            where = f"backup_dir={callback.backup_dir!r}"
        elif (
            isinstance(callback, keras.callbacks.OrbaxCheckpoint)
            and not callback.is_multihost_enabled()
        ):
            where = f"directory={callback.directory!r}"
        else:
            continue
        if num_workers > 1:
            raise NotImplementedError(
                f"fit: keras.callbacks.{type(callback).__name__}({where}) would write "
                f"from each of the {num_workers} workers of {strategy!r} at once. Use "
                "rx.BackupAndRestore, which saves once and restores all workers."
            )
