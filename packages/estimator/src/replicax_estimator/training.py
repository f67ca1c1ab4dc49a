"""The loop of an estimator's steps with hooks, and the training loop."""

import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np

import replicax as rx
from replicax_estimator.hooks import (
    CheckpointSaverListener,
    Interval,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    fetch,
)
from replicax_estimator.model import EstimatorModel, first_replica
from replicax_estimator.run_config import RunConfig
from replicax_estimator.saving import InputPosition, Saver
from replicax_estimator.standard_hooks import require_finite
from replicax_estimator.types import Features, Labels
from replicax_estimator.user_functions import InputPipeline, Step, Steps

__all__ = ["Loop", "Training"]

_logger = logging.getLogger("replicax")

_MAX_IN_FLIGHT = 16
"""Steps that may be queued on the devices; then the loop waits for the oldest step."""

_AGREE_EVERY = 20
"""Steps after which workers agree whether to save and whether to stop."""

_Result = TypeVar("_Result")


@dataclasses.dataclass(kw_only=True, eq=False)
class Loop:
    """The loop of one call of `train` or `evaluate`; its hooks get it as `HookSession`.

    Attributes:
        hooks: The user's hooks; after `start_hooks` also the spec's.
        global_step: Number of training steps, including those before this call.
        has_ended: Whether the last step has run.
        stop_requested: Whether a hook of this process has requested a stop.
    """

    model: EstimatorModel
    source: InputPipeline
    hooks: list[SessionRunHook]
    global_step: int = dataclasses.field(init=False, default=0)
    has_ended: bool = dataclasses.field(init=False, default=False)
    stop_requested: bool = dataclasses.field(init=False, default=False)

    def request_stop(self) -> None:
        """Stop after the current step."""
        self.stop_requested = True

    def call_with_steps(
        self,
        body: Callable[[Steps], _Result],
        listeners: Sequence[CheckpointSaverListener] = (),
    ) -> _Result:
        """Begin hooks and listeners; call `body` with the steps, and close these."""
        for listener in (*self.hooks, *listeners):
            listener.begin()
        steps = self.source.steps(self.model.strategy)
        try:
            return body(steps)
        finally:
            steps.close()
            self.model.strategy.home.settle()

    def first_step(self, steps: Steps, method: str) -> Step:
        """Read the first step and build the model for it."""
        first = next(steps, None)
        if first is None:
            raise ValueError(
                f"Estimator.{method}: the input_fn returns no batch, or fewer batches "
                f"than {self.model.strategy.num_replicas_in_sync} replicas, which need "
                "one each. Return more batches."
            )
        self.model.build(*first)
        return first

    def start_hooks(self) -> None:
        """Begin and add the spec's hooks; call `after_create_session` of every hook."""
        spec_hooks = self.model.spec.hooks()
        for hook in spec_hooks:
            hook.begin()
        self.hooks = [*self.hooks, *spec_hooks]
        for hook in self.hooks:
            hook.after_create_session(self, None)

    def run_step(self, features: Features, labels: Labels) -> dict[str, rx.PerReplica]:
        """Run a step, and call the hooks before and after it; return its results."""
        if not self.hooks:
            return self._step(features, labels)
        context = SessionRunContext(self)
        requests = [hook.before_run(context) for hook in self.hooks]
        results = self._step(features, labels)
        tensors: dict[str, Callable[[], np.ndarray]] = {
            name: functools.partial(first_replica, value)
            for name, value in results.items()
        }
        tensors["global_step"] = lambda: np.asarray(self.global_step)
        for hook, args in zip(self.hooks, requests, strict=True):
            fetches = args.fetches if isinstance(args, SessionRunArgs) else args
            values = None
            if fetches is not None:
                values = fetch(fetches, tensors, type(hook).__name__)
            hook.after_run(context, SessionRunValues(values))
        if context.stop_requested:
            self.request_stop()
        return results

    def _step(self, features: Features, labels: Labels) -> dict[str, rx.PerReplica]:
        return self.model.step(features, labels, watched=bool(self.hooks))


