"""`train_and_evaluate`: trains and evaluates in one process or in a cluster's tasks."""

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import replicax as rx
from replicax.seams import CheckpointWatch
from replicax_estimator.arguments import require_callable, require_count
from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import EvalResults
from replicax_estimator.exporters import Exporter
from replicax_estimator.hooks import (
    CheckpointSaverListener,
    HookSession,
    SessionRunHook,
)
from replicax_estimator.saving import CHECKPOINT_NAME
from replicax_estimator.types import InputFunction

__all__ = ["EvalSpec", "TrainSpec", "train_and_evaluate"]

_POLL_SECONDS = 0.5
_INPUT_FN_REMEDY = "Write input_fn=lambda: dataset."

_logger = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """Arguments of the training by `train_and_evaluate` (TF: `tf.estimator.TrainSpec`).

    Args:
        input_fn: As for `Estimator.train`.
        max_steps: The global step to end at; None: until the input ends.
        hooks: `SessionRunHook`s, on all workers.
        saving_listeners: `CheckpointSaverListener`s.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> spec = rx.estimator.TrainSpec(lambda: batch, max_steps=1000)
    """

    input_fn: InputFunction
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] | None = ()
    saving_listeners: Sequence[CheckpointSaverListener] | None = ()

    def __post_init__(self) -> None:
        require_callable(self.input_fn, "TrainSpec: input_fn", _INPUT_FN_REMEDY)
        require_count(self.max_steps, "TrainSpec: max_steps", or_none=True)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """Arguments of the evaluations by `train_and_evaluate`.

    (TF: `tf.estimator.EvalSpec`.)

    Args:
        input_fn: As for `Estimator.evaluate`.
        steps: Number of steps; None: until the input ends.
        name: As for `Estimator.evaluate`.
        hooks: `SessionRunHook`s.
        exporters: `Exporter`s, called after each evaluation.
        start_delay_secs: Seconds that an evaluator task waits before it begins.
        throttle_secs: Least number of seconds between two evaluations.
        timeouts: An evaluator waits `timeouts.checkpoint` for a new checkpoint.
            Defaults to `rx.Timeouts()`.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> spec = rx.estimator.EvalSpec(lambda: batch, steps=1, throttle_secs=60)
    """

    input_fn: InputFunction
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = ()
    exporters: Exporter | Sequence[Exporter] | None = ()
    start_delay_secs: float = 120.0
    throttle_secs: float = 600.0
    timeouts: rx.Timeouts = dataclasses.field(default_factory=rx.Timeouts)

    def __post_init__(self) -> None:
        require_callable(self.input_fn, "EvalSpec: input_fn", _INPUT_FN_REMEDY)
        require_count(self.steps, "EvalSpec: steps", or_none=True)
        names = [exporter.name for exporter in _exporters(self)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"EvalSpec: exporters must have different names; got {names}."
            )


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[EvalResults | None, list[str | None]] | None:
    """Train, and evaluate the checkpoints that training saves.

    A single process evaluates after saves, at most every `throttle_secs`, and at the
    end. In a cluster that TF_CONFIG describes, `chief` and `worker` tasks train with
    the config's `train_distribute`; an `evaluator` task evaluates their checkpoints
    until training has ended; a `ps` task serves parameters in the constructor of
    `rx.ParameterServerStrategy`. All tasks need the same `model_dir` on shared storage.

    Returns:
        In a process that evaluates, the last evaluation's results and the exporters'
        results for it; else None.

    Raises:
        CheckpointError: In an evaluator, if no new checkpoint comes in time.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> train_spec = rx.estimator.TrainSpec(lambda: batch, max_steps=5)
        >>> eval_spec = rx.estimator.EvalSpec(lambda: batch)
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> results, exports = train_and_evaluate(estimator, train_spec, eval_spec)
        >>> results["global_step"], exports
        (5, [])
    """
    config = estimator.config
    cluster = config.cluster_spec
    evaluation = _Evaluations(estimator, train_spec, eval_spec)
    listeners = [*(train_spec.saving_listeners or ())]
    arguments = (train_spec.input_fn, train_spec.hooks, None, train_spec.max_steps)
    if sum(map(cluster.num_tasks, cluster.jobs)) <= 1:
        estimator.train(*arguments, [*listeners, evaluation])
        if evaluation.results is None:  # There was nothing left to train.
            evaluation.end(None, 0)
        return evaluation.results, evaluation.exports
    _check_cluster(estimator, cluster)
    if config.task_type == "evaluator":
        evaluation.run_until_finished()
        return evaluation.results, evaluation.exports
    if "evaluator" not in cluster.jobs and config.is_chief:
        _logger.warning(
            "train_and_evaluate: the cluster has no evaluator task, so nothing is "
            "evaluated. Add such a task, or call evaluate when training has ended."
        )
    estimator.train(*arguments, listeners)
    return None


