"""Exporters: decide when `train_and_evaluate` exports, and which exports to keep."""

import abc
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from replicax.seams import storage
from replicax_estimator.arguments import require_callable, require_count
from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import EvalResults, read_eval_metrics
from replicax_estimator.export import ServingInputReceiver, require_receiver_fn
from replicax_estimator.serving import saved_models_in

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]

_logger = logging.getLogger("replicax")


class Exporter(abc.ABC):
    """Base class of exporters, which `train_and_evaluate` calls after evaluations.

    A subclass must define `name` and `export`, which is called with arguments by
    keyword. (TF: `tf.estimator.Exporter`.)

    Example:
        >>> import shutil, replicax as rx
        >>> class CheckpointExporter(rx.estimator.Exporter):
        ...     name = "checkpoint"
        ...     def export(self, export_path, checkpoint_path, **others):
        ...         return shutil.copytree(checkpoint_path, export_path)
        >>> exporter = CheckpointExporter()
    """

    name: str
    """The folder's name: exports are in `<model_dir>/export/<name>`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | None,
        eval_result: EvalResults | None,
        is_the_final_export: bool,
    ) -> str | None:
        """Export the model or decide not to; return the export's folder or None.

        Args:
            estimator: The estimator.
            export_path: This exporter's own folder.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The result of `evaluate`.
            is_the_final_export: Whether training has ended.
        """


class _SavedModelExporter(Exporter):
    """Calls `export_saved_model`, and deletes all but the newest exports."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None,
        exports_to_keep: int | None = 5,
    ) -> None:
        caller = type(self).__name__
        self._receiver_fn = require_receiver_fn(serving_input_receiver_fn, caller)
        require_count(exports_to_keep, f"{caller}: exports_to_keep", or_none=True)
        self.name = name
        self._num_kept = exports_to_keep

    def export(
        self,
        estimator: Estimator,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | None,
        eval_result: EvalResults | None,
        is_the_final_export: bool,
    ) -> str | None:
        """See the base class."""
        if not self._should_export(estimator, eval_result or {}, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path, self._receiver_fn, checkpoint_path
        )
        if self._num_kept is not None:
            storage.remove(saved_models_in(Path(export_path))[: -self._num_kept])
        return path

    def _should_export(
        self, estimator: Estimator, eval_result: EvalResults, is_final: bool
    ) -> bool:
        """Whether to export after this evaluation."""
        return True


class FinalExporter(_SavedModelExporter):
    """Exports once, when training has ended.

    It keeps all exports. See `LatestExporter` for the arguments.

    Example:
        >>> import replicax as rx
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn({"x": [1.0]})
        >>> exporter = rx.estimator.FinalExporter("final", receiver_fn)
    """

    def __init__(
        self, name: str, serving_input_receiver_fn: Callable[[], ServingInputReceiver]
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, exports_to_keep=None)

    def _should_export(
        self, estimator: Estimator, eval_result: EvalResults, is_final: bool
    ) -> bool:
        return is_final


class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation.

    Args:
        name: Name of the folder with the exports.
        serving_input_receiver_fn: As for `Estimator.export_saved_model`.
        exports_to_keep: Number of newest exports to keep; None: all.

    Example:
        >>> import replicax as rx
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn({"x": [1.0]})
        >>> exporter = rx.estimator.LatestExporter("latest", receiver_fn)
    """


class BestExporter(_SavedModelExporter):
    """Exports when an evaluation is better than all earlier ones.

    Evaluations of earlier processes, in `estimator.eval_dir(eval_name)`, count too: a
    restart does not export a worse model. Other arguments are `LatestExporter`'s.

    Args:
        name: Name of the folder with the exports.
        compare_fn: Called with `best_eval_result` and `current_eval_result`, both dicts
            of metrics; returns whether the current one is better. None: whether its
            `"loss"` is smaller.
        eval_name: The name of the evaluations, as in `EvalSpec(name=...)`.

    Example:
        >>> import replicax as rx
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn({"x": [1.0]})
        >>> def is_more_accurate(best_eval_result, current_eval_result):
        ...     return current_eval_result["accuracy"] > best_eval_result["accuracy"]
        >>> exporter = rx.estimator.BestExporter("best", receiver_fn, is_more_accurate)
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None = None,
        compare_fn: Callable[..., bool] | None = None,
        exports_to_keep: int | None = 5,
        *,
        eval_name: str | None = None,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, exports_to_keep)
        if compare_fn is not None:
            require_callable(compare_fn, "BestExporter: compare_fn")
        self._is_better = compare_fn or _has_smaller_loss
        self._eval_name = eval_name
        self._best: EvalResults | None = None
        self._model_dir: str | None = None

    def _should_export(
        self, estimator: Estimator, eval_result: EvalResults, is_final: bool
    ) -> bool:
        if self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = None
            results = read_eval_metrics(estimator.eval_dir(self._eval_name))
            results.pop(eval_result.get("global_step", -1), None)  # The current one.
            for step, metrics in results.items():
                self._keep_if_better(metrics | {"global_step": step})
            _logger.info("BestExporter: the best evaluation so far is %s.", self._best)
        return self._keep_if_better(dict(eval_result))

    def _keep_if_better(self, result: EvalResults) -> bool:
        """Keep `result` if it is the best evaluation so far; return whether it is."""
        is_best = self._best is None or bool(
            self._is_better(best_eval_result=self._best, current_eval_result=result)
        )
        if is_best:
            self._best = result
        return is_best


def _has_smaller_loss(
    best_eval_result: EvalResults, current_eval_result: EvalResults
) -> bool:
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return current < best or (math.isnan(best) and not math.isnan(current))