@dataclasses.dataclass(kw_only=True, eq=False)
class Training(Loop):
    """The training loop of one call of `train`.

    Attributes:
        last_step: Maps the global step before the training to the last one; None: train
            until the input ends.
        initialize: Called with the model if there is no checkpoint to restore.
    """

    directory: str
    config: RunConfig
    listeners: Sequence[CheckpointSaverListener]
    last_step: Callable[[int], int | None]
    initialize: Callable[[EstimatorModel], None]

    def __post_init__(self) -> None:
        self._position = InputPosition(self.model.strategy.num_replicas_in_sync)

    def run(self) -> None:
        """Train until the last step, the end of the input, or a hook's request."""
        self.call_with_steps(self._train, self.listeners)

    def _train(self, steps: Steps) -> None:
        model = self.model
        first = self.first_step(steps, "train")
        saver = Saver(model, self.directory, self.config, self._position)
        if saver.restore() is None:
            self.initialize(model)
        self.global_step = int(model.global_step.numpy())
        last = self.last_step(self.global_step)
        if last is not None and self.global_step >= last:
            _logger.info("Training is skipped: step %d was the last.", self.global_step)
            saver.close()
            return
        self.start_hooks()
        self._loop(steps, self._skip_steps(steps, first), saver, last)
        model.finalize()
        self._position.num_steps = 0  # The next call restarts its input.
        self.has_ended = True
        self._save(saver, wait=True)
        for hook in self.hooks:
            hook.end(self)
        for listener in self.listeners:
            listener.end(self, self.global_step)
        saver.close()

    def _skip_steps(self, steps: Steps, first: Step) -> Step | None:
        """Skip the steps of a training that this one resumes; return the next step."""
        num_skipped = self._position.num_steps
        self._position.num_steps = 0
        is_resumed = num_skipped and not self.model.is_asynchronous
        if is_resumed and self.config.restore_input:
            # `first`, one of the steps to skip, is already read.
            step = next(itertools.islice(steps, num_skipped - 1, None), None)
            _logger.warning(
                "Estimator.train: the last training was interrupted after %d steps of "
                "its input. Training skips these steps%s. To restart the input, give "
                "RunConfig(restore_input=False).",
                num_skipped,
                ", and no step is left" if step is None else "",
            )
            self._position.num_steps = num_skipped
            return step
        return first

    def _loop(
        self, steps: Steps, step: Step | None, saver: Saver, last: int | None
    ) -> None:
        timer = None
        if self.config.log_step_count_steps is not None:
            timer = Interval(self.config.log_step_count_steps, None, "RunConfig")
        losses: collections.deque[rx.PerReplica] = collections.deque()
        while step is not None:
            losses.append(self.run_step(*step)["loss"])
            if len(losses) > _MAX_IN_FLIGHT:
                jax.block_until_ready(losses.popleft())
            if timer is not None and timer.is_due(self.global_step):
                self._log(losses[-1], timer.restart(self.global_step))
            is_last = last is not None and self.global_step >= last
            if is_last or self._save_if_due(saver, losses[-1]):
                break
            step = next(steps, None)
        if losses:
            require_finite(first_replica(losses[-1]), self.global_step)

    def _log(self, loss: rx.PerReplica, elapsed: tuple[int, float] | None) -> None:
        """Log loss and speed, given the steps and seconds since the last log line."""
        value, step = first_replica(loss), self.global_step
        require_finite(value, step)
        speed = ""
        if elapsed is not None:
            speed = f", {elapsed[0] / max(elapsed[1], 1e-9):.4g} steps/s"
        _logger.info("loss = %.8g, step = %d%s", value, step, speed)

    def _step(self, features: Features, labels: Labels) -> dict[str, rx.PerReplica]:
        model = self.model
        tensors = super()._step(features, labels)
        self._position.num_steps += 1
        if model.is_asynchronous:  # The step counts the updates of all workers.
            self.global_step = model.num_updates()
            model.global_step.assign(self.global_step)
        else:
            self.global_step += 1
        return tensors

    def _save_if_due(self, saver: Saver, loss: rx.PerReplica) -> bool:
        """Save if the interval has passed; return whether to stop."""
        workers = self.model.strategy.workers
        due, stop = saver.interval.is_due(self.global_step), self.stop_requested
        if workers.count > 1:
            # Clocks and hooks of workers may differ: the workers decide together.
            if self._position.num_steps % _AGREE_EVERY == 0:
                answers = workers.exchange("replicax_estimator.agree", [due, stop])
                due, stop = answers[0][0], any(x for _, x in answers)
            else:
                due = due and self.config.save_checkpoints_steps is not None
                stop = False
        if due and not stop:
            require_finite(first_replica(loss), self.global_step)
            self._save(saver, wait=bool(self.listeners))
            stop = self.stop_requested and workers.count == 1
        return stop

    def _save(self, saver: Saver, *, wait: bool) -> None:
        for listener in self.listeners:
            listener.before_save(self, self.global_step)
        if not saver.save(self.global_step, wait=wait):
            return
        for listener in self.listeners:
            if listener.after_save(self, self.global_step):
                self.stop_requested = True
