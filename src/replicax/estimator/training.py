"""The training loop of an estimator."""

import collections
import functools
import logging
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from replicax._util.types import PyTree
from replicax.engine.values import PerReplica
from replicax.estimator.hooks import (
    CheckpointSaverListener,
    HookSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    fetched,
    require_finite,
)
from replicax.estimator.model import EstimatorModel
from replicax.estimator.run_config import RunConfig
from replicax.estimator.saving import InputPosition, Saver
from replicax.estimator.user_functions import InputPipeline, first_step
from replicax.input.prefetch import DistributedIterator

__all__ = ["Training", "run_hooks", "started_hooks"]

_logger = logging.getLogger("replicax")

_AHEAD = 16
"""Steps that are given to the devices before one is waited for."""

_AGREE_EVERY = 20
"""Steps between the moments when workers agree on what their clocks or hooks say."""


class Training:
    """The training loop: one call of `train`.

    Args:
        last_step: From the first global step, the one to end at; None: with the input.
        initialize: Called with the model where there is no checkpoint to begin with.
        marks_end: Whether to tell an evaluator when no other checkpoint follows.

    Attributes:
        global_step: Number of steps made, those before this call included.
        is_over: Whether the last step was made.
    """

    def __init__(
        self,
        model: EstimatorModel,
        source: InputPipeline,
        directory: str,
        config: RunConfig,
        hooks: Sequence[SessionRunHook],
        listeners: Sequence[CheckpointSaverListener],
        last_step: Callable[[int], int | None],
        initialize: Callable[[EstimatorModel], None],
        *,
        marks_end: bool = False,
    ) -> None:
        self._model = model
        self._source = source
        self._directory = directory
        self._config = config
        self._hooks = list(hooks)
        self._listeners = list(listeners)
        self._last_step = last_step
        self._initialize = initialize
        self._marks_end = marks_end
        self._position = InputPosition(model.strategy.num_replicas_in_sync)
        self._stops = False  # A hook of this process wants it.
        self.global_step = 0
        self.is_over = False

    def run(self) -> None:
        """Train until the last step, the end of the input, or a hook's request."""
        for each in (*self._hooks, *self._listeners):
            each.begin()
        steps = self._source.steps(self._model.strategy)
        try:
            self._train(steps)
        finally:
            steps.close()
            self._model.strategy.settle()

    def _train(self, steps: DistributedIterator) -> None:
        if getattr(self._model.strategy, "backup_workers", 0):
            raise NotImplementedError(
                "Estimator.train: backup_workers need batches that all workers read, "
                "and an input_fn is each worker's own. Leave them out, or use fit."
            )
        first = first_step(steps, self._model.strategy, "train")
        self._model.build(*first[0])
        saver = Saver(self._model, self._directory, self._config, self._position)
        if saver.restore() is None:
            self._initialize(self._model)
        self.global_step = int(self._model.global_step.numpy())
        last = self._last_step(self.global_step)
        if last is not None and self.global_step >= last:
            _logger.info("Training is skipped: step %d is reached.", self.global_step)
            saver.close(finished=self._marks_end)
            return
        self._hooks = started_hooks(self, self._hooks, self._model.spec.hooks())
        self._loop(steps, self._first_item(steps, first), saver, last)
        self._model.finalize()
        self._position.num_steps = 0  # Ended by itself: the next call begins anew.
        self.is_over = True
        self._save(saver, wait=True)
        for hook in self._hooks:
            hook.end(self)
        for listener in self._listeners:
            listener.end(self, self.global_step)
        saver.close(finished=self._marks_end)

    def _first_item(self, steps: DistributedIterator, first: PyTree) -> PyTree:
        """The step to begin with; `first` unless a training is resumed."""
        number = self._position.num_steps
        self._position.num_steps = 0
        if number and self._config.restore_input and self._model.strategy.keeps_slots:
            steps.set_state({"num_batches": number})
            first = next(steps, None)
            _tell_resumed(number, is_over=first is None)
            self._position.num_steps = number
        return first

    def _loop(
        self, steps: DistributedIterator, item: PyTree, saver: Saver, last: int | None
    ) -> None:
        log = _Log(self._config.log_step_count_steps, self.global_step)
        losses: collections.deque[PerReplica] = collections.deque()
        while item is not None:
            (features, labels), active = item
            tensors = run_hooks(
                self,
                self._hooks,
                lambda f=features, y=labels, n=active: self._step(f, y, n),
            )
            losses.append(tensors["loss"])
            if len(losses) > _AHEAD:
                jax.block_until_ready(losses.popleft())
            log.after_step(self.global_step, losses[-1])
            is_last = last is not None and self.global_step >= last
            if is_last or self._save_or_stop(saver, losses[-1]):
                break
            item = next(steps, None)
        if losses:
            require_finite(_one(losses[-1]), self.global_step)

    def _step(
        self, features: PyTree, labels: PyTree, active: int | None
    ) -> dict[str, PerReplica]:
        model = self._model
        model.strategy.expect_rows(_num_rows(features, active))
        tensors = model.step(features, labels, active, watched=bool(self._hooks))
        self._position.num_steps += 1
        if model.strategy.keeps_slots:
            self.global_step += 1
        else:  # Others make updates, too.
            self.global_step = model.steps_of_updates()
            model.global_step.assign(self.global_step)
        return tensors

    def request_stop(self) -> None:
        """Let the current step be the last one."""
        self._stops = True

    def _save_or_stop(self, saver: Saver, loss: PerReplica) -> bool:
        """Save if that is due; whether training is to end here."""
        workers = self._model.strategy.workers
        due, stops = saver.is_due(self.global_step), self._stops
        if workers.count > 1:
            # Their clocks differ, and so may their hooks.
            if self._position.num_steps % _AGREE_EVERY == 0:
                answers = workers.exchange("replicax.estimator.agree", [due, stops])
                due, stops = answers[0][0], any(stop for _, stop in answers)
            else:
                due = due and self._config.save_checkpoints_steps is not None
                stops = False
        if due and not stops:
            require_finite(_one(loss), self.global_step)
            self._save(saver, wait=bool(self._listeners))
            stops = self._stops and workers.count == 1
        return stops

    def _save(self, saver: Saver, *, wait: bool) -> None:
        for listener in self._listeners:
            listener.before_save(self, self.global_step)
        if not saver.save(self.global_step, wait=wait):
            return
        for listener in self._listeners:
            if listener.after_save(self, self.global_step):
                self._stops = True