class _Evaluations(CheckpointSaverListener):
    """Evaluates and exports: after this process' saves, or in an evaluator task."""

    def __init__(
        self, estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> None:
        self.results: EvalResults | None = None
        self.exports: list[str | None] = []
        self._estimator = estimator
        self._max_steps = train_spec.max_steps
        self._spec = eval_spec
        self._last_time: float | None = None

    def after_save(self, session: HookSession, global_step_value: int) -> None:
        """Evaluate if `throttle_secs` have passed; after the last save, `end` does."""
        elapsed = time.monotonic() - (self._last_time or 0.0)
        is_due = self._last_time is None or elapsed >= self._spec.throttle_secs
        if is_due and not session.has_ended:
            self._evaluate(None, is_final=False)

    def end(self, session: HookSession | None, global_step_value: int) -> None:
        """Evaluate the last checkpoint."""
        self._evaluate(None, is_final=True)

    def run_until_finished(self) -> None:
        """Evaluate the checkpoints of a training in other processes."""
        watch = CheckpointWatch(
            Path(self._estimator.model_dir),
            CHECKPOINT_NAME,
            self._spec.timeouts.checkpoint,
            "train_and_evaluate",
        )
        _wait(self._spec.start_delay_secs, watch)
        path, is_final = None, False
        while not is_final and (checkpoint := watch.next()) is not None:
            path, contents = os.fspath(checkpoint[0]), checkpoint[1]
            step = int(contents.arrays["global_step"].read())
            is_final = watch.is_at_end or (
                self._max_steps is not None and step >= self._max_steps
            )
            try:
                self._evaluate(path, is_final=is_final)
            except rx.CheckpointError:
                if is_final or Path(path).exists():
                    raise
                _logger.warning(
                    "train_and_evaluate: %s was deleted before its evaluation. Raise "
                    "keep_checkpoint_max to keep checkpoints longer.",
                    path,
                )
                continue
            if not is_final:
                _wait(self._spec.throttle_secs, watch)
        if path is not None and not is_final:
            # Training saved no further checkpoint: the last one evaluated is final.
            self._export(path, is_final=True)

    def _evaluate(self, path: str | None, *, is_final: bool) -> None:
        spec, estimator = self._spec, self._estimator
        path = path or estimator.latest_checkpoint()
        self.results = estimator.evaluate(
            spec.input_fn, spec.steps, spec.hooks, path, spec.name
        )
        self._last_time = time.monotonic()
        self._export(path, is_final=is_final)

    def _export(self, path: str | None, *, is_final: bool) -> None:
        folder = os.path.join(self._estimator.model_dir, "export")
        self.exports = [
            exporter.export(
                estimator=self._estimator,
                export_path=os.path.join(folder, exporter.name),
                checkpoint_path=path,
                eval_result=self.results,
                is_the_final_export=is_final,
            )
            for exporter in _exporters(self._spec)
        ]


def _exporters(spec: EvalSpec) -> tuple[Exporter, ...]:
    exporters = spec.exporters or ()
    return (exporters,) if isinstance(exporters, Exporter) else tuple(exporters)


def _wait(seconds: float, watch: CheckpointWatch) -> None:
    """Sleep for `seconds`, or until training ends."""
    deadline = time.monotonic() + seconds
    while not watch.is_finished and time.monotonic() < deadline:
        time.sleep(min(_POLL_SECONDS, seconds))


def _check_cluster(estimator: Estimator, cluster: rx.ClusterSpec) -> None:
    config = estimator.config
    strategy = config.train_distribute
    if estimator.is_temporary:
        raise ValueError(
            "train_and_evaluate: the cluster has several tasks, but the estimator has "
            "no model_dir. Give it a model_dir that all tasks share."
        )
    if not hasattr(strategy, "cluster_resolver"):
        raise ValueError(
            f"train_and_evaluate: TF_CONFIG describes the tasks {cluster.as_dict()}, "
            f"and train_distribute={strategy!r} trains in one process. Give "
            "rx.MultiWorkerMirroredStrategy() or rx.ParameterServerStrategy()."
        )