def _tell_resumed(number: int, *, is_over: bool) -> None:
    if is_over:
        what = "and the input has no more. Nothing is trained"
    else:
        what = "which are skipped: it has trained on them"
    _logger.warning(
        "Estimator.train: the last training was interrupted after %d steps of its "
        "input, %s. To begin the input again give RunConfig(restore_input=False).",
        number,
        what,
    )


class _Log:
    """Logs loss and speed every so many steps, and refuses NaN."""

    def __init__(self, every: int | None, step: int) -> None:
        self._every = every
        self._first = step
        self._last = (step, time.monotonic())

    def after_step(self, step: int, loss: PerReplica) -> None:
        is_first = step == self._first + 1
        if self._every is None or not (is_first or step >= self._last[0] + self._every):
            return
        value = _one(loss)
        require_finite(value, step)
        now = time.monotonic()
        speed = (step - self._last[0]) / max(now - self._last[1], 1e-9)
        self._last = (step, now)
        if is_first:
            _logger.info("loss = %.8g, step = %d", value, step)
        else:
            _logger.info("loss = %.8g, step = %d, %.4g steps/s", value, step, speed)


def started_hooks(
    session: HookSession, hooks: Sequence[SessionRunHook], own: Sequence[SessionRunHook]
) -> list[SessionRunHook]:
    """The user's `hooks`, which have begun, and the spec's `own`, which begin now."""
    for hook in own:
        hook.begin()
    every = [*hooks, *own]
    for hook in every:
        hook.after_create_session(session, None)
    return every


def run_hooks(
    session: HookSession,
    hooks: Sequence[SessionRunHook],
    step: Callable[[], dict[str, PerReplica]],
) -> dict[str, PerReplica]:
    """Run a step with its hooks; returns the step's results."""
    if not hooks:
        return step()
    context = SessionRunContext(session)
    wanted = [hook.before_run(context) for hook in hooks]
    results = step()
    tensors: dict[str, Callable[[], np.ndarray]] = {
        name: functools.partial(_one, value) for name, value in results.items()
    }
    tensors["global_step"] = lambda: np.asarray(session.global_step)
    for hook, args in zip(hooks, wanted, strict=True):
        fetches = args.fetches if isinstance(args, SessionRunArgs) else args
        values = None
        if fetches is not None:
            values = fetched(fetches, tensors, type(hook).__name__)
        hook.after_run(context, SessionRunValues(values))
    if context.stop_requested:
        session.request_stop()
    return results


def _num_rows(features: PyTree, active: int | None) -> int:
    """Number of this process' examples in a step, of features `[R, b, ...]`."""
    first = jax.tree.leaves(features, is_leaf=lambda x: isinstance(x, PerReplica))[0]
    replicas, rows = first.array.shape[:2]
    return (active or replicas) * rows


def _one(value: PerReplica) -> np.ndarray:
    """This process' first replica's entry, on the host."""
    return jax.device_get(value.values[0])
